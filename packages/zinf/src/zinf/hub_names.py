"""Names in a file against names in the model, where transformers' `from_pretrained` knows how they differ.

A model with a head has its body under one attribute, `base_model_prefix` ("transformer", "model"). Files of the body
alone lack that prefix, and for the body alone the prefix is too much. Of names that older versions saved and no model
needs any more, a class has a list of patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

from torch import nn


def names_in_model(model: nn.Module, own: Set[str], stored: Iterable[str]) -> dict[str, str]:
    """{name in the model: stored name}; a stored name that belongs to nothing stands for itself.

    own   names of the model's parameters and buffers

    What the class lists as superfluous is left out.
    """
    stored = list(stored)
    prefix = getattr(model, "base_model_prefix", "")
    superfluous = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found = {name: name for name in stored if name in own}  # names that fit as they are come first
    for name in stored:
        if name in own:
            continue
        fitting = _with_or_without(prefix, name) if isinstance(prefix, str) and prefix else name
        if fitting in own and fitting not in found:
            found[fitting] = name
        elif not any(re.search(pattern, name) for pattern in superfluous):
            found[name] = name
    return found


def _with_or_without(prefix: str, name: str) -> str:
    return name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"

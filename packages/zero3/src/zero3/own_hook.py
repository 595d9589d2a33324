"""Hooks that belong to this model only: a copy of the module (deepcopy, pickle) is a plain one and has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class OwnHook(functools.partial):
    """`functools.partial` whose copies do nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple:
        return _find_nothing, ()


def nothing(*_: Any) -> None:
    """What a copied module has in place of the hook."""


def _find_nothing() -> Callable[..., None]:
    return nothing

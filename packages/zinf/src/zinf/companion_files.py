"""What lies beside a pretrained model's weights: its configuration, its tokenizer and the like.

Small text files, kept with the model from `load_pretrained` on, so that what is exported, even from a checkpoint on
another machine, is a directory that loads as the one did that it came from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError
from .named_file import named_file

Companions = dict[str, bytes]
"""Name -> content."""

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_OURS = ".index.json"  # says in which file which weight lies: of the files that were read, not of those we write
_CONFIG = "config.json"
_TENSOR_PREFIX = "file."


def read_companions(folder: Path) -> Companions:
    """All companions in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and _is_one(path.name)}


def write_companions(companions: Mapping[str, bytes], folder: Path, dtypes: Iterable[torch.dtype]) -> None:
    """Put companions beside weights of `dtypes`; a configuration then names the dtype of these weights."""
    floating = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    for name, content in companions.items():
        if name == _CONFIG and floating is not None:
            content = _with_dtype(content, floating)
        beside = folder / f".{name}"
        with named_file(beside):
            beside.write_bytes(content)
        os.replace(beside, folder / name)


def to_tensors(companions: Mapping[str, bytes]) -> dict[str, Tensor]:
    """As tensors of bytes, for a checkpoint."""
    return {
        f"{_TENSOR_PREFIX}{name}": torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for name, content in companions.items()
        if content
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> Companions:
    """The inverse of `to_tensors`. CheckpointError for a name that is not one of a companion."""
    companions = {}
    for key, tensor in tensors.items():
        if key.startswith(_TENSOR_PREFIX):
            name = key.removeprefix(_TENSOR_PREFIX)
            if not _is_one(name) or tensor.dtype is not torch.uint8:
                raise CheckpointError(f"the checkpoint holds a file {name!r}, which is none that lies beside weights")
            companions[name] = tensor.numpy().tobytes()
    return companions


def _is_one(name: str) -> bool:
    return (
        os.path.basename(name) == name
        and not name.startswith(".")
        and name.endswith(_SUFFIXES)
        and not name.endswith(_NOT_OURS)
    )


def _with_dtype(content: bytes, dtype: torch.dtype) -> bytes:
    """transformers loads weights in the dtype that the configuration names: it must be theirs."""
    try:
        config = json.loads(content)
    except ValueError:
        return content
    named = [key for key in ("dtype", "torch_dtype") if isinstance(config, dict) and key in config]
    for key in named:
        config[key] = str(dtype).removeprefix("torch.")
    return json.dumps(config, indent=2).encode() + b"\n" if named else content

"""Element types by name: how each is called by NumPy, the buffer protocol and DLPack."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

# DLPack's type codes
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_FLOAT8 = {"float8_e4m3fn": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14}


@dataclass(frozen=True)
class DType:
    name: str  # as torch and jax call it
    itemsize: int  # bytes
    numpy: str  # NumPy's name of it, or of the unsigned integer that holds its bits
    format: str  # of the buffer protocol
    dlpack_code: int


def _native(name: str, code: int) -> DType:
    dtype = np.dtype(name)
    format = {"complex64": "Zf", "complex128": "Zd", "bool": "?"}.get(name, dtype.char)
    return DType(name, dtype.itemsize, name, format, code)


_TABLE = {
    d.name: d
    for d in (
        *(_native(n, _INT) for n in ("int8", "int16", "int32", "int64")),
        *(_native(n, _UINT) for n in ("uint8", "uint16", "uint32", "uint64")),
        *(_native(n, _FLOAT) for n in ("float16", "float32", "float64")),
        *(_native(n, _COMPLEX) for n in ("complex64", "complex128")),
        _native("bool", _BOOL),
        DType("bfloat16", 2, "uint16", "H", _BFLOAT),
        *(DType(n, 1, "uint8", "B", code) for n, code in _FLOAT8.items()),
    )
}


def dtype_named(dtype: Any) -> DType:
    """The entry of a name, a NumPy dtype, a torch dtype or a jax one. ValueError when there is none, or for NumPy's
    of the other byte order."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype)
    name = name.removeprefix("torch.")
    if name not in _TABLE:
        with contextlib.suppress(TypeError):
            dtype = np.dtype(dtype)  # abbreviations ("f4"), Python types (float)
            name = dtype.name
    if not getattr(dtype, "isnative", True):  # ">f4" is no "float32", though NumPy names it so
        raise ValueError(f"dtype {dtype!r} has the byte order of another machine: convert the array, .astype({name!r})")
    if name not in _TABLE:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_TABLE)}")
    return _TABLE[name]


def torch_dtype(name: str) -> Any:
    """torch's dtype object of that name; torch must have been imported or be importable."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {name}")
    return found


def is_torch_tensor(array: Any) -> bool:
    """Without importing torch: who has a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)

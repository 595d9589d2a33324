"""Any array -> address, dtype, shape. The only file that knows array libraries and DLPack.

Nothing is copied: a view is taken or the array is refused. torch is never imported, only recognised.
"""

import ctypes
import itertools
import sys
from typing import Any, NamedTuple

import numpy

from cpu_adam import errors
from cpu_adam._kernel import ffi, lib

# dtype name -> how the C side calls it. numpy has no bfloat16, so uint16 stands for its bit patterns.
FORMATS = {
    "float32": lib.ADAM_FP32,
    "bfloat16": lib.ADAM_BF16,
    "uint16": lib.ADAM_BF16,
    "float16": lib.ADAM_FP16,
}
ITEMSIZES = {"float32": 4, "bfloat16": 2, "uint16": 2, "float16": 2, "int16": 2}


class Array(NamedTuple):
    """A contiguous array in host memory."""

    name: str  # of the argument, for messages
    address: int
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    numel: int
    writable: bool
    owner: Any  # must live as long as the address is used

    @property
    def pointer(self) -> Any:  # void *
        return ffi.cast("void *", self.address)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


def is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def describe(name: str, array: Any) -> Array:
    """Looks at one argument.

    Raises TypeError if it is no array or not in host memory, ValueError if it is not contiguous or has no memory.
    """
    if is_torch(array):
        return _of_torch(name, array)
    if isinstance(array, numpy.ndarray):
        return _of_numpy(name, array, array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(name, array)
    try:
        view = memoryview(array)
    except TypeError:
        raise errors.not_an_array(name, array) from None
    if not view.c_contiguous:
        raise errors.not_dense(name, "not contiguous")
    return _of_numpy(name, numpy.asarray(view), array)


def require(
    array: Array, dtypes: tuple[str, ...], *, writable: bool = False, shape: tuple[int, ...] | None = None
) -> None:
    """Raises TypeError: another dtype, or a read-only array; ValueError: another shape, or an odd address."""
    if array.dtype not in dtypes:
        raise errors.wrong_dtype(array.name, array.dtype, " or ".join(dtypes))
    if writable and not array.writable:
        raise errors.read_only(array.name)
    if shape is not None and array.shape != shape:
        raise errors.wrong_shape(array.name, tuple(array.shape), tuple(shape))
    if array.address % ITEMSIZES[array.dtype]:
        raise errors.misaligned(array.name, array.address, ITEMSIZES[array.dtype])


def require_apart(arrays: list[Array]) -> None:
    """Raises ValueError if two arrays share memory. Empty ones share nothing."""
    in_order = sorted((array.address, array.nbytes, array.name) for array in arrays if array.numel)
    for (start, nbytes, name), (next_start, _, next_name) in itertools.pairwise(in_order):
        if start + nbytes > next_start:
            raise errors.overlapping(name, next_name)


# ---- torch ----

_torch_dtype_names: dict[Any, str] = {}  # filled as dtypes are met: str(dtype) is slow


def _of_torch(name: str, tensor: Any) -> Array:
    if tensor.device.type != "cpu":
        raise errors.wrong_device(name, str(tensor.device))
    if tensor.layout is not sys.modules["torch"].strided:
        raise errors.not_dense(name, f"sparse ({tensor.layout})")
    if not tensor.is_contiguous():
        raise errors.not_dense(name, f"not contiguous (strides {tuple(tensor.stride())})")
    if tensor.is_neg():  # memory holds the opposite of the values
        raise errors.not_dense(name, "a view that torch negates lazily")
    dtype = _torch_dtype_names.get(tensor.dtype)
    if dtype is None:
        dtype = _torch_dtype_names[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    numel = tensor.numel()
    address = tensor.data_ptr() if numel else 0
    if numel:
        end = (tensor.storage_offset() + numel) * tensor.itemsize  # within the storage, unless that was resized
        if not address or tensor.untyped_storage().nbytes() < end:
            raise errors.without_memory(name)
    return Array(name, address, dtype, tensor.shape, numel, True, tensor)


# ---- numpy ----


def _of_numpy(name: str, array: numpy.ndarray, owner: Any) -> Array:
    if not array.flags.c_contiguous:
        raise errors.not_dense(name, f"not contiguous (strides {array.strides})")
    dtype = array.dtype.name if array.dtype.isnative else str(array.dtype)  # ">f4" is no "float32"
    address, read_only = array.__array_interface__["data"]
    return Array(name, address, dtype, array.shape, array.size, not read_only, owner)


# ---- DLPack: https://dmlc.github.io/dlpack/latest/c_api.html ----


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_READ_ONLY_FLAG = 1
_HOST_DEVICES = {1: "CPU", 3: "CUDA host"}  # the second: host memory pinned for an accelerator
_DTYPES = {
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (0, 16): "int16",
    (1, 16): "uint16",
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _of_dlpack(name: str, array: Any) -> Array:
    try:
        device, _ = array.__dlpack_device__()
    except AttributeError:  # a value that jax traces, for one
        raise errors.not_an_array(name, array) from None
    if device not in _HOST_DEVICES:
        raise errors.wrong_device(name, f"DLPack type {int(device)}")
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0 has no such argument
        capsule = array.__dlpack__()
    # The capsule is never marked as consumed, so it frees its tensor itself when it is dropped.
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, writable = managed.dl_tensor, not managed.flags & _READ_ONLY_FLAG
    else:
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        writable = _is_writable_buffer(array)  # before DLPack 1.0 it could not be told
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_contiguous(shape, tuple(tensor.strides[: tensor.ndim])):
        raise errors.not_dense(name, f"not contiguous (strides {tuple(tensor.strides[: tensor.ndim])})")
    code, bits = tensor.code, tensor.bits
    dtype = _DTYPES.get((code, bits), f"DLPack code {code} with {bits} bits") if tensor.lanes == 1 else "a vector"
    address = (tensor.data or 0) + tensor.byte_offset
    numel = 1
    for extent in shape:
        numel *= extent
    return Array(name, address, dtype, shape, numel, writable, (array, capsule))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _is_writable_buffer(array: Any) -> bool:
    try:
        return not memoryview(array).readonly
    except (TypeError, ValueError, BufferError):
        return False

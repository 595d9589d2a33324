"""Any array -> address, nbytes, whether it may be written, and what keeps it alive.

The only file that knows how arrays of other libraries present themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _core
from .aligned_buffer import Buffer
from .dtypes import DType, dtype_named, is_torch_tensor
from .errors import ClosedError

# DLPack's device types whose memory the CPU addresses: CPU, and host memory pinned by CUDA or ROCm.
_HOST_DEVICES = (1, 3, 11)


class HostArray(NamedTuple):
    """Contiguous host memory of someone's array."""

    address: int
    nbytes: int
    read_only: bool
    owner: object  # holding it keeps the memory where it is


def describe(array: Any) -> HostArray:
    """Where an array lies. TypeError: no array, or not in host memory; ValueError: not contiguous (row-major)."""
    if isinstance(array, Buffer):
        if array.released:
            raise ClosedError("the Buffer was given back to its Pool")
        return HostArray(array.address, array.nbytes, False, array)
    if is_torch_tensor(array):
        return _describe_torch(array)
    if isinstance(array, np.ndarray):
        return _describe_numpy(array)
    if hasattr(array, "__dlpack__"):
        return _describe_dlpack(array)
    return _describe_buffer(array)


def describe_writable(array: Any) -> HostArray:
    """`describe` of an array that is to be filled. TypeError also: it is read-only."""
    found = describe(array)
    if found.read_only:
        raise TypeError(f"cannot read into {_words(array)}: it is read-only")
    return found


def _describe_torch(tensor: Any) -> HostArray:
    # Not through DLPack, which refuses tensors that require grad and some element types.
    device = tensor.device.type
    if device != "cpu":
        raise TypeError(f"{_words(tensor)} is on device {tensor.device}: copy it to the CPU first")
    if str(tensor.layout) != "torch.strided":
        raise TypeError(f"{_words(tensor)} has layout {tensor.layout}: only dense tensors can be transferred")
    if not tensor.is_contiguous():
        raise ValueError(f"{_words(tensor)} is not contiguous (strides {tuple(tensor.stride())}): call .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{_words(tensor)} is a lazy conjugate or negative: call .resolve_conj().resolve_neg()")
    # The storage, not the tensor, is what keeps the memory: `tensor.data = other` lets go of it. Of tensors alone there
    # is a count, by which others may tell that the memory is in use.
    storage = tensor.untyped_storage()
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes and (not address or storage.nbytes() < tensor.storage_offset() * tensor.itemsize + nbytes):
        raise ValueError(
            f"{_words(tensor)} has no memory behind its {nbytes} bytes: its storage was resized, or it only stands "
            f"for other tensors (of a DTensor, transfer .to_local())"
        )
    return HostArray(address, nbytes, False, (tensor, storage))


def _describe_numpy(array: np.ndarray) -> HostArray:
    if array.dtype.hasobject:
        raise TypeError(f"{_words(array)} holds Python objects")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{_words(array)} is not contiguous (strides {array.strides}): use numpy.ascontiguousarray"
        )
    address, read_only = array.__array_interface__["data"]
    return HostArray(address, array.nbytes, read_only, array)


def _describe_dlpack(array: Any) -> HostArray:
    try:
        device_type, device_id = array.__dlpack_device__()
    except AttributeError:  # a value that jax traces, for one
        raise TypeError(f"{_words(array)} is no array in memory: it has no __dlpack_device__") from None
    if device_type not in _HOST_DEVICES:
        raise TypeError(
            f"{_words(array)} is not in host memory (DLPack device {int(device_type)}:{device_id}): copy it there first"
        )
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before versions
        capsule = array.__dlpack__()
    address, shape, strides, itemsize, read_only = _core.describe_dlpack(capsule)
    nbytes = _dense_nbytes(array, shape, strides, itemsize)
    # jax arrays are immutable, whether or not this version of jax says so in the capsule.
    read_only = read_only or type(array).__module__.split(".")[0] in ("jax", "jaxlib")
    return HostArray(address, nbytes, read_only, (array, capsule))


def _describe_buffer(array: Any) -> HostArray:
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(
            f"{type(array).__name__} is not an array: it has neither __dlpack__ nor the buffer protocol"
        ) from None
    address, shape, strides, itemsize, read_only = _core.describe_buffer(view)
    return HostArray(address, _dense_nbytes(array, shape, strides, itemsize), read_only, view)


def _dense_nbytes(array: Any, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes of a row-major array without gaps; ValueError for any other."""
    nbytes = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != nbytes and 0 not in shape:
            raise ValueError(f"{_words(array)} is not contiguous (strides in bytes {strides}): make a contiguous copy")
        nbytes *= extent
    return nbytes


def _words(array: Any) -> str:
    kind = f"{type(array).__module__.split('.')[0]}.{type(array).__name__}"
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None:
        return kind
    return f"{kind} of shape {tuple(shape)}" + (f" and dtype {str(dtype).removeprefix('torch.')}" if dtype else "")


def dtype_and_shape(array: Any) -> tuple[DType, tuple[int, ...]]:
    """What a Swap keeps beside the bytes. ValueError: no dtype that it knows."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        array = np.asarray(memoryview(array))
    return dtype_named(array.dtype), tuple(array.shape)


def made_contiguous(array: Any) -> Any:
    """The array, or a row-major copy of one that is not contiguous."""
    if is_torch_tensor(array) and str(array.layout) == "torch.strided":  # of others, describe() says what is wrong
        return array.detach().contiguous().resolve_conj().resolve_neg()
    if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
        return array.copy(order="C")
    return array

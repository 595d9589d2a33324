"""How refusals are worded: what was given, what is needed, what to do. One sentence each, one place.

TypeError: the wrong kind of thing (dtype, device, read-only). ValueError: the right kind with a wrong value
(size, shape, contiguity, overlap, a hyperparameter out of range).
"""

from collections.abc import Set


def not_an_array(name: str, found: object) -> TypeError:
    return TypeError(
        f"{name} is a {type(found).__name__}; an array is needed (a torch tensor, a numpy array, or anything "
        "with __dlpack__ or the buffer protocol)"
    )


def wrong_dtype(name: str, found: str, needed: str) -> TypeError:
    return TypeError(f"{name} has dtype {found}; {needed} is needed")


def wrong_device(name: str, found: str) -> TypeError:
    return TypeError(f"{name} is on device {found}; cpu_adam works on the CPU: move it there with .cpu()")


def read_only(name: str) -> TypeError:
    return TypeError(
        f"{name} is read-only and would be updated in place; pass a writable array, for a JAX array a copy: "
        "numpy.array(x), or use cpu_adam.optax.adamw, which returns new arrays"
    )


def not_dense(name: str, found: str) -> ValueError:
    return ValueError(f"{name} is {found}; a contiguous array is needed: .contiguous() or a flat view")


def without_memory(name: str) -> ValueError:
    return ValueError(
        f"{name} has no memory behind its elements: its storage was resized, or it only stands for other tensors "
        "(of a DTensor, pass .to_local())"
    )


def misaligned(name: str, address: int, itemsize: int) -> ValueError:
    return ValueError(f"{name} lies at address {address:#x}, which is no multiple of its element's {itemsize} bytes")


def wrong_shape(name: str, found: tuple[int, ...], needed: tuple[int, ...]) -> ValueError:
    return ValueError(f"{name} has shape {found}; {needed}, the shape of param, is needed")


def overlapping(first: str, second: str) -> ValueError:
    return ValueError(f"{first} and {second} share memory; each array of one call needs its own")


def not_a_number(name: str, found: object, needed: str) -> TypeError:
    return TypeError(f"{name} is {found!r}; {needed} is needed")


def out_of_range(name: str, found: object, needed: str) -> ValueError:
    return ValueError(f"{name} is {found}; it must be {needed}")


def unknown_keys(segment: tuple[int, int], found: Set[str], known: Set[str]) -> ValueError:
    unknown = ", ".join(sorted(map(repr, found)))
    return ValueError(f"segment {segment} sets {unknown}, which is unknown; known: {', '.join(sorted(known))}")


def overlapping_segments(first: tuple[int, int], second: tuple[int, int]) -> ValueError:
    return ValueError(f"segments {first} and {second} overlap; each element may have one")


def isa_unavailable(found: object, available: tuple[str, ...]) -> ValueError:
    return ValueError(f"isa={found!r} cannot run on this CPU; available: {', '.join(available)}")

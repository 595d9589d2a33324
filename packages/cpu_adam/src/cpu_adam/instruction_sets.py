"""Which compiled kernels there are, which of them this CPU runs, and which one a call uses."""

from cpu_adam import errors
from cpu_adam._kernel import ffi, lib


def _compiled() -> list[str]:
    """Names in the order of the C table (dispatch.c), best first."""
    names: list[str] = []
    while (name := lib.adam_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names


# name -> index in the C table, best first
_RUNNABLE = {name: index for index, name in enumerate(_compiled()) if lib.adam_isa_runs(index)}
_BEST = next(iter(_RUNNABLE.values()))


def isas() -> tuple[str, ...]:
    """The instruction sets this CPU runs, best first: of "avx512", "avx2", "neon", "generic"."""
    return tuple(_RUNNABLE)


def isa() -> str:
    """The instruction set used where a call names none."""
    return next(iter(_RUNNABLE))


def index_of(name: str | None) -> int:
    """Index in the C table; None: the best. Raises ValueError, with those there are, for any other."""
    if name is None:
        return _BEST
    try:
        return _RUNNABLE[name]
    except (KeyError, TypeError):
        raise errors.isa_unavailable(name, isas()) from None

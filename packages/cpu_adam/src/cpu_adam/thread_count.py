"""How many threads a call uses."""

from cpu_adam import errors
from cpu_adam._kernel import lib
from cpu_adam.scalars import whole

# Waking a thread takes up to some 40 us; so many elements take one thread that long.
LEAST_ELEMENTS_A_THREAD = 1 << 17


def thread_count(threads: int | None, numel: int) -> int:
    """`threads` as given; None: every core this process may use, fewer where the array is small.

    Raises ValueError below 1, TypeError for what is no integer.
    """
    if threads is None:
        wanted = numel // LEAST_ELEMENTS_A_THREAD
        return 1 if wanted <= 1 else min(wanted, lib.adam_cores())
    count = whole("threads", threads)
    if count < 1:
        raise errors.out_of_range("threads", threads, "at least 1")
    return min(count, 1024)

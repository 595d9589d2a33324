"""File: opened once, used again and again; striped over several drives, reserved ahead."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from . import _core
from .errors import ClosedError, io_error, open_error
from .sizes import parse_size

PathLike = str | os.PathLike[str]
Direct = bool | Literal["auto"]
FileIdentity = tuple[tuple[int, int], ...]  # (device, inode) of every member

_MODES = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w": os.O_RDWR}
_MOST_RACES = 100  # in which others create and remove a file of the same name
_CAREFUL_ALIGNMENT = (4096, 4096)  # (memory, offset), where the kernel cannot tell
# What open(O_DIRECT) answers where the filesystem cannot do it.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)

_MOST_STRIPE = 1 << 40  # so that no count of members makes a whole round overflow

_warned_devices: set[int] = set()


class File:
    """One file, or several that one is striped over, kept open for an Engine. Accepted wherever a path is.

    paths: one path, or a sequence of paths on several drives: the bytes go to them in turns of `stripe`.
    mode: "r" reads; "r+" reads and writes what exists; "w" also creates what does not. None of them truncates:
        space that was written once is faster the second time.
    size: bytes to be reserved on the drive now, all together; the file becomes at least that long.
    stripe: a multiple of 4 KiB.
    direct: True: O_DIRECT or an error; False: through the page cache; "auto": O_DIRECT where the filesystem has it,
        with a warning where it has not.

    OSError with errno and path: cannot be opened, or (ENOSPC) there is no room for `size`. ValueError: two of the paths
    are the same file.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        mode: str = "r",
        size: int | str | None = None,
        stripe: int | str = "1MiB",
        direct: Direct = "auto",
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode must be 'r', 'r+' or 'w', found {mode!r}")
        self.paths = tuple(_as_paths(paths))
        self.mode = mode
        created: list[_Created] = []
        try:
            descriptors = _open_all(self.paths, lambda path: _open(path, mode, created))
            self._open(descriptors, size, stripe, direct)
        except BaseException:
            for file in created:
                file.remove()
            raise

    @classmethod
    def anonymous(
        cls,
        dirs: PathLike | Sequence[PathLike],
        size: int | str | None = None,
        stripe: int | str = "1MiB",
        direct: Direct = "auto",
    ) -> File:
        """Private space in one directory or striped over several, which vanishes with its last user, also by a crash.

        The files have no name and mode 0600 (O_TMPFILE; where the filesystem has no such thing, a file that is
        unlinked at once).
        """
        file = cls.__new__(cls)
        dirs = tuple(_as_paths(dirs))
        file.paths = tuple(f"{directory}/(anonymous)" for directory in dirs)
        file.mode = "r+"
        file._open(_open_all(dirs, _open_anonymous), size, stripe, direct)
        return file

    def _open(self, cached: list[int], size: int | str | None, stripe: int | str, direct: Direct) -> None:
        """Completes the descriptors by direct ones and reserves; closes all of them when that fails."""
        wanted = list(cached)
        try:
            self.stripe = _check_stripe(stripe)
            status = [os.fstat(fd) for fd in cached]
            # (device, inode) of every member: the same for two Files of the same bytes.
            self.identity: FileIdentity = tuple((s.st_dev, s.st_ino) for s in status)
            self._check_distinct()
            found = _open_direct(self.paths, cached, check_direct(direct))
            wanted += found.fds
        except BaseException:
            for fd in wanted:
                os.close(fd)
            raise
        fds = found.fds or [-1] * len(cached)
        # The core needs the names for messages only, and knows text, which not every path is.
        names = [path.encode("utf-8", "backslashreplace").decode() for path in self.paths]
        members = list(zip(cached, fds, names, strict=True))
        # From here on the descriptors belong to the core, which closes them with the last request.
        self._core: _core.File | None = _core.File(members, self.stripe, *found.alignment)
        if size is not None:
            self._reserve(parse_size(size))

    def _check_distinct(self) -> None:
        """Two members in one file would overwrite each other's turns."""
        for number, path in enumerate(self.paths):
            if (first := self.identity.index(self.identity[number])) != number:
                raise ValueError(f"{path} is the same file as {self.paths[first]}: each member needs its own")

    def _reserve(self, nbytes: int) -> None:
        if self.mode == "r":
            if (present := self.size) < nbytes:
                self.close()
                raise ValueError(f"size {nbytes} of a file opened for reading, which has {present} bytes")
            return
        failure = self._open_core().reserve(nbytes)
        if failure:
            self.close()
            raise io_error(*failure)

    def _open_core(self) -> _core.File:
        if self._core is None:
            raise ClosedError(f"File {', '.join(self.paths)} is closed")
        return self._core

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (O_DIRECT)."""
        return self._open_core().direct

    @property
    def size(self) -> int:
        """Length in bytes, all members together."""
        lengths = [_length(fd) for fd in self._open_core().filenos()]
        return striped_length(lengths, self.stripe)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core is None

    def close(self) -> None:
        """Takes no further requests. Those under way are completed, and the descriptors closed behind them."""
        self._core = None

    def __enter__(self) -> File:
        self._open_core()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"direct={self.direct}"
        return f"deepnvme.File({', '.join(self.paths)!r}, {self.mode!r}, {state})"


def check_direct(direct: Any) -> Direct:
    """The setting as True, False (NumPy's and 1, 0 too) or "auto". ValueError for anything else."""
    if isinstance(direct, str):
        if direct == "auto":
            return "auto"
    elif isinstance(direct, bool | int | np.bool_) and direct in (0, 1):
        return bool(direct)
    raise ValueError(f"direct must be True, False or 'auto', found {direct!r}")


def striped_length(lengths: Sequence[int], stripe: int) -> int:
    """Bytes of a striped file whose members have these lengths: one more than the last byte's place."""
    members = len(lengths)
    if members == 1:
        return lengths[0]
    ends = [0]
    for member, length in enumerate(lengths):
        if length:
            turn, within = divmod(length - 1, stripe)
            ends.append((turn * members + member) * stripe + within + 1)
    return max(ends)


class _Direct:
    """The outcome of asking for direct descriptors: all of them, or none and why."""

    def __init__(self, fds: list[int], alignment: tuple[int, int], why_not: str = "", path: str = "") -> None:
        self.fds, self.alignment, self.why_not, self.path = fds, alignment, why_not, path


def _open_direct(paths: Sequence[str], cached: list[int], direct: Direct) -> _Direct:
    if direct is False:
        return _Direct([], _CAREFUL_ALIGNMENT)
    found = _try_direct(paths, cached)
    if not found.why_not:
        return found
    text = f"direct I/O (O_DIRECT) is not possible on {found.path}: {found.why_not}"
    if direct is True:
        raise OSError(errno.EINVAL, f"{text}; use direct='auto' or another filesystem", found.path)
    status = os.fstat(cached[0])
    # A character device such as /dev/null has no cache to avoid. A filesystem is reported once.
    if not stat.S_ISCHR(status.st_mode) and status.st_dev not in _warned_devices:
        _warned_devices.add(status.st_dev)
        warnings.warn(f"{text}; going through the page cache", RuntimeWarning, stacklevel=5)
    return found


def _try_direct(paths: Sequence[str], cached: list[int]) -> _Direct:
    fds: list[int] = []
    memory = offset = 1
    try:
        for path, fd in zip(paths, cached, strict=True):
            if not _has_blocks(fd):
                raise OSError(errno.EINVAL, "it is not a file on a drive")
            alignment = _core.direct_alignment(fd)
            if alignment is None:
                raise OSError(errno.EINVAL, "its filesystem has no direct I/O")
            memory, offset = max(memory, alignment[0]), max(offset, alignment[1])
            fds.append(_reopen(fd, path, os.O_DIRECT))
    except OSError as e:
        for fd in fds:
            os.close(fd)
        if e.errno not in _NOT_DIRECT:
            raise open_error(e, path, "opening it with O_DIRECT") from None
        return _Direct([], _CAREFUL_ALIGNMENT, e.strerror or os.strerror(e.errno), path)
    return _Direct(fds, (memory, offset))


def _reopen(fd: int, path: str, extra_flags: int) -> int:
    """A second descriptor of the same file, with other flags."""
    import fcntl

    flags = (fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE) | os.O_CLOEXEC | extra_flags
    try:
        # By way of the descriptor: `path` may be another file by now, and an anonymous one has none.
        return os.open(f"/proc/self/fd/{fd}", flags)
    except FileNotFoundError:  # no /proc here
        return os.open(path, flags)


def _open_all(names: Iterable[str], open_one: Callable[[str], int]) -> list[int]:
    """Descriptors of all; none is left open when one cannot be opened."""
    descriptors: list[int] = []
    try:
        for name in names:
            descriptors.append(open_one(name))
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    return descriptors


class _Created:
    """A file that did not exist before: what may be removed again, and nothing else under its name."""

    def __init__(self, path: str, fd: int) -> None:
        status = os.fstat(fd)
        self._path, self._identity = path, (status.st_dev, status.st_ino)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            status = os.lstat(self._path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self._path)


def _open(path: str, mode: str, created: list[_Created]) -> int:
    flags = _MODES[mode] | os.O_CLOEXEC
    try:
        for _ in range(_MOST_RACES):
            try:
                return os.open(path, flags)
            except FileNotFoundError:
                if mode != "w":
                    raise
            # A link that leads nowhere yet creates what it names, and stays itself.
            target = os.path.realpath(path) if os.path.islink(path) else path
            try:
                fd = os.open(target, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:  # somebody else was quicker
                continue
            created.append(_Created(target, fd))
            return fd
        raise OSError(errno.EEXIST, "others create and remove it all the time", path)
    except OSError as e:
        raise open_error(e, path, "opening it for " + ("reading" if mode == "r" else "writing")) from None


def _open_anonymous(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in _NO_TMPFILE or not os.path.isdir(directory):
            raise open_error(e, directory, "creating an anonymous file in it") from None
    fd, path = tempfile.mkstemp(prefix=".deepnvme-", dir=directory)
    os.unlink(path)
    return fd


def _has_blocks(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISREG(mode) or stat.S_ISBLK(mode)


def _length(fd: int) -> int:
    status = os.fstat(fd)
    return os.lseek(fd, 0, os.SEEK_END) if stat.S_ISBLK(status.st_mode) else status.st_size


def _check_stripe(stripe: int | str) -> int:
    nbytes = parse_size(stripe, "stripe")
    if nbytes == 0 or nbytes % 4096 or nbytes > _MOST_STRIPE:
        raise ValueError(f"stripe must be a multiple of 4KiB, at most 1TiB, found {stripe!r}")
    return nbytes


def _as_paths(paths: Any) -> Iterable[str]:
    many = [paths] if isinstance(paths, str | bytes | os.PathLike) else list(paths)
    if not many:
        raise ValueError("at least one path is needed")
    return [os.fsdecode(path) for path in many]

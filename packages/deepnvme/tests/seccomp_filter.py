"""Forbids system calls to this process, as a container's profile does.

For scripts in a process of their own: it cannot be undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# (x86_64, aarch64)
_NUMBERS = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_setup": (206, 0),
    "openat": (257, 56),
    "fallocate": (285, 47),
    "ftruncate": (77, 46),
}
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
_LOAD_WORD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ARGUMENT_2 = 32  # offset of the low half of args[2] in struct seccomp_data


def install(rules: list[str]) -> None:
    """rules: "io_uring_setup=EPERM"; "O_DIRECT=EINVAL" is openat with that flag."""
    column = 0 if platform.machine() == "x86_64" else 1
    program = []
    for rule in rules:
        what, error = rule.split("=")
        answer = _RET_ERRNO | getattr(errno, error)
        if what == "O_DIRECT":
            program += [
                (_LOAD_WORD, 0, 0, 0),
                (_JUMP_EQUAL, 0, 3, _NUMBERS["openat"][column]),
                (_LOAD_WORD, 0, 0, _ARGUMENT_2),
                (_JUMP_ANY_BIT, 0, 1, os.O_DIRECT),
                (_RETURN, 0, 0, answer),
            ]
        else:
            program += [
                (_LOAD_WORD, 0, 0, 0),
                (_JUMP_EQUAL, 0, 1, _NUMBERS[what][column]),
                (_RETURN, 0, 0, answer),
            ]
    program.append((_RETURN, 0, 0, _RET_ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(seccomp, mode_filter, ctypes.byref(Program(len(program), ctypes.addressof(code)))) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")

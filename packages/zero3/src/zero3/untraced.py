"""Functions that torch.compile leaves alone: its graph ends at their calls, and nothing below them is compiled.

What torch.compiler.disable does too, at the price of some microseconds a call, and of the compiler (some 70 MiB), which
it loads into every process, whether anything is compiled there or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SKIP = eval_frame._FrameAction.SKIP
_LEAVE_ALONE = eval_frame._FrameExecStrategy(_SKIP, _SKIP)  # its own frame, and those of what it calls


def untraced(function: _Function) -> _Function:
    """`function` itself, marked."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # asked before a call is traced into
    eval_frame.set_code_exec_strategy(function.__code__, _LEAVE_ALONE)
    return function

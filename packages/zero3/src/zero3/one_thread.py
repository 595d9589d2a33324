"""A partitioned model has one use at a time: two threads would gather and release the same units.

Known are the forwards and backwards that run. One that an interrupt has ended leaves its record, but no frame on the
stack of its thread, so the stack is what counts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from torch.autograd import graph

from .errors import StateError

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel

_RUN_BACKWARD = graph._engine_run_backward.__code__


def frames_of(thread: int) -> Iterator[FrameType]:
    """The stack of a thread, the innermost frame first; nothing of one that has ended."""
    frame = sys._getframe(1) if thread == threading.get_ident() else sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def refuse_beside_another(model: PartitionedModel) -> None:
    """StateError while a forward or backward of `model` runs in another thread, and none of this one began before."""
    own = threading.get_ident()
    for forward in list(model.outermost):  # of two that begin at once the first in the list goes on
        if forward.thread == own:
            break
        if not forward.was_interrupted():
            _refuse("forward")
    thread = model.backward_thread
    if thread not in (None, own) and any(frame.f_code is _RUN_BACKWARD for frame in frames_of(thread)):
        _refuse("backward")


def _refuse(what: str) -> None:
    raise StateError(
        f"a {what} of this partitioned model is running in another thread: its parameters are gathered for one use at "
        "a time. Let one thread use the model, or hold a threading.Lock around each use."
    )

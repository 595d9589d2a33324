"""save(background=True): training goes on while a thread copies the shards; what is saved is the moment of the call.

Nothing is copied twice and no memory is taken for a snapshot. The states of a unit change only when it is updated, and
whoever is about to change one asks here first (`before_change`): a unit that was not copied yet is then copied next,
and the change waits for that. So an update never tears the checkpoint, and forward and backward wait for nothing.
What a person can change in memory without our noticing, parameters that are used where they lie, is copied before
save() returns.

The thread uses no collective, which would get among those of the training: ranks say by a file that theirs is whole.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence

from torch import nn

from zero3.unit import Unit

from .checkpoint_writer import CheckpointWriter
from .errors import CheckpointError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05

# Rank 0 gives up on ranks that are still not done when it has waited this long, or as often longer than it took itself.
_PATIENCE_SECONDS = 120.0
_PATIENCE_FACTOR = 10.0


class BackgroundSave:
    """A checkpoint on its way. The process does not end before it is complete or has failed."""

    def __init__(self, writer: CheckpointWriter, model: nn.Module):
        self._writer = writer
        self._model: nn.Module | None = model  # its tiers stay open as long as it is there
        self._left = dict.fromkeys(writer.units)  # units that may still not change, in the order of their copies
        self._arrival = threading.Condition()
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._now = [(unit, ["param"]) for unit in writer.units if unit.permanent]
        self._later = {
            unit: [kind for kind in kinds if kind != "param"] if unit.permanent else kinds
            for unit, kinds in writer.kinds.items()
        }
        self._thread = threading.Thread(target=self._run, name="zinf.save")

    def copy_what_is_reachable(self) -> None:
        """Before `start`: what could change without our noticing."""
        self._writer.copy(self._now, lambda _: None)

    def start(self) -> None:
        """The rest goes on behind this call."""
        self._thread.start()

    def before_change(self, unit: Unit) -> None:
        """Returns when the states of `unit` may change. Cheap once they were copied."""
        if os.getpid() != self._process:
            return  # a forked child, with states of its own; the thread is not in it, and a lock may be held for ever
        if unit not in self._left:
            if not self._thread.is_alive():
                self._writer.close()  # its buffers may serve the training again
            return
        with self._arrival:
            if unit in self._left:
                self._left = {unit: None, **self._left}  # next
            self._arrival.wait_for(lambda: unit not in self._left)

    def wait(self) -> None:
        """The checkpoint is complete; or what kept it from being so is raised."""
        if os.getpid() != self._process and self._model is not None:
            raise CheckpointError(
                f"{self._writer.final} is being saved by process {self._process}, of which this one is a forked child: "
                "save and load there, or fork when the checkpoint is complete"
            )
        self._thread.join()
        self._writer.close()
        if self._failure is not None:
            raise self._failure

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._copy_and_publish()
        except BaseException as error:
            self._failure = error
            log.error("saving %s in the background has failed: %s", self._writer.final, error)
            self._writer.give_up(str(error))
        finally:
            with self._arrival:
                self._left = {}
                self._arrival.notify_all()
            self._model = None

    def _copy_and_publish(self) -> None:
        started = time.monotonic()
        self._writer.copy(self._in_order(), self._arrived)
        self._writer.seal()
        if self._writer.is_first:
            self._await_ranks(patience=max(_PATIENCE_SECONDS, _PATIENCE_FACTOR * (time.monotonic() - started)))
            self._writer.publish()

    def _in_order(self) -> Iterator[tuple[Unit, Sequence[str]]]:
        """Units one after the other; one that is about to change comes next."""
        begun: set[Unit] = set()
        while True:
            with self._arrival:
                unit = next((unit for unit in self._left if unit not in begun), None)
            if unit is None:
                return
            begun.add(unit)
            yield unit, self._later[unit]

    def _arrived(self, unit: Unit) -> None:
        with self._arrival:
            self._left.pop(unit, None)
            self._arrival.notify_all()

    def _await_ranks(self, patience: float) -> None:
        end = time.monotonic() + patience
        while unsealed := self._writer.unsealed():
            if time.monotonic() > end:
                names = ", ".join(f"rank {rank}" for rank in unsealed)
                raise CheckpointError(f"{names} did not finish saving {self._writer.final}: see what was logged there")
            time.sleep(_POLL_SECONDS)

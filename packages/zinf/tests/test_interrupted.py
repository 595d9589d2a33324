"""A step that an interrupt ends at any call of ours: what goes on is right, or an error that says where to go on."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from zinf_testing import config, offloaded, train

import zero3
import zinf
from zinf.config import OVERLAPS

_OURS = tuple(package.__file__.rpartition("/")[0] for package in (zero3, zinf))
_PLACES = 50

# Where an interrupt meets a destructor.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Calls:
    """Counts the calls of zero3's and zinf's functions inside; `strike` is called as call number `at` begins.

    That is one of the places where Python looks for signals. Between most others nothing of ours happens; ahead of a
    line, where a tracing function may raise too, it does not look: a `with` would be left without its end.
    """

    def __init__(self, at: int = -1, strike: Callable[[], None] = lambda: None):
        self.count, self.at, self.strike = 0, at, strike

    def __enter__(self) -> Calls:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.strike()


def interrupt() -> None:
    raise KeyboardInterrupt


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def places(run: Callable[[], object]) -> Iterator[int]:
    """Places in `run`, all over it."""
    with Calls() as calls:
        run()
    stride = max(calls.count // _PLACES, 1)
    return ((number * stride + number % stride) for number in range(1, _PLACES))


def start(nvme, folder, **changes):
    """(model, optimizer, their losses of steps 2 to 4) after two steps, which are saved."""
    model, optimizer = offloaded(config(nvme, **changes))
    train(model, optimizer, 2)
    zinf.save(folder, model, optimizer)
    return model, optimizer, train(model, optimizer, range(2, 5))


def gradients(model, step: int) -> float:
    loss = model.loss(model.data(step))
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_checkpoint_brings_everything_back(nvme, tmp_path, overlap, grads):
    """An exception anywhere in a step, in the middle of an update too."""
    model, optimizer, wanted = start(nvme, tmp_path, overlap_optimizer=overlap, grads=grads)
    ended = 0
    zinf.load(tmp_path, model, optimizer)
    for place in places(lambda: train(model, optimizer, range(2, 4))):
        zinf.load(tmp_path, model, optimizer)
        try:
            with Calls(place, interrupt):
                train(model, optimizer, range(2, 4))
        except KeyboardInterrupt:
            ended += 1
        zinf.load(tmp_path, model, optimizer)
        assert train(model, optimizer, range(2, 5)) == wanted, place
    assert ended > 0.8 * _PLACES


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_after_ctrl_c_in_forward_or_backward_the_step_can_be_made_again(nvme, tmp_path, overlap):
    """Updates that run there are made whole, a unit's each. With "backward" they are of this step: that is said."""
    model, optimizer, wanted = start(nvme, tmp_path, overlap_optimizer=overlap, grads="nvme")
    refused = 0
    zinf.load(tmp_path, model, optimizer)
    for place in places(lambda: gradients(model, 2)):
        zinf.load(tmp_path, model, optimizer)
        found = train(model, optimizer, [2])
        with contextlib.suppress(KeyboardInterrupt), Calls(place, ctrl_c):
            gradients(model, 3)
        optimizer.zero_grad()
        try:
            found += train(model, optimizer, range(3, 5))
        except zinf.AbortedStepError:
            with pytest.raises(zinf.AbortedStepError, match=str(tmp_path)):
                optimizer.step()
            refused += 1
            continue
        except zinf.ConfigError:  # the backward was over
            assert overlap == "backward"
            continue
        assert found == wanted, place
    assert (refused > 0) == (overlap == "backward")

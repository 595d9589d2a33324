"""A step that ends by an exception, anywhere in forward or backward: the next one is as right as ever."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from zero3_models import Perceptron
from zero3_testing import (
    DistantStore,
    assert_close,
    assert_same,
    at_rest,
    full_gradients,
    gradients_of,
    pair,
    train_plain,
    train_sharded,
)

import zero3
from zero3.hooks import running_model
from zero3.uninterrupted import uninterrupted

ERRORS = [RuntimeError, KeyboardInterrupt, SystemExit]  # torch calls no module hook for the last two
PLACES = ["forward", "recomputation", "backward"]


class Stops(Perceptron):
    """Raises `error` once, in the third layer."""

    error: type | None = None
    place = "forward"

    def forward(self, x):
        first, second, third, last = self.layers
        x = torch.tanh(second(first(x)))
        if self.place == "recomputation":
            x = checkpoint(self.stop_in_recomputation, x, third, use_reentrant=False)
        else:
            x = torch.tanh(third(x))
            self.stop("forward")
            if self.place == "backward":
                x.register_hook(lambda grad: self.stop("backward"))
        return last(x)

    def stop_in_recomputation(self, x, layer):
        x = layer(x)
        if torch._C._current_graph_task_id() != -1:
            self.stop("recomputation")
        return torch.tanh(x)

    def stop(self, place):
        if self.error is not None and self.place == place:
            error, self.error = self.error, None
            raise error("stop")


class StopsInside(Stops):
    """Raises while the hooks of a block around the layer run too."""

    def __init__(self):
        super().__init__()
        handle = self.layers[2].register_forward_hook(lambda *_: self.stop("forward"))
        self.__dict__["handle"] = handle


def interrupted_step(model, error, place):
    model.place, model.error = place, error
    with pytest.raises(error, match="stop"):
        model.loss(model.data(7)).backward()
    assert model.error is None
    model.zero_grad()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("make", [Stops, StopsInside])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", ERRORS)
def test_training_goes_on(error, place, make):
    plain, model = pair(make, store=DistantStore(), unit_size=1)
    plain.place = place
    interrupted_step(model, error, place)
    assert running_model() is None
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])
    assert at_rest(model)


@pytest.mark.parametrize("error", ERRORS)
def test_two_ranks_that_are_interrupted_together_go_on(error, ranks):
    wanted = train_plain(torch_seeded(Stops), 2, world=2)[1]
    for found in ranks(interrupted_on_a_rank, 2, error):
        assert_close(found, wanted)


def interrupted_on_a_rank(rank, world, error):
    model = zero3.shard(torch_seeded(Stops), unit_size=1)
    for place in PLACES:
        interrupted_step(model, error, place)
    model.place = "forward"
    return train_sharded(model, 2, rank, world)[1]


def torch_seeded(make):
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("error", ERRORS)
def test_a_submodule_used_by_itself_after_an_interrupt(error):
    plain, model = pair(Stops, store=DistantStore(), unit_size=1)
    interrupted_step(model, error, "forward")
    for one in (plain, model):
        one.layers[1](one.data(0)).sum().backward()
    assert_same(full_gradients(model), gradients_of(plain))
    assert at_rest(model)


def test_a_forward_that_catches_an_interrupt_of_its_part():
    class Catches(Perceptron):
        def forward(self, x):
            with pytest.raises(RuntimeError):
                self.layers[1](torch.zeros(2, 3))  # of the wrong size
            handle = self.layers[2].register_forward_hook(interrupt)
            try:
                self.layers[2](x)
            except KeyboardInterrupt:
                handle.remove()
            return super().forward(x)

    def interrupt(*_):
        raise KeyboardInterrupt

    plain, model = pair(Catches, store=DistantStore(), unit_size=1)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])
    assert at_rest(model)


class StopsBetween(Perceptron):
    """Raises once in a layer that runs under hooks of the model's own."""

    error: type | None = None

    def __init__(self):
        super().__init__()
        handle = self.layers[1].register_forward_hook(self.stop)
        self.__dict__["handle"] = handle

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            x = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False)
        return self.layers[3](torch.tanh(self.layers[2](torch.tanh(x))))

    def stop(self, *_):
        if self.error is not None:
            error, self.error = self.error, None
            raise error("stop")


@pytest.mark.parametrize("error", ERRORS)
def test_hooks_that_lay_between_ours_are_gone_with_them(error):
    """Their end takes off the topmost pair, which is then one of ours."""
    plain, model = pair(StopsBetween, store=DistantStore(), unit_size=1)
    model.error = error
    with pytest.raises(error, match="stop"):
        model.loss(model.data(7))
    assert running_model() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])
    assert at_rest(model)


def test_no_destructor_of_ours_runs_in_a_step():
    """An interrupt that meets one is lost: Python cannot raise it there."""
    model = zero3.shard(Perceptron(), store=DistantStore(), unit_size=1)
    met = []
    sys.setprofile(lambda frame, event, _: met.append(frame.f_code) if event == "call" else None)
    try:
        model.loss(model.data(0)).backward()
    finally:
        sys.setprofile(None)
    names = {code.co_name for code in met}
    assert {"pack", "unpack"} <= names
    assert "__del__" not in names


def test_saved_tensor_hooks_entered_after_an_interrupt_stay_in_force():
    _, model = pair(Stops, store=DistantStore(), unit_size=1)
    interrupted_step(model, KeyboardInterrupt, "forward")
    calls = []

    def pack(tensor):
        calls.append("pack")
        return tensor.numpy(force=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        model.loss(model.data(0)).backward()
        assert calls
        calls.clear()
        (torch.ones(2, requires_grad=True) ** 2).sum().backward()
        assert calls
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_second_ctrl_c_does_not_wait():
    seen = []

    def work(times):
        with uninterrupted():
            for time in range(times):
                signal.raise_signal(signal.SIGINT)
                seen.append(time)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            work(times)
    assert seen == [0, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

"""Threads: two models that train at the same time share nothing; one model has one use at a time."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from zero3_models import SmallGPT
from zero3_testing import (
    DistantStore,
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


def test_two_models_in_two_threads_do_not_meet(caplog):
    pairs = [pair(SmallGPT, store=DistantStore(), unit_size=1) for _ in range(2)]
    wanted = [train_plain(plain, 6)[1] for plain, _ in pairs]
    found: dict[int, dict[str, torch.Tensor]] = {}

    def work(number: int) -> None:
        found[number] = train_sharded(pairs[number][1], 6)[1]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert_same(found[number], wanted[number])
        assert at_rest(pairs[number][1])
    assert running_model() is None
    assert "interrupted" not in caplog.text
    models = [weakref.ref(model) for _, model in pairs]
    pairs.clear()
    gc.collect()
    assert not any(model() for model in models)


class Waits(nn.Module):
    """Two layers, between which a forward waits, or is left."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.interrupt = False

    def forward(self, x):
        x = self.first(x)
        self.arrived.set()
        if self.interrupt:
            raise KeyboardInterrupt
        assert self.go_on.wait(60)
        return self.second(x)


def in_a_thread(function, *args) -> tuple[threading.Thread, list]:
    """What it returned or raised comes into the list."""
    result: list = []

    def run():
        try:
            result.append(function(*args))
        except BaseException as error:  # whatever it is, the test looks at it
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_one_model_in_two_threads_at_once_is_refused_and_both_may_use_it_in_turn():
    plain, model = pair(Waits, store=DistantStore(), unit_size=1)
    x = torch.randn(2, 8)
    plain.go_on.set()
    wanted = plain(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    thread, result = in_a_thread(model, x)
    assert model.arrived.wait(60)
    for use in (lambda: model(x), optimizer.step, lambda: zero3.gathered(model).__enter__()):
        with pytest.raises(zero3.StateError, match="another thread"):
            use()
    model.go_on.set()
    thread.join()
    assert torch.equal(result[0], wanted)
    assert torch.equal(model(x), wanted)
    assert at_rest(model)
    result[0].sum().backward()
    plain(x).sum().backward()
    assert_same(full_gradients(model), gradients_of(plain))


def test_a_forward_beside_a_backward_in_another_thread_is_refused():
    plain, model = pair(Waits, store=DistantStore(), unit_size=1)
    x = torch.randn(2, 8)
    arrived, go_on = threading.Event(), threading.Event()
    for one in (plain, model):
        one.go_on.set()

    def wait(gradient):
        arrived.set()
        assert go_on.wait(60)

    hidden = []
    model.second.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    output = model(x)
    hidden[0].register_hook(wait)
    thread, result = in_a_thread(lambda: output.sum().backward())
    assert arrived.wait(60)
    for use in (lambda: model(x), lambda: zero3.gathered(model).__enter__()):
        with pytest.raises(zero3.StateError, match=r"a backward of .* another thread"):
            use()
    go_on.set()
    thread.join()
    assert result == [None]
    plain(x).sum().backward()
    assert_same(full_gradients(model), gradients_of(plain))
    assert torch.equal(model(x), plain(x))
    assert at_rest(model)


def test_a_forward_that_was_interrupted_in_a_thread_keeps_nobody_out():
    model = zero3.shard(Waits(), store=DistantStore(), unit_size=1)
    model.interrupt = True
    thread, result = in_a_thread(model, torch.ones(2, 8))
    thread.join()
    assert type(result[0]) is KeyboardInterrupt
    model.interrupt = False
    model.go_on.set()
    assert torch.isfinite(model(torch.ones(2, 8))).all()

"""Two models that two threads train at the same time, which share nothing."""

from __future__ import annotations

import gc
import threading
import weakref

import torch
from zero3_models import SmallGPT
from zero3_testing import DistantStore, assert_same, at_rest, pair, train_plain, train_sharded

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

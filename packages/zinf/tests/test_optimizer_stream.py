"""read | adam | write in bounded buffers from the pool."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import assert_same, config, full_states, offloaded, train

import zero3
from zinf import optimizer_stream
from zinf.config import OVERLAPS


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("budget", [1, 100_000, 1 << 20])
def test_any_budget_gives_the_same_states(nvme, small_pieces, budget, overlap):
    """Less than a piece needs, a few pieces, all of them."""
    wanted, optimizer = offloaded(config(nvme, "device", "device", "device", dtype=torch.bfloat16), width=64)
    losses = train(wanted, optimizer, 4)
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16, overlap_optimizer=overlap), width=64)
    stream = model._zero3_model.store.updates.stream
    stream.budget = budget
    most = 0
    load = stream._load

    def watched(piece):
        nonlocal most
        loaded = load(piece)
        most = max(most, stream._in_use)
        return loaded

    stream._load = watched
    assert train(model, optimizer, 4) == losses
    assert_same(full_states(model), full_states(wanted))
    one_piece = 4096 * 14
    assert most <= budget + 2 * one_piece  # one piece always passes, in a pooled buffer of up to twice its size
    optimizer.settle()
    assert stream._in_use == 0


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_buffers_are_reused(nvme, overlap):
    model, optimizer = offloaded(config(nvme, grads="nvme", overlap_optimizer=overlap))
    pool = model._zero3_model.store.tiers.host_pool
    train(model, optimizer, 10)
    optimizer.settle()
    assert pool.in_use == 0
    pool._reclaim()  # as the next take does
    assert pool.retired_nbytes == 0
    assert pool.nbytes <= 2 * pool.peak_in_use  # how many writes are on their way at once is the drive's affair


@pytest.mark.parametrize("overlap", ["next-forward", False])
def test_gradients_on_a_drive_are_read_ahead_like_the_states(nvme, small_pieces, monkeypatch, overlap):
    """All are asked for before the first update, where the budget holds them, and none while Adam waits."""
    model, optimizer = offloaded(config(nvme, grads="nvme", overlap_optimizer=overlap), width=64)
    engine = model._zero3_model.store
    stream, events = engine.updates.stream, []

    def note(owner, name, event):
        original = getattr(owner, name)

        def noting(*args, **options):
            events.append(event(*args))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    note(stream, "_start_read", lambda piece, kind, out: ("ask", kind))
    note(engine, "read", lambda unit, kind, *_: ("read alone", kind))
    note(optimizer_stream, "_adam", lambda *_: ("adam", ""))
    for step in range(3):
        model.loss(model.data(step)).backward()
        del events[:]
        optimizer.step()
        optimizer.zero_grad()
        optimizer.settle()
        pieces = sum(-(-unit.shard_numel // 4096) for unit in zero3.units(model))
        asked = [i for i, event in enumerate(events) if event == ("ask", "grad")]
        assert len(asked) == pieces
        assert max(asked) < events.index(("adam", ""))
        assert ("read alone", "grad") not in events


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_without_prefetch_no_state_is_read_before_its_turn(nvme, small_pieces, monkeypatch, overlap):
    """What is asked for between two updates belongs to the second of them alone."""
    cfg = config(nvme, grads="nvme", overlap_optimizer=overlap, prefetch=False)
    model, optimizer = offloaded(cfg, width=64)
    stream, asked, updated = model._zero3_model.store.updates.stream, set(), []
    start_read, adam = stream._start_read, optimizer_stream._adam

    def noting_read(piece, kind, out):
        asked.add(piece)
        return start_read(piece, kind, out)

    def noting_adam(*args):
        updated.append(set(asked))
        asked.clear()
        return adam(*args)

    monkeypatch.setattr(stream, "_start_read", noting_read)
    monkeypatch.setattr(optimizer_stream, "_adam", noting_adam)
    train(model, optimizer, 3)
    optimizer.settle()
    pieces = sum(-(-unit.shard_numel // 4096) for unit in zero3.units(model))
    assert len(updated) == 3 * pieces
    assert all(len(pieces_asked) == 1 for pieces_asked in updated)
    assert not asked

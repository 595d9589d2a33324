"""What passes through the ring arrives in order, in no more memory than the ring has, and a failure gives that back."""

from __future__ import annotations

import errno
import random
from functools import partial

import pytest
import torch
from zinf_testing import config, offloaded

import deepnvme
import zinf
from zinf.ring_copy import Copy, RingCopy
from zinf.tiers import NO_WAIT, Wait

LARGEST = 3 << 20
SIZES = [random.Random(3).randrange(1, LARGEST) for _ in range(60)]
CONTENT = random.Random(4).randbytes(sum(SIZES))


@pytest.fixture
def engine(nvme):
    model, _ = offloaded(config(nvme, host_memory="32MiB"))
    return model._zero3_model.store


def pairs():
    """(offset, lengths of one copy): of one buffer and of two in turn."""
    offset, sizes = 0, list(SIZES)
    while sizes:
        taken, sizes = sizes[: 1 + len(sizes) % 2], sizes[1 + len(sizes) % 2 :]
        yield offset, taken
        offset += sum(taken)


class File:
    """Copies from one file to another, and what was seen of them."""

    def __init__(self, folder, io, fails_at=None):
        (folder / "from").write_bytes(CONTENT)
        self.source, self.target, self.io, self.fails_at = folder / "from", folder / "to", io, fails_at
        self.written, self.begun, self.requests = [], [], []

    def copies(self):
        for offset, taken in pairs():
            yield Copy(taken, partial(self.read, offset), partial(self.write, offset))

    def read(self, offset, buffers):
        self.begun.append({buffer.untyped_storage().data_ptr() + buffer.storage_offset() for buffer in buffers})
        return self.transfers(self.io.read, self.source, buffers, offset)

    def write(self, offset, buffers, read):
        assert read.done()
        if offset == self.fails_at:
            raise OSError(errno.EIO, "the drive is gone")
        self.written.append(offset)
        return self.transfers(self.io.write, self.target, buffers, offset)

    def transfers(self, start, path, buffers, offset):
        requests = []
        for buffer in buffers:
            requests.append(start(path, buffer, offset))
            offset += buffer.numel()
        self.requests += requests
        return Wait.of_all(Wait([request]) for request in requests)


def test_everything_arrives_in_order_in_the_memory_of_the_ring(engine, tmp_path):
    pool = engine.tiers.host_pool
    before = pool.in_use
    with deepnvme.Engine() as io, RingCopy(engine, LARGEST, "a test") as ring:
        held = pool.in_use - before
        assert 2 * LARGEST <= held <= (32 << 20) // 8 + 2 * LARGEST
        file = File(tmp_path, io)
        ring.run(file.copies())
        assert pool.in_use - before == held
    assert pool.in_use == before
    assert file.target.read_bytes() == CONTENT
    assert file.written == [offset for offset, _ in pairs()]
    assert len(set.union(*file.begun)) <= held // LARGEST


@pytest.mark.parametrize("number", [0, 1, 20, -1])
def test_a_failure_gives_the_memory_back_when_nothing_uses_it(engine, tmp_path, number):
    pool = engine.tiers.host_pool
    before = pool.in_use
    fails_at = [offset for offset, _ in pairs()][number]
    with deepnvme.Engine() as io:
        ring = RingCopy(engine, LARGEST, "a test")
        file = File(tmp_path, io, fails_at)
        with pytest.raises(OSError, match="the drive is gone"):
            ring.run(file.copies())
        ring.close()
        ring.close()
        assert pool.in_use == before
        assert all(request.done() for request in file.requests)
        assert file.target.read_bytes()[:fails_at] == CONTENT[:fails_at] if number else not file.target.exists()


class Pending:
    """A transfer that ends when it is waited for."""

    def __init__(self):
        self.ended = False

    def done(self):
        return self.ended

    def wait(self):
        self.ended = True


@pytest.mark.parametrize("fails_at", [None, 0, 7])
def test_whatever_was_begun_has_ended_before_its_memory_is_used_again(engine, fails_at):
    pending, numbers = [], iter(range(100))

    def begin(*_):
        pending.append(Pending())
        return Wait([pending[-1]])

    def write(*_):
        if next(numbers) == fails_at:
            raise OSError(errno.EIO, "the drive is gone")
        return begin()

    ring = RingCopy(engine, LARGEST, "a test")
    failure = None
    try:
        ring.run(Copy([LARGEST], begin, write) for _ in range(30))
    except OSError as error:
        failure = error
    assert (failure is None) == (fails_at is None)
    assert failure is not None or all(one.ended for one in pending)
    ring.close()
    assert all(one.ended for one in pending)


def test_copies_are_drawn_only_when_there_is_room(engine):
    drawn, written = [], []

    def copies():
        for number in range(30):
            drawn.append(number)
            yield Copy([LARGEST], lambda _: NO_WAIT, lambda _b, _w, n=number: written.append(n) or NO_WAIT)
            assert len(drawn) - len(written) <= 4

    with RingCopy(engine, LARGEST, "a test") as ring:
        ring.run(copies())
    assert written == drawn == list(range(30))


def test_a_ring_has_room_for_the_widest_state(nvme):
    model = torch.nn.Linear(300, 100)
    model.table = torch.nn.Parameter(torch.arange(50_000), requires_grad=False)
    zinf.shard(model, config(nvme))
    machinery = model._zero3_model
    with RingCopy.for_pieces(machinery.store, machinery.units, "a test") as ring:
        widths = []
        ring.run([Copy([8 * 50_000], lambda buffers: widths.append(buffers[0].numel()) or NO_WAIT, lambda *_: NO_WAIT)])
    assert widths == [8 * 50_000]

"""Which of its buffers the pool gives."""

from __future__ import annotations

import torch

from zero3.buffer_pool import BufferPool, allocate_on


def pool_with(*sizes):
    """A pool and its free buffers, in the order in which they came back."""
    pool = BufferPool(allocate_on(torch.device("cpu")), limit=1 << 30)
    buffers = [pool.take(nbytes) for nbytes in sizes]
    for buffer in buffers:
        pool.give_back(buffer)
    return pool, buffers


def test_of_equal_buffers_the_one_that_came_back_last_is_given():
    pool, (first, last) = pool_with(4096, 4096)
    assert pool.take(4096) is last
    assert pool.take(4096) is first
    assert pool.nbytes == pool.in_use == 2 * 4096


def test_a_fitting_buffer_is_found_wherever_it_lies():
    pool, (exact, large, small) = pool_with(4096, 1 << 20, 1024)
    assert pool.take(4096) is exact
    assert pool.take(2048) is not small  # too small, though it came back last
    assert pool.take(1024) is small
    assert pool.take((1 << 20) - 64) is large


def test_a_buffer_that_somebody_views_is_not_given():
    pool, (first, last) = pool_with(4096, 4096)
    taken = pool.take(4096)
    view = taken.flat(8, torch.float32)
    pool.give_back(taken)
    assert taken is last
    assert pool.take(4096) is first
    other = pool.take(4096)
    assert other is not taken
    del view
    assert pool.take(4096) is taken

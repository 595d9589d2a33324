from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero3.bandwidth_centric import PARAMETER_ALIGNMENT, Partition, offsets_of, piece_shape, round_up

numels = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(numels, st.integers(1, 9), st.sampled_from([1, 64, 96, 4096]))
def test_pieces_of_all_ranks_are_each_parameter_once_and_in_order(numels, ranks, multiple):
    offsets, length = offsets_of(numels)
    cut = Partition.of(length, ranks, multiple)
    for offset, numel in zip(offsets, numels, strict=True):
        covered = []
        for rank in range(ranks):
            start, stop = cut.piece(rank, offset, numel)
            assert 0 <= start <= stop <= cut.shard_numel
            begin = cut.bounds(rank)[0]
            covered += range(begin + start, begin + stop)
        assert covered == list(range(offset, offset + numel))


@given(numels, st.integers(1, 9), st.sampled_from([1, 64, 96, 4096]))
def test_shards_are_equal_aligned_and_hardly_longer_than_needed(numels, ranks, multiple):
    offsets, length = offsets_of(numels)
    cut = Partition.of(length, ranks, multiple)
    assert all(offset % PARAMETER_ALIGNMENT == 0 for offset in offsets)
    assert cut.shard_numel % PARAMETER_ALIGNMENT == 0
    assert cut.shard_numel % multiple == 0
    assert cut.padded_numel == cut.shard_numel * ranks >= length
    assert cut.padded_numel - length < ranks * 64 * multiple + ranks


def test_parameters_do_not_overlap():
    offsets, length = offsets_of([1, 64, 65, 0, 3])
    assert offsets == [0, 64, 128, 256, 256]
    assert length == 320


def test_round_up():
    assert [round_up(count, 4) for count in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_a_piece_keeps_the_number_of_dimensions():
    assert piece_shape((3, 4), 12) == (3, 4)
    assert piece_shape((3, 4), 5) == (5, 1)
    assert piece_shape((3, 4), 0) == (0, 1)
    assert piece_shape((7,), 2) == (2,)
    assert piece_shape((), 1) == ()

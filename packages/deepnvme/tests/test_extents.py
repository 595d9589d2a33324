"""Ranges handed out never overlap, lie within the capacity, and join again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepnvme.extents import Extents

OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(1, 100_000), st.integers(0, 1000)), max_size=80)


@given(OPERATIONS, st.none() | st.integers(0, 400_000))
def test_against_a_map_of_every_page(operations, capacity):
    extents = Extents(capacity)
    taken: dict[int, int] = {}  # page -> which range has it
    ranges: list[tuple[int, int]] = []
    for allocate, nbytes, which in operations:
        if allocate or not ranges:
            start = extents.allocate(nbytes)
            pages = -(-nbytes // 4096)
            if start is None:
                assert capacity is not None
                free = [page not in taken for page in range(capacity // 4096)]
                runs = "".join("f" if f else "t" for f in free).split("t")
                assert max(map(len, runs), default=0) < pages
                continue
            assert start % 4096 == 0
            mine = range(start // 4096, start // 4096 + pages)
            assert not any(page in taken for page in mine)
            if capacity is not None:
                assert (mine.stop) * 4096 <= capacity
            taken.update(dict.fromkeys(mine, nbytes))
            ranges.append((start, nbytes))
        else:
            start, nbytes = ranges.pop(which % len(ranges))
            for page in range(start // 4096, start // 4096 + -(-nbytes // 4096)):
                del taken[page]
            extents.free(start, nbytes)
        assert extents.used == len(taken) * 4096
    for start, nbytes in ranges:
        extents.free(start, nbytes)
    assert extents.used == 0
    assert extents.end == 0
    whole = 1 << 40 if extents.capacity is None else extents.capacity
    assert not whole or extents.allocate(whole) == 0  # one range again
    assert extents.allocate(1) is None or capacity is None


def test_smallest_fitting_range_is_taken():
    extents = Extents(None, unit=1)
    starts = [extents.allocate(n) for n in (10, 1, 5, 1, 7, 1)]
    for i in (0, 2, 4):
        extents.free(starts[i], (10, 1, 5, 1, 7, 1)[i])
    assert extents.allocate(6) == starts[4]
    assert extents.allocate(5) == starts[2]
    assert extents.allocate(1) == starts[4] + 6
    assert extents.allocate(11) == 25


def test_free_range_at_the_end_is_lengthened():
    extents = Extents(None, unit=1)
    assert extents.allocate(10) == 0
    extents.free(0, 10)
    assert extents.allocate(15) == 0
    assert extents.end == 15


def test_room_that_is_free_at_the_end_is_beyond_the_end():
    extents = Extents(None)
    for _ in range(3):
        extents.allocate(4096)
    extents.free(4096, 4096)
    assert (extents.end, extents.used) == (3 * 4096, 2 * 4096)
    extents.free(8192, 4096)
    assert (extents.end, extents.used) == (4096, 4096)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20_000)), max_size=20), st.booleans())
def test_made_of_what_is_taken(parts, bounded):
    taken = []
    place = 0
    for gap, nbytes in parts:
        place += gap * 4096
        taken.append((place, nbytes))
        place += -(-nbytes // 4096) * 4096
    extents = Extents(place if bounded else None, taken=reversed(taken))
    assert extents.end == place
    assert extents.used == sum(-(-nbytes // 4096) * 4096 for _, nbytes in taken)
    for start, nbytes in taken:
        extents.free(start, nbytes)
    assert (extents.end, extents.used) == (0, 0)

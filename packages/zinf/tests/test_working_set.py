"""Bytes of gathered units against the budget."""

from __future__ import annotations

from zinf.working_set import WorkingSet


class Unit:
    def __init__(self, nbytes, permanent=False):
        self.nbytes, self.permanent, self.holds = nbytes, permanent, 0


def test_bytes_are_counted_once():
    one, two = Unit(10), Unit(20)
    present = WorkingSet(30, [one, two])
    present.add(one)
    present.add(one)
    assert present.nbytes == 10
    assert present.fits(two)
    present.add(two)
    assert not present.fits(Unit(1))
    present.drop(one)
    present.drop(one)
    assert present.nbytes == 20
    assert present.peak_nbytes == 30


def test_what_is_always_there_takes_no_room():
    present = WorkingSet(10, [Unit(10), Unit(99, permanent=True)])
    present.add(Unit(99, permanent=True))
    assert present.nbytes == 0
    assert present.limit == 10


def test_one_unit_always_fits_and_lookahead_takes_what_it_leaves():
    units = [Unit(10), Unit(40)]
    assert WorkingSet(5, units).limit == 40
    assert WorkingSet(5, units).lookahead == 0
    assert WorkingSet(100, units).lookahead == 60


def test_idle_units_are_the_ones_nobody_holds_oldest_first():
    units = [Unit(1) for _ in range(3)]
    present = WorkingSet(10, units)
    for one in units:
        present.add(one)
    units[1].holds = 1
    assert present.idle() == [units[0], units[2]]

from __future__ import annotations

from types import SimpleNamespace

from zero3.gathered_memory import GatheredMemory


def unit(start, nbytes):
    return SimpleNamespace(buffer=SimpleNamespace(start=start), nbytes=nbytes)


def test_an_address_belongs_to_the_unit_that_lies_there():
    memory, units = GatheredMemory(), [unit(start, 64) for start in (300, 100, 200)]
    for one in units:
        memory.add(one)
    for one in units:
        start = one.buffer.start
        assert memory.unit_at(start) is memory.unit_at(start + 63) is one
        assert memory.unit_at(start - 1) is None
        assert memory.unit_at(start + 64) is None
    memory.remove(units[1])
    assert memory.unit_at(100) is None
    assert memory.unit_at(200) is units[2]
    memory.add(units[1])
    assert memory.unit_at(100) is units[1]


def test_removing_what_is_not_there_does_no_harm():
    memory, there = GatheredMemory(), unit(100, 64)
    memory.remove(there)
    memory.add(there)
    memory.remove(unit(100, 64))
    memory.remove(unit(164, 64))
    assert memory.unit_at(100) is there

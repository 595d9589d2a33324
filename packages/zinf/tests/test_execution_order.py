"""The order of units: guessed, learned, mended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zinf.execution_order import ExecutionOrder


def run(order, units, with_backward=True):
    """How many of `units` came as expected."""
    order.begin(with_backward)
    return sum(order.observe(unit) for unit in units)


def test_the_first_guess_is_the_module_tree_there_and_back():
    order = ExecutionOrder("abc")
    order.begin(with_backward=True)
    assert "".join(order.upcoming()) == "abccba"
    assert run(ExecutionOrder("abc"), "abccba") == 6
    assert run(ExecutionOrder("abc"), "abc", with_backward=False) == 3


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30))
def test_any_order_is_known_the_second_time(units):
    order = ExecutionOrder("abcdef")
    run(order, units)
    assert run(order, units) == len(units)
    assert list(order.upcoming()) == []


def test_a_skipped_unit_costs_one_miss():
    order = ExecutionOrder("abcd")
    run(order, "abcddcba")
    assert run(order, "abddba") == 4  # a, b; d is a miss, then d; b is a miss, then a
    assert run(order, "abddba") == 6


def test_training_and_evaluation_keep_their_own():
    order = ExecutionOrder("abc")
    run(order, "acca")
    run(order, "abc", with_backward=False)
    assert run(order, "acca") == 4
    assert run(order, "abc", with_backward=False) == 3


def test_parts_that_are_called_by_themselves_keep_their_own():
    order = ExecutionOrder("abcd")
    run(order, "abba")
    run(order, "cddc")
    assert run(order, "abba") >= 3
    assert run(order, "cddc") >= 3


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=12), max_size=6))
def test_it_never_expects_what_it_does_not_know(sequences):
    order = ExecutionOrder("abcde")
    for units in sequences:
        run(order, units)
        assert set(order.upcoming()) <= set("abcde")

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace

import pytest

from zero3 import StateError
from zero3.unit_state import GradState, ParamState, forget_fresh, move_grad, move_param

PARAM_CYCLE = ["SHARDED", "READING", "STAGED", "GATHERING", "READY", "SHARDED"]
GRAD_CYCLE = ["NONE", "ACCUMULATING", "REDUCING", "REDUCED", "ACCUMULATING", "REDUCING", "REDUCED", "COMMITTED", "NONE"]


def unit(state=ParamState.SHARDED, grad_state=GradState.NONE):
    return SimpleNamespace(name="layer.0", state=state, grad_state=grad_state)


def test_the_life_of_a_units_parameters():
    one = unit()
    for _, target in pairwise(PARAM_CYCLE):
        move_param(one, ParamState[target])
        assert str(one.state) == target


def test_the_life_of_a_units_gradient_with_two_micro_batches():
    one = unit()
    for _, target in pairwise(GRAD_CYCLE):
        move_grad(one, GradState[target])
        assert str(one.grad_state) == target


@pytest.mark.parametrize(("start", "target"), list(product(ParamState, ParamState)))
def test_parameters_move_only_forward_or_back_to_sharded(start, target):
    legal = {(a, b) for a, b in pairwise(PARAM_CYCLE)} | {(a, "SHARDED") for a in PARAM_CYCLE if a != "SHARDED"}
    one = unit(state=start)
    if (start.value, target.value) in legal:
        move_param(one, target)
        assert one.state is target
    else:
        with pytest.raises(StateError, match=rf"layer\.0.*{start} to {target}"):
            move_param(one, target)
        assert one.state is start


@pytest.mark.parametrize(("start", "target"), list(product(GradState, GradState)))
def test_a_gradient_moves_only_along_its_cycle_or_back_to_none(start, target):
    legal = {(a, b) for a, b in pairwise(GRAD_CYCLE)} | {(a, "NONE") for a in GRAD_CYCLE if a != "NONE"}
    one = unit(grad_state=start)
    if (start.value, target.value) in legal:
        move_grad(one, target)
    else:
        with pytest.raises(StateError, match=r"layer\.0"):
            move_grad(one, target)


@pytest.mark.parametrize("grad_state", GradState)
def test_an_aborted_backward_leaves_what_earlier_ones_left(grad_state):
    one = unit(grad_state=grad_state)
    forget_fresh(one, reduced=True)
    assert one.grad_state is GradState.REDUCED
    forget_fresh(one, reduced=False)
    assert one.grad_state is GradState.NONE

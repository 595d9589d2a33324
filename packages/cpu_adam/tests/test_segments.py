"""Several parameter groups inside one flat buffer: one call with segments equals a call for each piece."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")

DEFAULTS = {"step": 7, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
OTHERS = [
    {"lr": 1e-3},
    {"weight_decay": 0.0},
    {"betas": (0.0, 0.5), "eps": 1e-4},
    {"step": 1},
    {"decoupled": False},
    {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "step": 100, "decoupled": False},
    {},
]


def arrays(numel, split=False):
    generator = torch.Generator().manual_seed(numel)
    param, grad, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
    keywords = {}
    if split:
        param, keywords["param_lo"] = cpu_adam.split(param)
        keywords["param_out"] = torch.zeros(numel, dtype=torch.float16)
    return [param, grad, m * 0.1, v.abs() * 0.1], keywords


def check(numel, segments, threads=None, split=False):
    together, keywords = arrays(numel, split)
    cpu_adam.step(*together, **DEFAULTS, **keywords, segments=segments, threads=threads)

    apart, apart_keywords = arrays(numel, split)
    position = 0
    for start, stop, own in [*sorted(segments, key=lambda segment: segment[:2]), (numel, numel, {})]:
        for first, last, changes in [(position, start, {}), (start, stop, own)]:
            pieces = [array[first:last] for array in apart]
            more = {name: array[first:last] for name, array in apart_keywords.items()}
            cpu_adam.step(*pieces, **{**DEFAULTS, **changes}, **more)
        position = stop
    for a, b in zip([*together, *keywords.values()], [*apart, *apart_keywords.values()], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_setting(split, threads):
    lengths = [0, 1, 63, 64, 65, 100, 500]
    borders = np.cumsum([0, *lengths]).tolist()
    without_gaps = list(zip(borders, borders[1:], OTHERS, strict=False))
    check(borders[-1], without_gaps, threads, split)
    with_gaps = [(start + 3, stop, own) for start, stop, own in without_gaps if stop - start > 3]
    check(borders[-1] + 50, with_gaps, threads, split)


def test_order_does_not_matter():
    check(300, [(200, 250, {"lr": 0.5}), (10, 20, {"step": 1}), (100, 101, {"weight_decay": 0.0})])


def test_no_segments_and_empty_ones():
    check(100, [])
    check(100, [(50, 50, {"lr": 9.0}), (0, 0, {"lr": 9.0}), (100, 100, {"lr": 9.0})])
    check(0, [(0, 0, {"lr": 9.0})])


def test_the_whole_buffer():
    check(100, [(0, 100, {"lr": 0.5})])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_cut(data):
    numel = data.draw(st.integers(1, 400))
    borders = sorted(data.draw(st.lists(st.integers(0, numel), min_size=2, max_size=9)))
    segments = [
        (start, stop, data.draw(st.sampled_from(OTHERS)))
        for start, stop in pairwise(borders)
        if data.draw(st.booleans())
    ]
    check(numel, segments, threads=data.draw(st.sampled_from([1, 2, 3])), split=data.draw(st.booleans()))


def test_one_step_in_several_calls_equals_one_call():
    """Twelve tensors as one group and as three sub-groups a step: a jump from step 2 to 5, then other betas."""
    shapes = [1, 5, 64, 100, 1000, 3, 17, 128, 63, 65, 2, 500]
    numel = sum(shapes)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator)
    one, three = ([start.clone(), torch.zeros(numel), torch.zeros(numel)] for _ in range(2))
    borders = np.cumsum([0, *shapes]).tolist()
    steps = [1, 2, *range(5, 53)]
    for count, step in enumerate(steps):
        betas = (0.9, 0.999) if count < 25 else (0.8, 0.99)
        grad = torch.randn(numel, generator=generator)
        cpu_adam.step(one[0], grad, *one[1:], step=step, lr=1e-3, betas=betas, weight_decay=0.01)
        for group in range(3):
            for tensor in range(group, 12, 3):
                cut = slice(borders[tensor], borders[tensor + 1])
                pieces = [array[cut] for array in (three[0], grad, *three[1:])]
                cpu_adam.step(*pieces, step=step, lr=1e-3, betas=betas, weight_decay=0.01)
    for a, b in zip(one, three, strict=True):
        assert torch.equal(a, b)

"""The tiled loss against torch's cross entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zinf_testing import config

import zinf
from zinf import tiled_cross_entropy


def case(tokens=(3, 5), width=16, vocabulary=101, bias=True):
    torch.manual_seed(3)
    head = nn.Linear(width, vocabulary, bias=bias)
    hidden = torch.randn(*tokens, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, tokens)
    return hidden, head, targets


def gradients(loss, hidden, head):
    return torch.autograd.grad(loss, [hidden, *head.parameters()])


@pytest.mark.parametrize("rows", [1, 7, 50, 101, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_torch_for_any_number_of_tiles(monkeypatch, rows, bias):
    monkeypatch.setattr(tiled_cross_entropy, "_TILE_BYTES", rows * 4 * 15)
    hidden, head, targets = case(bias=bias)
    targets[0, 1] = targets[2, 2] = -100
    ours = zinf.cross_entropy(hidden, head, targets)
    plain = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(gradients(ours * 3, hidden, head), gradients(plain * 3, hidden, head), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_largest_logits_stay_finite():
    hidden, head, targets = case()
    loss = zinf.cross_entropy(hidden * 1e4, head, targets)
    plain = F.cross_entropy(head(hidden * 1e4).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tiles", [1, 3])
def test_under_autocast_backward_has_the_logits_of_forward(tiles):
    """Float32 into the head, as a LayerNorm leaves it: both must multiply in autocast's dtype, and torch's gradients
    come out to the last bits of that."""
    hidden, head, targets = case(width=64)
    hidden = (hidden.detach() * 30).requires_grad_()
    if tiles > 1:
        zinf.tiled(head, tiles)
    found = []
    for loss_of in (zinf.cross_entropy, lambda h, head, t: F.cross_entropy(head(h).float().flatten(0, 1), t.flatten())):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(hidden, head, targets)
        loss.backward()
        found.append((loss.detach(), hidden.grad.clone(), *(param.grad.clone() for param in head.parameters())))
        hidden.grad = None
        head.zero_grad()
    assert found[0][0] == pytest.approx(found[1][0].item(), rel=1e-6)
    for mine, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert (mine - theirs).norm() <= 2e-3 * theirs.norm()
        assert mine.dtype is theirs.dtype is torch.float32


def test_no_tensor_as_large_as_the_logits_is_ever_made(monkeypatch):
    monkeypatch.setattr(tiled_cross_entropy, "_TILE_BYTES", 4 * 64 * 32)
    hidden, head, targets = case(tokens=(64,), width=8, vocabulary=4096, bias=False)
    largest = 0
    with torch.utils._python_dispatch._disable_current_modes(), _Largest() as seen:
        zinf.cross_entropy(hidden, head, targets).backward()
        largest = seen.numel
    assert largest == 4096 * 8  # the weight's gradient; the logits would be 64 * 4096


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of any result."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_misfits_are_refused_with_all_shapes():
    hidden, head, targets = case()
    with pytest.raises(ValueError, match=r"\(3, 5, 16\).*\(101, 16\).*\(3, 4\)"):
        zinf.cross_entropy(hidden, head, targets[:, :4])


def test_what_is_no_tensor_or_no_head_is_named():
    hidden, head, targets = case()
    for wrong in (nn.GELU(), head.weight, None):
        with pytest.raises(TypeError, match=f"head is a {type(wrong).__name__}"):
            zinf.cross_entropy(hidden, wrong, targets)
    with pytest.raises(TypeError, match="hidden is a list"):
        zinf.cross_entropy(hidden.tolist(), head, targets)
    with pytest.raises(TypeError, match="targets is a NoneType"):
        zinf.cross_entropy(hidden, head, None)


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("wrong", [101, 5000, -1, -101])
def test_a_target_that_is_no_row_is_refused_as_torch_does(tiles, wrong):
    hidden, head, targets = case()
    if tiles > 1:
        zinf.tiled(head, tiles)
    targets[1, 2] = wrong
    with pytest.raises(IndexError, match=f"target {wrong} is none of the head's 101 rows"):
        zinf.cross_entropy(hidden, head, targets)


def test_targets_are_numbers_of_rows():
    hidden, head, targets = case()
    with pytest.raises(ValueError, match=r"targets are torch\.float32"):
        zinf.cross_entropy(hidden, head, targets.float())


def test_a_head_on_nvme_trains_as_a_plain_one(nvme):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 16)
            self.head = nn.Linear(16, 101)

        def forward(self, x, targets, loss):
            return loss(torch.tanh(self.body(x)), self.head, targets)

    x, _, targets = case()
    x = x.detach()
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    ours = zinf.shard(Model(), config(nvme))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = torch.optim.AdamW(plain.parameters(), **settings), zinf.AdamW(ours.parameters(), **settings)
    for _ in range(5):
        losses = [model(x, targets, zinf.cross_entropy) for model in (plain, ours)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)

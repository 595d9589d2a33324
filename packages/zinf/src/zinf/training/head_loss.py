"""The loss of a Hugging Face model without its logits, where these would be large.

The output head is asked for the loss in place of logits: `zinf.cross_entropy`, over tiles of the vocabulary. That is
right where the model's logits are what its head gives, so a forward of one token finds that out first: some models
scale or cap them behind the head, and with these the logits are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import zinf
from zero3.tiles import tiles_of
from zinf.models.widened_linear import compute_dtype

# Float32 logits of more bytes than this are not wanted whole: they, their softmax and its gradient exist at once. It
# depends on sizes alone, not on what is free, since a sum over tiles is rounded otherwise.
_LARGE_LOGITS = 64 << 20


class HeadLoss:
    """Mean cross entropy by the output head of one model."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._head = _plain_head(model)
        self._is_last: bool | None = None

    def wanted(self, tokens: Tensor) -> bool:
        """Whether the loss of `tokens` (B, T) is to be had from the head. Collective, the first time."""
        if self._head is None:
            return False
        weight: Tensor = self._head.weight
        if tiles_of(weight) is None and 4 * tokens.numel() * len(weight) <= _LARGE_LOGITS:
            return False
        if self._is_last is None:
            self._is_last = _gives_the_logits(self._head, self._model, tokens[:1, :1])
        return self._is_last

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Of tokens and targets (B, T): a float32 scalar."""
        head = self._head
        assert head is not None, "asked though not wanted"

        def loss(hidden: Tensor) -> Tensor:
            dtype = compute_dtype(hidden.device, hidden.dtype)
            return zinf.cross_entropy(hidden.to(dtype), head, targets)

        with _forward(head, loss):
            return self._model(input_ids=tokens, use_cache=False).logits


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """The output head, where it is a linear layer and nothing else: not one with adapters, say."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head if type(head) is nn.Linear else None


@torch.no_grad()
def _gives_the_logits(head: nn.Module, model: nn.Module, token: Tensor) -> bool:
    given: list[Tensor] = []
    hook = head.register_forward_hook(lambda _module, _args, output: given.append(output))
    try:
        logits = model(input_ids=token, use_cache=False).logits
    finally:
        hook.remove()
    return len(given) == 1 and logits is given[0] and not logits._version


@contextmanager
def _forward(module: nn.Module, function) -> Iterator[None]:
    """Inside, `function` is the module's forward; hooks stay around it."""
    before = module.forward
    module.forward = function
    try:
        yield
    finally:
        module.forward = before

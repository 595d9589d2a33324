"""A GPT in plain PyTorch: what `zinf train` builds when no other model is named.

Nothing here knows that its parameters may lie on a drive: that is the point of the package. Each layer draws its
own initial values inside its constructor, so a model that is partitioned while it is built (paper, section 7.2)
starts from the same numbers as one that is built whole.

Shapes: B batch, T tokens, H hidden, A heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3.tiles import tiles_of
from zinf.models.widened_linear import compute_dtype, linear
from zinf.tiled_cross_entropy import cross_entropy

INIT_STD = 0.02  # of every weight matrix, as in GPT-2


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT.

    Raises ValueError when a size is not positive or `hidden` is no multiple of `heads`.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int  # the longest sequence that the model can read
    tied: bool = True  # the output head is the token embedding

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"a GPT needs {name} >= 1, not {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is no multiple of heads={self.heads}")

    @property
    def numel(self) -> int:
        """Parameters of the model, each counted once (a tied head is the embedding)."""
        block = 12 * self.hidden**2 + 13 * self.hidden  # 4 H² attention, 8 H² MLP, biases, two norms
        embeddings = (self.vocab + self.positions) * self.hidden
        head = 0 if self.tied else self.vocab * self.hidden
        return self.layers * block + embeddings + 2 * self.hidden + head


class GPT(nn.Module):
    """Decoder-only Transformer: learned positions, normalisation before each sublayer, GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = _Embedding(config.vocab, config.hidden)
        self.position_embedding = _Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _LayerNorm(config.hidden)
        if config.tied:
            self.head: nn.Module = _TiedHead(self.token_embedding.weight)
        else:
            self.head = _Linear(config.hidden, config.vocab, std=INIT_STD, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss when targets are given.

        `tokens` and `targets` are (B, T) int64. Logits are (B, T, V), in the dtype that the machine multiplies in;
        the loss is the mean cross entropy in nats, a float32 scalar. ValueError when T exceeds `config.positions`.
        """
        length = tokens.shape[-1]
        if length > self.config.positions:
            raise ValueError(f"a sequence of {length} tokens is longer than positions={self.config.positions}")
        positions = torch.arange(length, device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        hidden = hidden.to(compute_dtype(hidden.device, hidden.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        if targets is not None and tiles_of(self.head.weight) is not None:
            return cross_entropy(hidden, self.head, targets)  # logits that large are not wanted whole either
        logits = self.head(hidden)
        if targets is None:
            return logits
        # In float32 whatever the parameters are: a bf16 sum over the vocabulary would lose the small terms.
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _LayerNorm(config.hidden)
        self.attention = _Attention(config)
        self.mlp_norm = _LayerNorm(config.hidden)
        self.mlp = _MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = _Linear(config.hidden, 3 * config.hidden, std=INIT_STD)
        self.projection = _Linear(config.hidden, config.hidden, std=_residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # (B, A, T, H / A)
            for part in self.query_key_value(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(-3, -2).flatten(-2))


class _MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = _Linear(config.hidden, 4 * config.hidden, std=INIT_STD)
        self.projection = _Linear(4 * config.hidden, config.hidden, std=_residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        return self.projection(F.gelu(self.widen(hidden), approximate="tanh"))


class _TiedHead(nn.Module):
    """Output head whose weight is the token embedding's: one parameter, owned by two modules."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # (V, H)

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, H) -> (B, T, V)
        return linear(hidden, self.weight, None)


class _Linear(nn.Linear):
    """Linear layer that draws normal values of the given deviation, within its own constructor."""

    def __init__(self, in_features: int, out_features: int, *, std: float, bias: bool = True) -> None:
        self.std = std  # before the base constructor, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        # The two vectors are widened to the activations' dtype, where they are narrower.
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def _residual_std(config: GPTConfig) -> float:
    # Each of the 2 · layers sublayers adds to the residual stream: scaled so, its variance does not grow with depth.
    return INIT_STD / math.sqrt(2 * config.layers)

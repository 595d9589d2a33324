"""Memory that training a Transformer needs (paper, section 3), in bytes and exact.

Symbols of the paper: nl layers, hd hidden size, bsz sequences, seq tokens of a sequence, ci Transformer blocks between
two activation checkpoints. Everything is for mixed precision: fp16 (or bf16) in use, fp32 in Adam.
"""

from __future__ import annotations

PARAMETER_BYTES = 2  # in use
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 16  # fp32: momentum, variance, parameter, gradient
MODEL_STATE_BYTES = PARAMETER_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES  # 20 a parameter


def parameters(*, layers: int, hidden: int) -> int:
    """Parameters of a Transformer: 12 · nl · hd², embeddings and vectors left out.

    A block has four linear maps: (hd, 3hd), (hd, hd), (hd, 4hd), (4hd, hd).
    """
    return 12 * layers * hidden**2


def model_states(*, layers: int, hidden: int) -> int:
    """Parameters, gradients and optimizer states: 240 · nl · hd²."""
    return MODEL_STATE_BYTES * parameters(layers=layers, hidden=hidden)


def activation_checkpoints(*, batch: int, seq: int, hidden: int, layers: int, blocks_per_checkpoint: int = 1) -> int:
    """Activations kept from forward to backward with checkpointing: 2 · bsz · seq · hd · nl / ci.

    Where nl is no multiple of ci, the checkpoint of the last, shorter group counts too.
    """
    checkpoints = -(-layers // blocks_per_checkpoint)
    return 2 * batch * seq * hidden * checkpoints


def activations(*, batch: int, seq: int, hidden: int, heads: int, layers: int) -> int:
    """All activations, without checkpointing: the working memory of a block, nl times."""
    block = activation_working_memory(batch=batch, seq=seq, hidden=hidden, heads=heads)
    return layers * block


def model_state_working_memory(*, hidden: int) -> int:
    """What the largest single operator needs at once: 4 · hd · 4hd.

    That operator is the map from hd to 4hd, its parameters and gradients whole and contiguous, 2 bytes each.
    """
    return 4 * hidden * 4 * hidden


def activation_working_memory(*, batch: int, seq: int, hidden: int, heads: int, blocks_per_checkpoint: int = 1) -> int:
    """Activations between two checkpoints, while backward recomputes them.

    It is bsz · seq · ci · (16 · hd + 2 · heads · seq). The last term is the attention scores; attention that never
    stores them does without it.
    """
    return batch * seq * blocks_per_checkpoint * (16 * hidden + 2 * heads * seq)

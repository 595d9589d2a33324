"""Bandwidth that training needs (paper, section 4): arithmetic intensity, efficiency, and the one from the other.

Arithmetic intensity (ait) is floating-point operations a byte moved. Bandwidths are bytes a second, peaks
floating-point operations a second, both of one device; efficiencies lie between 0 and 1.
"""

from __future__ import annotations

from fractions import Fraction

V100_PEAK = 70e12  # what a V100 reaches on such matrix products (paper, section 4)


def flops_per_iteration(*, batch: int, seq: int, parameters: int) -> int:
    """2 · 4 · bsz · seq · parameters: forward 1, backward 2, recomputation 1; 2 for multiply and add."""
    return 2 * 4 * batch * seq * parameters


def ait_parameters_and_gradients(*, batch: int, seq: int) -> Fraction:
    """seq · bsz: parameters are loaded three times and gradients stored once, 2 bytes each."""
    return Fraction(seq * batch)


def ait_optimizer_states(*, batch: int, seq: int) -> Fraction:
    """seq · bsz / 4: 16 bytes a parameter are read once and written once."""
    return Fraction(seq * batch, 4)


def ait_activation_checkpoints(*, hidden: int, blocks_per_checkpoint: int = 1) -> Fraction:
    """24 · hd · ci: checkpoints are written once and read once."""
    return Fraction(24 * hidden * blocks_per_checkpoint)


def efficiency(*, ait: float | Fraction, bandwidth: float, peak: float = V100_PEAK) -> float:
    """Share of the peak that is reached when moving data and computing take turns.

    ait · bw / (ait · bw + peak). Nothing is assumed to overlap, so this is a lower bound.
    """
    rate = float(ait) * bandwidth
    return rate / (rate + peak)


def bandwidth_for(*, efficiency: float, ait: float | Fraction, peak: float = V100_PEAK) -> float:
    """The bandwidth at which `efficiency` is reached: `efficiency` solved for bw. ValueError outside [0, 1)."""
    if not 0 <= efficiency < 1:
        raise ValueError(f"an efficiency of {efficiency} is not reached at any bandwidth: give one in [0, 1)")
    return efficiency / (1 - efficiency) * peak / float(ait)

"""Adam in float64 numpy, written as in the papers: what the kernel is measured against, and its explanation.

Slow and plain on purpose; new arrays come back, nothing is changed.
"""

import numpy


def adam(
    param: numpy.ndarray,
    grad: numpy.ndarray,
    exp_avg: numpy.ndarray,
    exp_avg_sq: numpy.ndarray,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """One step: (param, exp_avg, exp_avg_sq) after it, float64, of the same shape.

    Kingma and Ba, "Adam" (arXiv 1412.6980), algorithm 1. The weight decay is Loshchilov and Hutter's, "Decoupled
    weight decay regularization" (arXiv 1711.05101), algorithm 2: line 6 (L2) or line 12 (decoupled, multiplied
    by lr as torch does).
    """
    beta1, beta2 = betas
    p, g, m, v = (numpy.asarray(array, dtype=numpy.float64) for array in (param, grad, exp_avg, exp_avg_sq))
    g = g * grad_scale
    if not decoupled:
        g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    if decoupled:
        p = p - lr * weight_decay * p
    p = p - lr * m_hat / (numpy.sqrt(v_hat) + eps)
    return p, m, v

"""Adam on the CPU at memory speed.

    cpu_adam.step(param, grad, exp_avg, exp_avg_sq, step=1, lr=1e-3)

`cpu_adam.torch` (CPUAdam) and `cpu_adam.optax` (adamw) are imported by name; this package itself needs
numpy and cffi only.
"""

from cpu_adam.gradient_norm import norm2
from cpu_adam.instruction_sets import isa, isas
from cpu_adam.remainder import join, split
from cpu_adam.update import step

__version__ = "0.1.0"
__all__ = ["isa", "isas", "join", "norm2", "split", "step"]

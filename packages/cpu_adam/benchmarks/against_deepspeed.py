"""Against DeepSpeedCPUAdam, and against it followed by a copy of the parameters to bf16.

    python benchmarks/against_deepspeed.py [--numel N] [--threads 1 2] [--rounds R]

DeepSpeed compiles its operator at first use (about half a minute). torch's fused AdamW runs beside it, since
the better of the two is the one to be measured against. JSON on stdout.
"""

from report import main

from cpu_adam import contestants
from cpu_adam.alternation import System


def systems(numel: int, threads: int) -> dict[str, System]:
    return {
        "fp32": contestants.fp32(numel, threads),
        "DeepSpeed": contestants.deepspeed(numel),
        "torch fused": contestants.torch_fused(numel),
        "with bf16 copy": contestants.fp32_with_bf16_copy(numel, threads),
        "DeepSpeed, then bf16 copy": contestants.deepspeed(numel, bf16_copy=True),
        "split master": contestants.split_master(numel, threads),
    }


RATIOS = {
    "fp32 / DeepSpeed": ("fp32", "DeepSpeed"),
    "fp32 / torch fused": ("fp32", "torch fused"),
    "with bf16 copy / DeepSpeed, then bf16 copy": ("with bf16 copy", "DeepSpeed, then bf16 copy"),
    "split master / DeepSpeed, then bf16 copy": ("split master", "DeepSpeed, then bf16 copy"),
    "split master / fp32": ("split master", "fp32"),
}

if __name__ == "__main__":
    main(__doc__, systems, RATIOS)

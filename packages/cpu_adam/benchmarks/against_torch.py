"""Against torch.optim.AdamW(fused=True), and against it followed by a copy of the parameters to bf16.

    python benchmarks/against_torch.py [--numel N] [--threads 1 2] [--rounds R]

JSON on stdout.
"""

from report import main

from cpu_adam import contestants
from cpu_adam.alternation import System


def systems(numel: int, threads: int) -> dict[str, System]:
    return {
        "fp32": contestants.fp32(numel, threads),
        "torch fused": contestants.torch_fused(numel),
        "with bf16 copy": contestants.fp32_with_bf16_copy(numel, threads),
        "torch fused, then bf16 copy": contestants.torch_fused(numel, bf16_copy=True),
        "split master": contestants.split_master(numel, threads),
    }


RATIOS = {
    "fp32 / torch fused": ("fp32", "torch fused"),
    "with bf16 copy / torch fused, then bf16 copy": ("with bf16 copy", "torch fused, then bf16 copy"),
    "split master / torch fused, then bf16 copy": ("split master", "torch fused, then bf16 copy"),
}

if __name__ == "__main__":
    main(__doc__, systems, RATIOS)

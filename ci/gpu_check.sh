#!/usr/bin/env bash
# A short run on a machine with an accelerator: are the numbers right there, and how fast is it? On a machine without
# one it does the same on the CPU.
#
#   ci/gpu_check.sh [OUT]           OUT: where the figures go (gpu-check)
#
# PYTHON is an interpreter with torch for that accelerator; our packages are installed into a venv on top of it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpu-check}
mkdir -p "$out/nvme"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv --system-site-packages "$work/venv"
bin=$work/venv/bin
# Not the constraints: the torch that is there is the one that fits the accelerator.
"$bin/python" -m pip install --quiet packages/deepnvme packages/cpu_adam packages/zero3 packages/zinf pytest pytest-timeout
"$bin/python" -c 'import torch; print("torch", torch.__version__, "on", torch.accelerator.current_accelerator() or "cpu")'

# Right: what the packages' own tests ask of numbers, on whatever device torch chooses.
"$bin/python" -m pytest -m "not slow and not root and not peers" packages/zero3/tests packages/zinf/tests tests/test_tiers_agree.py \
    2>&1 | tee "$out/tests.txt" | tail -3

# Fast: the same model with its states on the device, in host memory and on the drive.
for preset in zero3 inf-cpu inf-nvme; do
    "$bin/zinf" train --model gpt2-124m --preset "$preset" --nvme "$out/nvme" --out "$work/$preset" --steps 20 \
        --batch 8 --seq 1024 --sample-length 0 --metrics "$out/$preset.jsonl" 2>/dev/null | tee "$out/$preset.txt"
done

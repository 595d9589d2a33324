"""Puts arrays that are not needed for a while on the drive, and fetches each ahead of its use. deepnvme alone.

python examples/swap_tensors.py --nvme /mnt/nvme
"""

import argparse
import tempfile

import numpy as np

import deepnvme

LAYERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", nargs="*", help="directories, one a drive (a temporary one)")
    arguments = parser.parse_args()
    drives = arguments.nvme or [tempfile.mkdtemp()]

    with deepnvme.Swap(drives) as swap:
        written = [
            swap.put(f"layer{i}", np.full((1024, 1024), i, dtype=np.float32))  # returns at once
            for i in range(LAYERS)
        ]
        for request in written:
            request.wait()
        print(f"{swap.nbytes:,} bytes on the drive")

        total = 0.0
        coming = swap.get("layer0")
        for i in range(LAYERS):
            array = np.from_dlpack(coming.result())  # arrived, and checked against its checksum
            if i + 1 < LAYERS:
                coming = swap.get(f"layer{i + 1}")  # on its way while we work on this one
            total += float(array.sum())
        print(f"sum of all: {total:,.0f}")


if __name__ == "__main__":
    main()

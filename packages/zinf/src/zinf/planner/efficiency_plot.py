"""Efficiency against bandwidth, drawn for one model: the paper's Figure 3. Needs matplotlib (zinf[plot])."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from zinf.planner.bandwidth import efficiency


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws what `estimate` returned; the ending of `path` chooses the format.

    A curve for each kind of data, and a point where the cluster stands. Raises OSError or ValueError when the file
    cannot be written or its ending is of no known format.
    """
    peak = result["cluster"]["peak_flops_per_second_per_device"]
    # No pyplot: it would look for a screen.
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).add_subplot()
    rates = np.logspace(8, 13, 200)  # 0.1 GB/s to 10 TB/s
    for kind, intensity in result["compute"]["arithmetic_intensity"].items():
        curve = [100 * efficiency(ait=intensity, bandwidth=rate, peak=peak) for rate in rates]
        (line,) = axes.semilogx(rates / 1e9, curve, label=kind.replace("_", " "))
        rate = result["speed"]["bandwidth_per_device"][kind]
        if rate:
            axes.plot(rate / 1e9, 100 * result["speed"]["efficiency"][kind], "o", color=line.get_color())
    axes.set_xlabel("bandwidth of a device, GB/s")
    axes.set_ylabel("efficiency, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend()
    model, cluster = result["model"], result["cluster"]
    axes.set_title(f"{model['parameters']:.3g} parameters on {cluster['nodes']} x {cluster['machine']}")
    figure.savefig(path)

"""Records -> JSON, a table, one self-contained HTML page."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ..sizes import format_size

Report = dict[str, Any]  # "where": drive_facts.facts(), "written_bytes", "records"
Series = dict[str, list[tuple[float, float]]]  # label -> points

_COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#4b5563", "#ca8a04")


def write_json(report: Report, path: str) -> None:
    """The report as JSON; path "-" is standard output."""
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(path, "w") as f:
            f.write(text)


def print_table(report: Report) -> None:
    """One line a record, best first within each operation; what could not run at the end, with its reason."""
    table = Table("op", "by", "engine", "block", "depth", "GB/s", "p50 us", "p99 us", "CPU s/GB", "path")
    ran = [r for r in report["records"] if "gigabytes_per_second" in r]
    for r in sorted(ran, key=lambda r: (r["op"], -r["gigabytes_per_second"])):
        latency: dict[str, float] = next(iter(r["latency_microseconds"].values()), {})
        table.add_row(
            r["op"],
            r["system"],
            r["backend"],
            format_size(r["block_size"]),
            str(r["queue_depth"]),
            f"{r['gigabytes_per_second']:.2f}",
            f"{latency.get('p50', 0):.0f}",
            f"{latency.get('p99', 0):.0f}",
            f"{r['cpu_seconds_per_gigabyte'] or 0:.3f}",
            way(r),
        )
    # A pipe has no width: there, nothing is squeezed.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(cache_state(ran), highlight=False)
    for reason in sorted({f"{r['backend']}: {r['why_not']}" for r in report["records"] if "why_not" in r}):
        console.print(f"not measured: {reason}", style="yellow", highlight=False)
    if any(way(r) == "page cache" for r in ran):
        console.print("Through the page cache: these rates are partly those of memory.", style="yellow")
    console.print(wear(report), highlight=False)


def way(record: dict[str, Any]) -> str:
    """Whether a record's bytes really met the drive."""
    return "direct" if record["direct"] else "page cache"


def cache_state(records: list[dict[str, Any]]) -> str:
    """Whether the reads could have come from memory."""
    ours = [r for r in records if "cached_before" in r]
    if not ours:
        return ""
    size = format_size(ours[0]["file_size"])
    before, after = (max(r[when] for r in ours) for when in ("cached_before", "cached_after"))
    return f"file of {size}: at most {before} bytes in the page cache before a measurement, {after} after it"


def wear(report: Report) -> str:
    """What was written, and what that means for the drive where it tells."""
    written = f"{report['written_bytes'] / 1e9:.2f} GB were written"
    endurance = report["where"]["endurance"]
    if "why_not" in endurance:
        return f"{written}; endurance: {endurance['why_not']}."
    total, used = endurance["written_bytes"], endurance["percentage_used"]
    text = f"{written}; the drive has taken {total / 1e12:.1f} TB in its life and calls itself {used} % used"
    if used:
        text += f", so this run was about {report['written_bytes'] / (total / used * 100):.1e} of what it endures"
    return text + "."


def write_html(report: Report, path: str) -> None:
    """One page without any reference to another: tables and SVG plots."""
    records = report["records"]
    ran = [r for r in records if "gigabytes_per_second" in r]
    parts = [_where(report)]
    for op in dict.fromkeys(r["op"] for r in ran):
        mine = [r for r in ran if r["op"] == op]
        parts.append(f"<h2>{html.escape(op)}</h2><div class=row>")
        parts.append(
            _plot(
                "Throughput over block size",
                "block size, KiB",
                "GB/s",
                _best_over(mine, lambda r: r["block_size"] / 1024),
            )
        )
        parts.append(_plot("Throughput over queue depth", "queue depth", "GB/s", _best_over(mine, _depth)))
        parts.append(_plot("Latency of the largest depth", "percentile", "us", _latencies(mine), logarithmic=False))
        parts.append("</div>")
    for r in records:
        if "series" in r:
            parts.append(f"<h2>{html.escape(r['op'])} over time</h2>")
            title = "A fall is where the drive's write cache is full"
            parts.append(_plot(title, "seconds", "GB/s", {r["backend"]: r["series"]}, logarithmic=False))
    parts.append(_record_table(records))
    page = _PAGE.replace("CONTENT", "\n".join(parts))
    with open(path, "w") as f:
        f.write(page)


def _depth(record: dict[str, Any]) -> float:
    return record["queue_depth"]


def _best_over(records: list[dict[str, Any]], x: Callable[[dict[str, Any]], float]) -> Series:
    """For every engine, ours and fio's, the best rate at each x."""
    best: dict[str, dict[float, float]] = {}
    for r in records:
        line = best.setdefault(f"{r['system']} {r['backend']}", {})
        line[x(r)] = max(line.get(x(r), 0), r["gigabytes_per_second"])
    return {label: sorted(line.items()) for label, line in best.items()}


def _latencies(records: list[dict[str, Any]]) -> Series:
    """Latency at each percentile, of the record with the largest depth and smallest block of every engine."""
    chosen: dict[str, dict[str, Any]] = {}
    for r in sorted(records, key=lambda r: (r["queue_depth"], -r["block_size"])):
        chosen[f"{r['system']} {r['backend']}"] = r
    series: Series = {}
    for label, r in chosen.items():
        for op, figures in r["latency_microseconds"].items():
            points = [(float(name[1:]), value) for name, value in figures.items() if name.startswith("p")]
            series[f"{label} {op}" if len(r["latency_microseconds"]) > 1 else label] = sorted(points)
    return series


def _plot(title: str, x_label: str, y_label: str, series: Series, logarithmic: bool = True) -> str:
    """A line plot as SVG; x is spaced by rank when logarithmic, as powers of two are."""
    width, height, left, bottom, top = 420, 260, 50, 40, 30
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    ticks = sorted({x for x, _ in points})
    y_max = max(y for _, y in points) * 1.1 or 1

    def place_x(x: float) -> float:
        span = width - left - 15
        if logarithmic:
            return left + span * (ticks.index(x) / max(1, len(ticks) - 1))
        return left + span * (x - ticks[0]) / ((ticks[-1] - ticks[0]) or 1)

    def place_y(y: float) -> float:
        return height - bottom - (height - bottom - top) * y / y_max

    out = [f'<svg viewBox="0 0 {width} {height + 16 * len(series)}" role="img"><title>{html.escape(title)}</title>']
    out.append(f'<text x="{left}" y="16" class="t">{html.escape(title)}</text>')
    for i in range(5):
        y = y_max * i / 4
        out.append(f'<path d="M{left} {place_y(y):.1f}H{width - 15}" class="g"/>')
        out.append(f'<text x="{left - 6}" y="{place_y(y) + 4:.1f}" class="r">{y:.3g}</text>')
    for x in ticks if len(ticks) <= 8 else ticks[:: -(-len(ticks) // 8)]:
        out.append(f'<text x="{place_x(x):.1f}" y="{height - bottom + 16}" class="m">{x:g}</text>')
    out.append(f'<text x="{(width + left) / 2:.0f}" y="{height - 6}" class="m">{x_label}</text>')
    middle = height // 2
    out.append(f'<text x="12" y="{middle}" class="m" transform="rotate(-90 12 {middle})">{y_label}</text>')
    for i, (label, line) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        dash = ' stroke-dasharray="5 4"' if label.startswith("fio") else ""
        path = "L".join(f"{place_x(x):.1f} {place_y(y):.1f}" for x, y in line)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out.extend(f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in line)
        y = height + 10 + 16 * i
        out.append(f'<path d="M{left} {y - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{left + 30}" y="{y}">{html.escape(label)}</text>')
    return "".join(out) + "</svg>"


def _where(report: Report) -> str:
    where = report["where"]
    rows = {
        "directory": where["directory"],
        "filesystem": f"{where['filesystem']['type']} ({where['filesystem']['options']})",
        "drive": f"{where['drive']['name']} {where['drive'].get('model') or ''}",
        "engines": ", ".join(f"{name}: {state}" for name, state in where["backends"].items()),
        "wear": wear(report),
    }
    return "<table>" + "".join(f"<tr><th>{k}<td>{html.escape(str(v))}" for k, v in rows.items()) + "</table>"


def _record_table(records: Iterable[dict[str, Any]]) -> str:
    head = ("op", "by", "engine", "block", "depth", "GB/s", "CPU s/GB", "path")
    rows = []
    for r in records:
        figures = ["", "", r.get("why_not", "")]
        if "gigabytes_per_second" in r:
            figures = [f"{r['gigabytes_per_second']:.2f}", f"{r['cpu_seconds_per_gigabyte'] or 0:.3f}", way(r)]
        first = [r["op"], r.get("system", "deepnvme"), r["backend"], format_size(r["block_size"]), r["queue_depth"]]
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in [*first, *figures]))
    return f"<h2>All</h2><table><tr>{''.join(f'<th>{h}' for h in head)}{''.join(rows)}</table>"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>deepnvme-bench</title>
<style>
body { font: 14px system-ui, sans-serif; max-width: 1320px; margin: 2em auto; padding: 0 1em; color: #1f2937 }
.row { display: flex; flex-wrap: wrap; gap: 1em } svg { width: 420px; font: 11px system-ui, sans-serif }
.t { font-weight: 600; font-size: 13px } .m { text-anchor: middle } .r { text-anchor: end } .g { stroke: #e5e7eb }
table { border-collapse: collapse } td, th { padding: 2px 10px; text-align: left; border-bottom: 1px solid #e5e7eb }
</style>
<h1>deepnvme-bench</h1>
CONTENT
</html>
"""

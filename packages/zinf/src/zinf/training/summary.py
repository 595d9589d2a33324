"""What a finished run has to say: losses, a sample, memory, time, traffic, and where the files lie."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import Counter
from collections.abc import Iterable

import zero3
import zinf
from zinf.planner.memory import MODEL_STATE_BYTES
from zinf.training.loop import Outcome
from zinf.training.sampling import printable
from zinf.training.settings import DTYPES
from zinf.unit_states import state_bytes


def peak_process_bytes() -> int:
    """The most memory that this process has had at once, in bytes (Python, torch and all)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def summarize(outcome: Outcome, *, baseline_bytes: int) -> str:
    """The summary as lines of text. `baseline_bytes`: the process's peak before the model was built."""
    sections = [_losses(outcome), _sample(outcome), _memory(outcome, baseline_bytes)]
    if outcome.records:
        sections += [_time(outcome), _traffic(outcome)]
    sections.append(_files(outcome))
    return "\n\n".join(sections)


def _losses(outcome: Outcome) -> str:
    before, after = outcome.run.validation_before, outcome.validation_after
    unit = outcome.run.inputs.task.unit
    return f"Validation loss: {before:.4f} before, {after:.4f} after {outcome.run.step} steps (nats a {unit})"


def _sample(outcome: Outcome) -> str:
    text = f"{printable(outcome.prompt)}|{printable(outcome.sample)}"
    return _section("Sample (the model continues at the bar)", (f"  {line}" for line in text.splitlines()))


def _memory(outcome: Outcome, baseline_bytes: int) -> str:
    run = outcome.run
    numel = run.inputs.task.numel
    lines = [
        _row(
            "by the paper's count",
            _size(MODEL_STATE_BYTES * numel),
            f"{MODEL_STATE_BYTES} bytes x {numel:,} parameters",
        ),
        *(
            _row(f"on {tier}" if tier == "nvme" else f"in {tier} memory", _size(nbytes), ", ".join(kinds))
            for tier, (nbytes, kinds) in sorted(_states_by_tier(outcome).items())
        ),
        _row("peak of this process", _size(peak_process_bytes()), f"{_size(baseline_bytes)} before the model"),
    ]
    if outcome.records:
        peak = outcome.records[-1]["report"]["peak"]
        lines.append(_row("zinf's own part of it", _size(peak["device"] + peak["host"]),
                          f"gathered units {_size(peak['device'])}, host buffers {_size(peak['host'])}"))  # fmt: skip
    return _section("Model states and memory", lines)


def _time(outcome: Outcome) -> str:
    reports = [record["report"] for record in outcome.records]
    medians = {
        part: statistics.median(report["seconds"][part] for report in reports)
        for part in reports[0]["seconds"]
        if part != "step"
    }
    whole = statistics.median(record["seconds"] for record in outcome.records)
    lines = [_row(part, f"{seconds:.3f} s", f"{100 * seconds / whole:.0f} %") for part, seconds in medians.items()]
    floors = {limit: seconds for limit, seconds in reports[-1]["limit"].items() if seconds}
    if floors:
        limit = max(floors, key=lambda name: floors[name])
        lines.append(_row("predicted floor", f"{floors[limit]:.3f} s", f"set by {limit}"))
    return _section(f"Time: {whole:.3f} s a step (medians of {len(reports)}; parts overlap)", lines)


def _traffic(outcome: Outcome) -> str:
    numel = outcome.run.inputs.task.numel
    reports = [record["report"] for record in outcome.records]
    io = reports[-1]["io"]
    lines = [_row("engine", str(io["backend"]), "direct (O_DIRECT)" if io["direct"] else "through the page cache")]
    lines += [_row("directory", "", str(directory)) for directory in io["dirs"]]
    for name, key in (("read", "nvme_read"), ("written", "nvme_written")):
        nbytes = statistics.median(report["bytes"][key] for report in reports)
        per_parameter = nbytes / numel * outcome.run.ranks.count  # each rank moves its own shards
        lines.append(_row(f"{name} a step", _size(int(nbytes)), f"{per_parameter:.2f} bytes a parameter"))
    # The first step learns the order of the units, so it has nothing to prefetch by.
    learnt = [record["report"]["prefetch"] for record in outcome.records if record["step"] > 1]
    hits, misses = (sum(prefetch[key] for prefetch in learnt) for key in ("hits", "misses"))
    if hits + misses:
        lines.append(_row("prefetches that hit", f"{100 * hits / (hits + misses):.1f} %", f"{hits} of {hits + misses}"))
    return _section("Drive", lines)


def _files(outcome: Outcome) -> str:
    settings, checkpoint = outcome.run.settings, outcome.checkpoint
    if checkpoint:
        lines = [_row("checkpoint", "", f"{checkpoint.path} ({_size(checkpoint.nbytes)}, {checkpoint.method})")]
    else:
        lines = [_row("checkpoint", "", f"the newest in {settings.out}; no step was left to take")]
    lines.append(_row("metrics", "", str(settings.metrics_path)))
    if settings.trace:
        lines.append(_row("timeline", "", f"{settings.trace} (open it in Perfetto)"))
    return _section("Files", lines)


def _states_by_tier(outcome: Outcome) -> dict[str, tuple[int, list[str]]]:
    """Bytes of the model states that rest on each tier, over all ranks, and of which kinds they are."""
    bytes_of = state_bytes(DTYPES[outcome.run.settings.dtype])
    nbytes: Counter[str] = Counter()
    kinds: dict[str, dict[str, None]] = {}  # a dict keeps the order in which kinds were seen
    placement = zinf.report(outcome.run.model)["placement"]
    for unit in zero3.units(outcome.run.model):
        for kind, tier in placement[unit.slots[0].name].items():
            nbytes[tier] += bytes_of[kind] * unit.numel
            kinds.setdefault(tier, {})[kind] = None
    return {tier: (nbytes[tier], list(kinds[tier])) for tier in nbytes}


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *lines])


def _row(name: str, figure: str, remark: str) -> str:
    return f"  {name:<22}{figure:>12}  {remark}".rstrip() if figure else f"  {name:<22}{remark}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"

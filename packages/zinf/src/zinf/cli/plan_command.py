"""`zinf plan`: what a model needs and how fast it can be on a cluster, before anything is bought or run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from zinf.cli.command_group import BadInput, GivenPath
from zinf.models.model_names import BUILTIN_MODEL, parse_sizes
from zinf.planner.cluster import MACHINES, Machine
from zinf.planner.estimate import Workload, estimate

_HERE = "here"
_POSITIVE = click.IntRange(min=1)


@click.command
@click.option("--layers", type=_POSITIVE, help="Transformer blocks; with --hidden and --heads instead of --model.")
@click.option("--hidden", type=_POSITIVE, help="Hidden size.")
@click.option("--heads", type=_POSITIVE, help="Attention heads.")
@click.option(
    "--model",
    type=GivenPath(),
    metavar="NAME",
    help=f"A model by name, as for `zinf train`.  [default: {BUILTIN_MODEL}]",
)
@click.option("--batch", default=4, type=_POSITIVE, help="Sequences a device and iteration.")
@click.option("--seq", default=1024, type=_POSITIVE, help="Tokens a sequence.")
@click.option("--blocks-per-checkpoint", default=1, type=_POSITIVE, help="Blocks between activation checkpoints.")
@click.option("--tiles", default=1, type=_POSITIVE, help="Tiles that the largest operator is cut into.")
@click.option(
    "--machine",
    default=_HERE,
    type=click.Choice([_HERE, *MACHINES]),
    help="A machine of the paper, or this one, measured.",
)
@click.option("--nodes", default=1, type=_POSITIVE, help="How many of these machines.")
@click.option("--preset", default="inf-nvme", help="Where each kind of state lies: a preset of zinf.Config.")
@click.option("--json", "as_json", is_flag=True, help="Every quantity, in bytes and exact.")
@click.option("--plot", type=GivenPath(path_type=Path), help="Draw efficiency against bandwidth into this file.")
def plan(
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    model: str | None,
    batch: int,
    seq: int,
    blocks_per_checkpoint: int,
    tiles: int,
    machine: str,
    nodes: int,
    preset: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Memory, bandwidth and speed of a model on a cluster, from the equations of the paper."""
    try:
        sizes = _sizes(layers, hidden, heads, model, seq)
        workload = Workload(**sizes, batch=batch, seq=seq, blocks_per_checkpoint=blocks_per_checkpoint, tiles=tiles)
        result = estimate(workload, _machine(machine), nodes=nodes, preset=preset)
    except ValueError as error:
        raise BadInput(str(error)) from error
    except OverflowError as error:
        raise BadInput("these sizes lead to numbers beyond 1e308, of which there is no estimate") from error
    if plot:
        _draw(result, plot)
    click.echo(json.dumps(result, indent=2) if as_json else _table(result))


def _sizes(layers: int | None, hidden: int | None, heads: int | None, model: str | None, seq: int) -> dict[str, int]:
    given = {"layers": layers, "hidden": hidden, "heads": heads}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return parse_sizes(model or BUILTIN_MODEL, positions=seq)
    if model or missing:
        raise ValueError("give either --model, or all of --layers, --hidden and --heads")
    return parse_sizes(f"gpt:layers={layers},hidden={hidden},heads={heads}", positions=seq)


def _machine(name: str) -> Machine:
    if name != _HERE:
        return MACHINES[name]
    from zinf.planner.measurement import measure_here  # torch and the drive: only where they are asked for

    try:
        return measure_here(Path.cwd())
    except OSError as error:
        raise BadInput(f"this machine's drive cannot be measured in {Path.cwd()}: {error.strerror}") from error


def _table(result: dict[str, Any]) -> str:
    model, cluster, placement, speed = (result[part] for part in ("model", "cluster", "placement", "speed"))
    lines = [
        f"{model['parameters']:,} parameters: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['heads']} heads; {model['batch_per_device']} x {model['seq']} tokens a device",
        f"on {cluster['nodes']} x {cluster['machine']} (devices: {cluster['devices']}; {cluster['source']})",
        "",
        "Memory of the model (activations: of one device)",
        *(_row(_words(name), _size(nbytes)) for name, nbytes in result["memory"].items()),
        "",
        f"Memory of a node with preset {placement['preset']}: "
        + ("it fits" if placement["fits"] else "it does not fit"),
        *(
            _row(tier, f"{_size(amount['needed'])} of {_size(amount['available'])}")
            for tier, amount in placement["bytes_per_node"].items()
        ),
        "",
        f"Bandwidth ({cluster['peak_flops_per_second_per_device'] / 1e12:.3g} TFLOPS a device)",
        *(_bandwidth_row(result, kind) for kind in speed["efficiency"]),
        "",
        "Time of an iteration",
        *(_row(_words(kind), f"{seconds:.3g} s") for kind, seconds in speed["seconds"].items()),
        "",
        "Speed at best, everything overlapped",
        _row("TFLOPS a device", f"{speed['flops_per_second_per_device']['overlapped'] / 1e12:.3g}"),
        _row("tokens a second", f"{speed['tokens_per_second']['overlapped']:,.0f}"),
    ]
    return "\n".join(lines)


def _bandwidth_row(result: dict[str, Any], kind: str) -> str:
    intensity = result["compute"]["arithmetic_intensity"][kind]
    rate = result["speed"]["bandwidth_per_device"][kind]
    has = f"{rate / 1e9:,.1f} GB/s" if rate else "in place"
    share = f"{100 * result['speed']['efficiency'][kind]:.1f} %"
    half = f"{result['speed']['bandwidth_for_half_efficiency'][kind] / 1e9:,.3g} GB/s for 50 %"
    return _row(_words(kind), f"{intensity:,.0f} operations a byte; {has}: efficiency {share}; {half}")


def _row(name: str, figure: str) -> str:
    return f"  {name:<28}{figure}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _size(nbytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes / 1e6:.2f} MB"


def _draw(result: dict[str, Any], path: Path) -> None:
    if path.is_dir():  # the drawing would get a name beside it that nobody has given
        raise BadInput(f"--plot {path}: is a directory, not a file")
    try:
        from zinf.planner.efficiency_plot import draw
    except ImportError as error:
        raise BadInput("--plot needs matplotlib: pip install 'zinf[plot]'") from error
    try:
        draw(result, path)
    except (OSError, ValueError) as error:  # the folder is missing, or the file's ending is of no known format
        raise BadInput(f"--plot {path}: {' '.join(str(error).split())}") from error

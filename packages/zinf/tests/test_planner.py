"""The paper's own figures, to the printed digit (arXiv 2104.07857 and the authors' SC21 slides)."""

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner

from zinf.cli import main
from zinf.planner import bandwidth, memory
from zinf.planner.cluster import DGX2, MACHINES
from zinf.planner.estimate import Workload, estimate, placement, speed

K = 1024
TIB, GIB = 2**40, 2**30


def _rounds_to(value, printed):
    """Whether `value`, written with as many digits behind the point as `printed` has, is `printed`."""
    digits = len(printed.partition(".")[2])
    # Half up, as tables are made by hand: 1.625 is printed 1.63, where Python's format says 1.62.
    return math.floor(value * 10**digits + 0.5) == round(float(printed) * 10**digits)


# Figure 2a: layers, hidden, heads; trillions of parameters; TiB of model states, of all activations (batch 64 a node),
# of activation checkpoints (batch 32 a node); GiB of model-state and of activation working memory (batch 4 a GPU).
FIGURE_2A = [
    (80, 10 * K, 128, "0.10", "1.83", "2.03", "0.05", "1.56", "1.63"),
    (100, 20 * K, 160, "0.50", "9.16", "3.91", "0.12", "6.25", "2.50"),
    (128, 25 * K, 256, "1.01", "18.31", "7.13", "0.20", "9.77", "3.56"),
    (195, 64 * K, 512, "10.05", "182.81", "24.38", "0.76", "64.0", "8.00"),
    (315, 160 * K, 1024, "101.47", "1845.70", "88.59", "3.08", "400.0", "18.0"),
]


@pytest.mark.parametrize("row", FIGURE_2A, ids=lambda row: f"{row[3]}T")
def test_figure_2a_memory_of_the_models(row):
    layers, hidden, heads, trillions, states, full, checkpoints, operator, working = row
    assert _rounds_to(memory.parameters(layers=layers, hidden=hidden) / 1e12, trillions)
    assert _rounds_to(memory.model_states(layers=layers, hidden=hidden) / TIB, states)
    sizes = {"seq": 1024, "hidden": hidden}
    assert _rounds_to(memory.activations(**sizes, batch=64, heads=heads, layers=layers) / TIB, full)
    assert _rounds_to(memory.activation_checkpoints(**sizes, batch=32, layers=layers) / TIB, checkpoints)
    assert _rounds_to(memory.model_state_working_memory(hidden=hidden) / GIB, operator)
    assert _rounds_to(memory.activation_working_memory(**sizes, batch=4, heads=heads) / GIB, working)


FIGURE_3A = {  # batch: efficiency in % at 10, 30, 70, 100, 200 GB/s, sequences of 1,024 tokens
    1: ("12.8", "30.5", "50.6", "59.4", "74.5"),
    2: ("22.6", "46.7", "67.2", "74.5", "85.4"),
    4: ("36.9", "63.7", "80.4", "85.4", "92.1"),
    8: ("53.9", "77.8", "89.1", "92.1", "95.9"),
    16: ("70.1", "87.5", "94.2", "95.9", "97.9"),
}
FIGURE_3B = {  # batch: at 100, 300, 500, 1000, 1500 GB/s
    1: ("26.8", "52.3", "64.6", "78.5", "84.6"),
    2: ("42.2", "68.7", "78.5", "88.0", "91.6"),
    4: ("59.4", "81.4", "88.0", "93.6", "95.6"),
    8: ("74.5", "89.8", "93.6", "96.7", "97.8"),
    16: ("85.4", "94.6", "96.7", "98.3", "98.9"),
}
FIGURE_3C = {  # hidden size in K: at 0.5, 1, 2, 3 GB/s
    2: ("26.0", "41.3", "58.4", "67.8"),
    8: ("58.4", "73.7", "84.9", "89.4"),
    16: ("73.7", "84.9", "91.8", "94.4"),
    32: ("84.9", "91.8", "95.7", "97.1"),
    64: ("91.8", "95.7", "97.8", "98.5"),
}


@pytest.mark.parametrize(
    ("intensity", "rates", "curves"),
    [
        (lambda b: bandwidth.ait_parameters_and_gradients(batch=b, seq=1024), (10, 30, 70, 100, 200), FIGURE_3A),
        (lambda b: bandwidth.ait_optimizer_states(batch=b, seq=1024), (100, 300, 500, 1000, 1500), FIGURE_3B),
        (lambda h: bandwidth.ait_activation_checkpoints(hidden=h * K), (0.5, 1, 2, 3), FIGURE_3C),
    ],
    ids=["3a", "3b", "3c"],
)
def test_figure_3_efficiency_against_bandwidth(intensity, rates, curves):
    for size, printed in curves.items():
        for rate, percent in zip(rates, printed, strict=True):
            found = 100 * bandwidth.efficiency(ait=intensity(size), bandwidth=rate * 1e9)
            assert _rounds_to(found, percent), (size, rate, found)


def test_the_bandwidth_for_an_efficiency_is_the_curve_read_the_other_way():
    # Section 4: parameters and gradients at batch 1 reach half the peak with about 70 GB/s.
    ait = bandwidth.ait_parameters_and_gradients(batch=1, seq=1024)
    assert bandwidth.bandwidth_for(efficiency=0.5, ait=ait) == pytest.approx(70e9, rel=0.03)
    # ... and optimizer states at batch 2 reach 90 % with nearly 1.5 TB/s.
    ait = bandwidth.ait_optimizer_states(batch=2, seq=1024)
    needed = bandwidth.bandwidth_for(efficiency=0.9, ait=ait)
    assert 1.2e12 < needed < 1.5e12
    assert bandwidth.efficiency(ait=ait, bandwidth=needed) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="not reached"):
        bandwidth.bandwidth_for(efficiency=1.0, ait=ait)


def test_intensities_are_operations_over_bytes_counted_by_hand():
    layers, hidden, batch, seq, ci = 6, 64, 3, 32, 2
    numel = memory.parameters(layers=layers, hidden=hidden)
    flops = bandwidth.flops_per_iteration(batch=batch, seq=seq, parameters=numel)
    moved = 2 * numel * (3 + 1)  # loaded in forward, recomputation and backward; gradients stored
    assert bandwidth.ait_parameters_and_gradients(batch=batch, seq=seq) == flops / moved
    assert bandwidth.ait_optimizer_states(batch=batch, seq=seq) == flops / (2 * 16 * numel)
    kept = memory.activation_checkpoints(batch=batch, seq=seq, hidden=hidden, layers=layers, blocks_per_checkpoint=ci)
    assert bandwidth.ait_activation_checkpoints(hidden=hidden, blocks_per_checkpoint=ci) == flops / (2 * kept)


def test_figure_2b_memory_of_96_nodes():
    # 1,536 GPUs: 48 TB on the GPUs (in the text), 144 and 2,688 TB by the same count.
    assert 96 * DGX2.devices == 1536
    assert [96 * nbytes / 1e12 for nbytes in (DGX2.device_memory, DGX2.host_memory, DGX2.nvme_memory)] == [
        48,
        144,
        2688,
    ]


def _workload(billions, batch=1, hidden=8192):
    return Workload(layers=round(billions * 1e9 / (12 * hidden**2)), hidden=hidden, heads=64, batch=batch, seq=1024)


@pytest.mark.parametrize(
    ("preset", "fits", "too_large"),
    [
        # Figure 6a, largest models on one DGX-2: DP 1.4, ZeRO-Offload 13, ZeRO-3 20, Infinity CPU 70, NVMe 1,000.
        ("ddp", 1.4, 2),
        ("zero-offload", 13, 20),
        ("zero3", 20, 30),
        ("inf-cpu", 70, 100),
        ("inf-nvme", 1000, 2000),
    ],
)
def test_figure_6a_the_largest_model_of_each_strategy(preset, fits, too_large):
    hidden = 4 * K if fits < 2 else 8 * K if fits < 1000 else 25 * K

    def fitting(billions):
        return placement(_workload(billions, hidden=hidden), DGX2, nodes=1, preset=preset)["fits"]

    assert fitting(fits)
    assert not fitting(too_large)


@pytest.mark.parametrize("nodes", [1, 8, 16, 32])
def test_figure_1_a_trillion_parameters_a_node(nodes):
    # Hidden 64K with 16 tiles, the widest of Figure 6b.
    workload = replace(_workload(1000 * nodes, hidden=64 * K), tiles=16)
    assert placement(workload, DGX2, nodes=nodes, preset="inf-nvme")["fits"]


def test_without_tiling_the_widest_operator_does_not_fit():
    assert not placement(_workload(1000, hidden=64 * K), DGX2, nodes=1, preset="inf-nvme")["fits"]


def test_slow_memory_serves_parameters_with_all_links_together():
    # Section 6.1: at 64 nodes the drives give over 1.5 TB/s together; what limits is the link between devices.
    alone = speed(_workload(1000), DGX2, nodes=1, preset="inf-nvme")["bandwidth_per_device"]
    many = speed(_workload(1000), DGX2, nodes=64, preset="inf-nvme")["bandwidth_per_device"]
    assert alone["parameters_and_gradients"] == pytest.approx(16 * 1.6e9)
    assert many["parameters_and_gradients"] == DGX2.device_bandwidth
    assert many["optimizer_states"] > 1.5e12


@pytest.mark.parametrize(("name", "slow_memory"), [("dgx2", 1.5e12), ("dgx2-10x", 15e12), ("dgx2-100x", 150e12)])
def test_table_3_slow_memory_of_512_devices(name, slow_memory):
    assert 512 * MACHINES[name].host_bandwidth == pytest.approx(slow_memory, rel=0.03)


def test_nothing_overlapped_is_the_papers_efficiency():
    found = speed(_workload(100), DGX2, nodes=4, preset="inf-nvme")
    for kind, ait in (("parameters_and_gradients", 1024), ("optimizer_states", 256)):
        rate = found["bandwidth_per_device"][kind]
        assert found["efficiency"][kind] == pytest.approx(bandwidth.efficiency(ait=ait, bandwidth=rate))
    assert found["seconds"]["overlapped"] <= found["seconds"]["one_after_another"]


def test_data_in_place_costs_no_time():
    found = speed(_workload(1), DGX2, nodes=1, preset="ddp")
    assert found["efficiency"]["optimizer_states"] == 1
    assert found["bandwidth_per_device"]["optimizer_states"] is None


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="inf-nvme"):
        estimate(_workload(1), DGX2, nodes=1, preset="zero9")


def _plan(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_json_holds_exact_bytes():
    found = _plan(
        "--layers", "128", "--hidden", "25600", "--heads", "256", "--machine", "dgx2", "--batch", "4", "--json"
    )
    assert found.exit_code == 0, found.output
    result = json.loads(found.output)
    assert result["model"]["parameters"] == 12 * 128 * 25600**2
    assert result["memory"]["model_states"] == 240 * 128 * 25600**2
    assert result["memory"]["activation_checkpoints"] == 2 * 4 * 1024 * 25600 * 128
    assert result["memory"]["model_state_working_memory"] == 16 * 25600**2
    assert result["memory"]["activation_working_memory"] == 4 * 1024 * (16 * 25600 + 2 * 256 * 1024)
    assert result["compute"]["flops_per_iteration"] == 8 * 4 * 1024 * 12 * 128 * 25600**2
    assert result["compute"]["arithmetic_intensity"] == {
        "parameters_and_gradients": 4096,
        "optimizer_states": 1024,
        "activation_checkpoints": 614400,
    }


def test_the_table_says_whether_it_fits():
    arguments = ("--layers", "128", "--hidden", "25600", "--heads", "256", "--machine", "dgx2")
    assert "it fits" in _plan(*arguments).output
    assert "does not fit" in _plan(*arguments, "--preset", "zero3").output


def test_this_machine_is_measured():
    found = _plan("--json")
    assert found.exit_code == 0, found.output
    cluster = json.loads(found.output)["cluster"]
    assert cluster["machine"] == "here"
    assert min(cluster["bandwidth_per_device"].values()) > 0
    assert cluster["peak_flops_per_second_per_device"] > 0


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = _plan("--machine", "dgx2", "--plot", str(tmp_path / "plot.png"))
    assert found.exit_code == 0, found.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "3"), "all of --layers, --hidden and --heads"),
        (("--layers", "3", "--hidden", "100", "--heads", "7"), "hidden=100 is no multiple of heads=7"),
        (("--model", "nothing"), "not known"),
        (("--machine", "abacus"), "'here', 'dgx2'"),
        (("--machine", "dgx2", "--preset", "zero9"), "unknown preset"),
        (("--machine", "dgx2", "--batch", "1" + 320 * "0"), "no estimate"),
        (("--machine", "dgx2", "--model", ""), "'--model': an empty path"),
        (("--machine", "dgx2", "--plot", ""), "'--plot': an empty path"),
        (("--machine", "dgx2", "--plot", "."), "--plot .: is a directory"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_2(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = _plan(*arguments)
    assert found.exit_code == 2
    assert words in found.output
    assert found.output.count("\n") == 1
    assert not list(tmp_path.iterdir())

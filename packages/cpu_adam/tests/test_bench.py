"""The bench command and the benchmark scripts run and print what they promise; never how fast."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_adam.alternation import System, alternate, ratio, record

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=200)


def test_bench_command(tmp_path):
    file = tmp_path / "bench.json"
    done = run("-m", "cpu_adam.bench", "--numel", "100000", "--rounds", "2", "--threads", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["numel"] == 100_000
    assert written["machine"]["isa"] in written["machine"]["isas"]
    assert {row["threads"] for row in written["records"]} == {1}
    ours = [row for row in written["records"] if row["system"] == "cpu_adam fp32"]
    assert len(ours) == 1
    for row in written["records"]:
        assert row["params_per_s"] > 0
        assert row["of_copy"] > 0
        assert row["gb_per_s"] * 1e9 == pytest.approx(row["params_per_s"] * row["bytes_per_param"])
    assert all(row["system"] in done.stdout for row in written["records"])


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    done = run("-m", "cpu_adam.bench", "--numel", "1000", "--threads", "1", "--json", tmp_path / "no" / "bench.json")
    assert done.returncode == 2
    assert "no such directory" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("script", ["against_copy.py", "against_torch.py", "against_deepspeed.py"])
def test_benchmark_scripts(script):
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks do not lie beside these tests")
    if script == "against_copy.py" and shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: the plain loop cannot be compiled")
    if script == "against_torch.py" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if script == "against_deepspeed.py" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    done = run(BENCHMARKS / script, "--numel", "100000", "--rounds", "2", "--threads", "1")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert written["records"]
    assert all(value > 0 for row in written["ratios"] for value in row.values() if isinstance(value, float))


def test_ratios_are_taken_within_rounds():
    seconds = {"ours": [1.0, 10.0, 2.0], "other": [2.0, 20.0, 3.0]}  # the second round ran in a slow minute
    assert ratio(seconds, "ours", "other") == 2.0
    row = record("ours", System(lambda: None, 28), seconds["ours"], 1000)
    assert row["seconds"] == 2.0
    assert (row["seconds_min"], row["seconds_max"], row["params_per_s"]) == (1.0, 10.0, 500.0)


def test_systems_take_turns():
    calls = []
    systems = {name: System(lambda name=name: calls.append(name), 1) for name in "ab"}
    seconds = alternate(systems, 2)
    assert calls == ["a", "b"] * 3
    assert [len(times) for times in seconds.values()] == [2, 2]

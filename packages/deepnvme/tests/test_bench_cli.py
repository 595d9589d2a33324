"""The command line tells the truth about what it measured."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner

from deepnvme.bench.cli import main
from deepnvme.bench.residency import cached_nbytes, evict
from deepnvme.bench.tune_command import best_setting
from deepnvme.drive_profile import drive_key, load_profile

SMALL = ["--block-size", "64KiB", "--block-size", "1MiB", "--queue-depth", "2", "--queue-depth", "8"]


@pytest.fixture(autouse=True)
def own_profiles(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DEEPNVME_PROFILES", str(tmp_path_factory.mktemp("profiles")))


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_are_listed():
    out = invoke("--help")
    assert all(name in out for name in ("info", "run", "tune"))


def test_library_is_imported_without_click(run_python):
    run_python(
        """
        import sys, deepnvme
        assert not {"click", "rich", "torch", "jax"} & set(sys.modules)
        """
    )


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, flag):
    wanted = ["run", str(tmp_path), "--size", "1MiB", *SMALL, flag, str(tmp_path / "no" / "f")]
    result = CliRunner().invoke(main, wanted)
    assert result.exit_code == 2
    assert f"{tmp_path / 'no'} is no directory that can be written" in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["info", "/"]])
def test_output_that_cannot_be_written_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "deepnvme.bench.cli", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert found.returncode == 1
    assert found.stderr == "Error: standard output cannot be written: No space left on device\n"


def test_seconds_are_not_negative(tmp_path):
    assert CliRunner().invoke(main, ["run", str(tmp_path), "--seconds", "-1"]).exit_code == 2


def test_info_tells_what_the_system_says(tmp_path):
    found = json.loads(invoke("info", tmp_path, "--json"))
    assert found["direct"]["possible"] in (True, False)
    assert set(found["backends"]) == {"io_uring", "libaio", "threads"}
    assert os.path.realpath(tmp_path).startswith(found["filesystem"]["mount"])
    assert found["drive"]["key"] == drive_key(os.stat(tmp_path).st_dev)
    assert "endurance" in invoke("info", tmp_path)


def test_residency_against_reading_the_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8 << 20))
    evict(str(path))
    assert cached_nbytes(str(path)) == 0
    path.read_bytes()
    assert cached_nbytes(str(path)) == 8 << 20


def test_direct_read_leaves_the_page_cache_empty_and_says_so(tmp_path):
    out = tmp_path / "out.json"
    table = invoke("run", tmp_path, "--size", "32MiB", "--op", "read", "--json", out, *SMALL)
    records = json.loads(out.read_text())["records"]
    assert len(records) == 3 * 2 * 2
    for record in records:
        assert record["direct"] is True
        assert record["file_size"] == 32 << 20
        assert record["cached_before"] == record["cached_after"] == 0
        assert record["read_bytes"] == 32 << 20
        assert record["gigabytes_per_second"] > 0
        latency = record["latency_microseconds"]["read"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert "direct" in table
    assert "file of 32MiB: at most 0 bytes in the page cache before a measurement, 0 after it" in table
    assert "endurance" in table
    assert os.listdir(tmp_path) == ["out.json"]  # the scratch file is gone


def test_buffered_run_is_called_one(tmp_path):
    arguments = ["run", tmp_path, "--size", "16MiB", "--op", "read", "--buffered", "--backend", "threads", *SMALL]
    assert "page cache" in invoke(*arguments)
    records = json.loads(invoke(*arguments, "--json", "-"))["records"]
    assert all(record["direct"] is False for record in records)
    assert records[-1]["cached_after"] == 16 << 20


def test_engine_that_cannot_run_is_a_row_with_its_reason(run_python, tmp_path):
    run_python(
        """
        import sys
        from deepnvme.bench.cli import main
        small = ["--size", "8MiB", "--block-size", "1MiB", "--queue-depth", "2"]
        main(["run", ".", "--op", "write", "--json", "o", *small])
        """,
        forbid=("io_uring_setup=EPERM",),
    )
    records = json.loads((tmp_path / "o").read_text())["records"]
    assert "container profile" in records[0]["why_not"]
    assert [r["backend"] for r in records if "gigabytes_per_second" in r] == ["libaio", "threads"]


def test_html_page_is_one_file_with_plots(tmp_path):
    page = tmp_path / "page.html"
    options = ["--html", page, "--backend", "io_uring", "--steady", "1.2"]
    invoke("run", tmp_path, "--size", "16MiB", *options, *SMALL)
    text = page.read_text()
    assert text.count("<svg") == 3 * 3 + 1
    assert not re.search(r'(src|href)=|https?://|@import', text)
    for word in ("Throughput over block size", "Latency", "mixed", "over time"):
        assert word in text


@pytest.mark.peers
def test_comparison_with_fio(tmp_path):
    if not shutil.which("fio"):
        pytest.skip("fio is not installed")
    small = ["--size", "16MiB", "--seconds", "0.1", "--block-size", "1MiB", "--queue-depth", "8"]
    out = invoke("run", tmp_path, "--compare", "fio", "--json", "-", *small)
    records = json.loads(out)["records"]
    ours = [r for r in records if r["system"] == "deepnvme"]
    peers = [r for r in records if r["system"] == "fio"]
    assert [(r["op"], r["backend"]) for r in ours] == [(r["op"], r["backend"]) for r in peers]
    assert len(ours) == 3 * 3
    assert all(r["gigabytes_per_second"] > 0 for r in peers)
    assert all(r["direct"] is own["direct"] for r, own in zip(peers, ours, strict=True))


def test_tuning_saves_a_profile_of_that_drive(tmp_path):
    out = invoke("tune", tmp_path, "--size", "8MiB", "--seconds", "0", "--rounds", "1", "--dry-run")
    assert "not saved" in out
    device = os.stat(tmp_path).st_dev
    assert load_profile(device) is None
    invoke("tune", tmp_path, "--size", "8MiB", "--seconds", "0", "--rounds", "1")
    profile = load_profile(device)
    assert profile.queue_depth in (8, 16, 32, 64)


def test_best_setting_is_the_smallest_that_is_as_good():
    rates = {(1, 8): (3.0, 6.0), (1, 16): (3.9, 7.9), (4, 16): (4.0, 8.0), (4, 64): (2.0, 8.0)}
    assert best_setting(rates) == (1, 16)


def test_no_room_is_an_error_with_a_hint(tmp_path):
    result = CliRunner().invoke(main, ["run", str(tmp_path), "--size", "1000TiB"])
    assert result.exit_code == 1
    assert "hint" in result.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--block-size", "1000"),
        ("run", "--block-size", "0"),
        ("run", "--block-size", "2GiB"),
        ("run", "--size", "0"),
        ("run", "--size", "16777216TiB"),
        ("run", "--seconds", "nan"),
        ("run", "--steady", "inf"),
        ("tune", "--size", "a lot"),
        ("tune", "--size", "0"),
        ("tune", "--size", "1MiB"),
        ("tune", "--seconds", "-1"),
        ("tune", "--seconds", "nan"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path, arguments):
    done = CliRunner().invoke(main, [*arguments, str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert arguments[1] in done.output
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_shown_though_it_cannot_be_kept(tmp_path, monkeypatch):
    quick = ("--size", "4MiB", "--seconds", "0")
    points = ("--backend", "threads", "--op", "read", "--block-size", "64KiB", "--queue-depth", "4")
    for report in ("--json", "--html"):
        done = CliRunner().invoke(main, ["run", str(tmp_path), *quick, *points, report, "/dev/full"])
        assert done.exit_code == 1
        assert "the report cannot be written" in done.output
        assert "64KiB" in done.output
    monkeypatch.setenv("DEEPNVME_PROFILES", "/dev/null/profiles")
    done = CliRunner().invoke(main, ["tune", str(tmp_path), *quick, "--rounds", "1"])
    assert done.exit_code == 1
    assert "the profile cannot be saved" in done.output
    assert "overwrite" in done.output
    assert list(tmp_path.iterdir()) == []

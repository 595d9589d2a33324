"""`zinf train` and `zinf verify` as a person calls them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from zinf.checkpoint_format import Manifest
from zinf.cli import main
from zinf.models.gpt import GPT
from zinf.models.model_names import parse_model
from zinf.training.text_source import read_text
from zinf.training.token_data import TokenData, validation_batches

BUILTIN = TokenData.from_tokens(np.frombuffer(read_text("builtin"), dtype=np.uint8))
SMALL = ("--model", "gpt:layers=2,hidden=32,heads=2", "--batch", "4", "--seq", "32", "--dtype", "fp32", "--lr", "1e-3")
QUICK = ("--validation-batches", "1", "--sample-length", "8")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def train(out, *arguments):
    found = run("train", "--out", out, *SMALL, *QUICK, *arguments)
    assert found.exit_code == 0, found.output
    return found


def process(*arguments, launcher=()):
    command = [sys.executable, *launcher, "-m", "zinf", "train", *SMALL, *QUICK, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    # For such small models threads cost more than they bring; and the processes here use as many, for equal bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [record["loss"] for record in records(out)]


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """The folder of a run of six steps, and what it printed."""
    out = tmp_path_factory.mktemp("run") / "out"
    return out, train(out, "--steps", 6, "--save-every", 2)


def test_a_metrics_line_a_step_with_the_documented_keys(six_steps):
    out, _ = six_steps
    lines = records(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert set(line) == {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "report"}
        assert line["tokens"] == 4 * 32
    assert set(lines[-1]["report"]) >= {"seconds", "bytes", "peak", "prefetch", "placement", "limit", "io"}
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0.5e-4, 1e-4, 1.5e-4])  # 20 steps to 1e-3


def test_the_summary_tells_losses_sample_memory_time_drive_and_files(six_steps):
    out, found = six_steps
    for words in (
        "Validation loss:",
        "before",
        "Sample",
        "by the paper's count",
        "peak of this process",
        "compute",
        "bytes a parameter",
        "prefetches that hit",
        str(out / "checkpoint-000003"),
        str(out / "metrics.jsonl"),
    ):
        assert words in found.stdout
    assert "O_DIRECT" in found.stdout or "page cache" in found.stdout
    assert found.stderr.count("loss") >= 6  # a line a step where there is no terminal


def test_only_checkpoints_and_metrics_are_left(six_steps):
    out, _ = six_steps
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint-000002",
        "checkpoint-000003",
        "metrics.jsonl",
        "nvme",
    ]
    assert not any((out / "nvme").iterdir())


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(six_steps, tmp_path):
    train(tmp_path / "same", "--steps", 3)
    train(tmp_path / "other", "--steps", 3, "--seed", 1)
    assert losses(tmp_path / "same") == losses(six_steps[0])[:3]
    assert losses(tmp_path / "other") != losses(tmp_path / "same")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_run_that_never_stopped(dtype, tmp_path):
    train(tmp_path / "whole", "--steps", 5, "--dtype", dtype)
    train(tmp_path / "cut", "--steps", 3, "--dtype", dtype)
    train(tmp_path / "cut", "--steps", 5, "--dtype", dtype, "--resume")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert [record["step"] for record in records(tmp_path / "cut")] == [1, 2, 3, 4, 5]
    assert [r["lr"] for r in records(tmp_path / "cut")] == [r["lr"] for r in records(tmp_path / "whole")]


def test_a_killed_run_resumes_from_its_newest_checkpoint(six_steps, tmp_path):
    running = process("--out", tmp_path / "out", "--steps", 20, "--save-every", 2)
    for line in running.stderr:
        if line.startswith("step 7/"):
            break
    running.kill()
    running.wait()
    assert not any((tmp_path / "out" / "nvme").iterdir())  # swap files go with the process
    done = max(record["step"] for record in records(tmp_path / "out")[:-1])
    train(tmp_path / "out", "--steps", done + 2, "--save-every", 2, "--resume")
    assert [record["step"] for record in records(tmp_path / "out")] == list(range(1, done + 3))
    assert losses(tmp_path / "out")[:6] == losses(six_steps[0])


def test_resume_without_a_checkpoint_starts_afresh(six_steps, tmp_path):
    found = train(tmp_path / "out", "--steps", 2, "--resume")
    assert "starting afresh" in found.stderr
    assert losses(tmp_path / "out") == losses(six_steps[0])[:2]


def test_resume_with_other_settings_is_refused(tmp_path):
    train(tmp_path / "out", "--steps", 1)
    before = names(tmp_path)
    found = run("train", "--out", tmp_path / "out", *SMALL, "--steps", 2, "--resume", "--lr", "1", "--seed", "5")
    assert found.exit_code == 2
    assert "lr is 1.0, was 0.001; seed is 5, was 0" in found.output
    assert names(tmp_path) == before


@pytest.mark.parametrize("extra", [None, {"step": 1}, [1]])
def test_a_checkpoint_that_is_none_of_the_command_is_not_resumed(tmp_path, extra):
    train(tmp_path / "out", "--steps", 1)
    checkpoint = tmp_path / "out" / "checkpoint-000001"
    manifest = Manifest.decode((checkpoint / "manifest.json").read_bytes())
    manifest.extra = extra
    (checkpoint / "manifest.json").write_bytes(manifest.encode())
    found = run("train", "--out", tmp_path / "out", *SMALL, *QUICK, "--steps", 2, "--resume")
    assert found.exit_code == 2
    assert "is not one of `zinf train`" in found.stderr


def test_a_run_that_diverges_ends_as_any_other(tmp_path):
    found = train(tmp_path / "out", "--steps", 6, "--warmup", 0, "--lr", "1e30")
    assert "nan after 6 steps" in found.stdout


def test_a_new_run_in_a_used_folder_sets_the_earlier_one_aside(tmp_path):
    train(tmp_path / "out", "--steps", 2)
    found = train(tmp_path / "out", "--steps", 1)
    assert "earlier-1" in found.stderr
    assert len(records(tmp_path / "out")) == 1
    assert len(records(tmp_path / "out" / "earlier-1")) == 2
    assert (tmp_path / "out" / "earlier-1" / "checkpoint-000001" / "manifest.json").exists()
    assert run("verify", tmp_path / "out").exit_code == 0


def test_micro_batches_sum_to_the_batch(six_steps, tmp_path):
    train(tmp_path / "out", "--steps", 6, "--accumulate", 2)
    assert losses(tmp_path / "out") == pytest.approx(losses(six_steps[0]), rel=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [("--no-prefetch",), ("--device-memory", "128KiB"), ("--overlap-optimizer", "backward"), ("--preset", "zero3")],
)
def test_how_it_runs_changes_no_number(six_steps, tmp_path, arguments):
    train(tmp_path / "out", "--steps", 6, *arguments)
    assert losses(tmp_path / "out") == losses(six_steps[0])


def test_clipping_bounds_the_step_and_reports_the_norm(tmp_path):
    train(tmp_path / "out", "--steps", 2, "--grad-clip", "0.01")
    assert all(record["grad_norm"] > 0.01 for record in records(tmp_path / "out"))


def test_a_file_of_ones_own_is_trained_on(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdefgh" * 100)
    train(tmp_path / "out", "--steps", 20, "--data", tmp_path / "text", "--lr", "0.01", "--warmup", "0")
    first, *_, last = losses(tmp_path / "out")
    assert first > 5  # one of 256 bytes: ln 256 = 5.5
    assert last < 1.5  # one of the eight letters is ln 8 = 2.1: their order was learnt too


def test_the_timeline_and_metrics_lie_where_they_are_wanted(tmp_path):
    train(tmp_path / "out", "--steps", 1, "--trace", tmp_path / "trace.json", "--metrics", tmp_path / "m.jsonl")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "absent"), "absent: No such file"),
        (("--data", ""), "'--data': an empty path"),
        (("--model", ""), "'--model': an empty path"),
        (("--out", ""), "'--out': an empty path"),
        (("--nvme", ""), "'--nvme': an empty path"),
        (("--lr", "inf"), "'--lr': inf is no number"),
        (("--lr", "nan"), "'--lr': nan is no number"),
        (("--grad-clip", "nan"), "'--grad-clip': nan is no number"),
        (("--seed", str(2**64)), "'--seed'"),
        (("--data", "empty"), "empty"),
        (("--data", "short", "--seq", "64"), "validation text"),
        (("--data", "short", "--batch", "40", "--seq", "16"), "longer than the training text of 540"),
        (("--nvme", "absent"), "absent: No such file"),
        (("--nvme", "short"), "short: Not a directory"),
        (("--nvme", "/proc/self/fdinfo"), "/proc/self/fdinfo"),
        (("--model", "gpt:layers=1000,hidden=10000,heads=10"), "too little space"),
        (("--model", "gpt:layers=2,hidden=32,heads=3"), "no multiple of heads"),
        (("--model", "gpt:layers=2,hidden=32,heads=2,vocab=100"), "vocab >= 256"),
        (("--model", "."), "model"),
        (("--preset", "zero9"), "zero9"),
        (("--batch", "0"), "--batch"),
        (("--accumulate", "3"), "multiple of 3"),
        (("--host-memory", "plenty"), "plenty"),
        (("--resident", "1XB"), "1XB"),
        (("--out", "short"), "short: Not a directory"),
        (("--metrics", "absent/m.jsonl"), "absent: No such file"),
        (("--overlap-optimizer", "backward", "--grad-clip", "1"), "grad_clip"),
        (("--overlap-optimizer", "sideways"), "sideways"),
        (("--fast",), "--fast"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_2_and_leaves_nothing(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("short").write_bytes(b"0123456789" * 60)
    before = names(tmp_path)
    found = run("train", "--out", "out", *SMALL, "--steps", "2", *arguments)
    assert found.exit_code == 2, found.output
    assert found.stdout == ""
    assert found.stderr.startswith("Error: ")
    assert found.stderr.count("\n") == 1
    assert words in found.stderr
    assert names(tmp_path) == before


def test_an_interrupt_is_one_line_and_exit_130(tmp_path):
    running = process("--out", tmp_path / "out", "--steps", 100_000)
    for line in running.stderr:
        if line.startswith("step 1/"):
            break
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "Interrupted."
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "nvme").exists()


def torchrun(ranks):
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def test_two_ranks_give_the_losses_of_one_with_the_same_global_batch(six_steps, tmp_path):
    running = process("--out", tmp_path / "out", "--steps", 6, launcher=torchrun(2))
    output, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert losses(tmp_path / "out") == pytest.approx(losses(six_steps[0]), rel=1e-5)
    assert output.count("Validation loss") == 1


def test_a_fault_under_torchrun_is_said_once_and_ends_all_ranks(tmp_path):
    running = process("--out", tmp_path / "out", "--data", tmp_path / "absent", launcher=torchrun(2))
    _, errors = running.communicate(timeout=120)
    assert running.returncode != 0
    assert [line for line in errors.splitlines() if line.startswith("Error: ")] == [
        f"Error: {tmp_path}/absent: No such file or directory"
    ]
    assert not (tmp_path / "out").exists()


def test_exported_weights_give_a_plain_model_the_validation_loss_of_the_run(six_steps, tmp_path):
    out, found = six_steps
    assert run("export", out, tmp_path / "weights").exit_code == 0
    model = GPT(parse_model(SMALL[1], positions=32))
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["head.weight"]  # tied to the embedding, which is there
    assert not unexpected
    ((tokens, targets),) = validation_batches(BUILTIN, batches=1, batch=4, seq=32)
    assert f"{model(tokens, targets).item():.4f} after 6 steps" in found.stdout


def test_what_cannot_be_exported_is_one_line(tmp_path):
    found = run("export", tmp_path, tmp_path / "weights")
    assert found.exit_code == 2
    assert found.output.count("\n") == 1
    assert not (tmp_path / "weights").exists()


def test_verify_names_what_is_damaged(six_steps, tmp_path):
    train(tmp_path / "out", "--steps", 1)
    assert run("verify", tmp_path / "out").output.endswith("whole\n")
    with (tmp_path / "out" / "checkpoint-000001" / "rank-0.bin").open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    found = run("verify", tmp_path / "out")
    assert found.exit_code == 1
    assert "embedding" in found.stdout


def test_verify_refuses_what_is_no_checkpoint(tmp_path):
    found = run("verify", tmp_path)
    assert found.exit_code == 2
    assert found.output.count("\n") == 1


def test_python_m_zinf_is_the_command():
    found = subprocess.run([sys.executable, "-m", "zinf"], capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr == "Error: Missing command.\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--machine", "dgx2", "--json"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_1(arguments):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "zinf", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert found.returncode == 1
    assert found.stderr == "Error: standard output cannot be written: No space left on device\n"

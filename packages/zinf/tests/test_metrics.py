import json
import os

from zinf.training.metrics import MetricsFile


def _write(path, steps, **kwargs):
    metrics = MetricsFile(path, **kwargs)
    for step in steps:
        metrics.write({"step": step, "loss": step / 3})
    metrics.close()


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_a_step_that_reads_back_to_the_same_numbers(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [1, 2])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1 / 3},
        {"step": 2, "loss": 2 / 3},
    ]


def test_a_line_is_on_file_before_the_next_step(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write({"step": 1})
    assert _steps(tmp_path / "m.jsonl") == [1]
    metrics.close()


def test_a_new_run_starts_a_new_file(tmp_path):
    _write(tmp_path / "m.jsonl", [1, 2, 3])
    _write(tmp_path / "m.jsonl", [1])
    assert _steps(tmp_path / "m.jsonl") == [1]


def test_a_resumed_run_drops_what_it_takes_again(tmp_path):
    _write(tmp_path / "m.jsonl", [1, 2, 3, 4, 5])
    _write(tmp_path / "m.jsonl", [4], keep_through_step=3)
    assert _steps(tmp_path / "m.jsonl") == [1, 2, 3, 4]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    _write(path, [3], keep_through_step=2)
    assert _steps(path) == [1, 2, 3]


def test_a_resumed_run_without_a_file_makes_one(tmp_path):
    _write(tmp_path / "m.jsonl", [8], keep_through_step=7)
    assert _steps(tmp_path / "m.jsonl") == [8]


def test_a_pipe_gets_the_lines_and_stays_a_pipe(tmp_path):
    """As a device does: /dev/null would be a file for everybody from then on."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    _write(path, [1, 2], keep_through_step=0)
    assert [json.loads(line)["step"] for line in os.read(reader, 1000).splitlines()] == [1, 2]
    os.close(reader)
    assert path.is_fifo()


def test_what_is_no_text_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [1, 2])
    with path.open("ab") as file:
        file.write(b"\xff\x00\n")
    _write(path, [3], keep_through_step=2)
    assert _steps(path) == [1, 2, 3]


def test_numbers_that_json_lacks_become_null(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write({"step": 1, "loss": float("nan"), "report": {"rates": [float("inf"), 1.5]}})
    metrics.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "report": {"rates": [None, 1.5]},
    }

"""The folder of a run, against what lies on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from zinf.training.faults import CannotStart
from zinf.training.run_directory import new_directories, set_aside_earlier_run


@pytest.fixture
def another_rank_is_faster(monkeypatch):
    """Every directory that is about to be made has just been made by another process."""
    make = Path.mkdir

    def too_late(path, *arguments, **options):
        make(path, *arguments, **options)
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", too_late)


def test_directories_are_made_with_their_parents_and_stay(tmp_path):
    out, swap = tmp_path / "a" / "out", tmp_path / "a" / "out" / "nvme"
    with new_directories(out, swap):
        assert swap.is_dir()
    assert swap.is_dir()


def test_a_failing_body_takes_back_only_what_was_made_and_is_empty(tmp_path):
    out, kept, other = tmp_path / "a" / "out", tmp_path / "kept", tmp_path / "b"
    other.mkdir()

    def fail():
        (kept / "checkpoint").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), new_directories(out, kept, other):
        fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "kept"]


def test_ranks_make_the_same_directories_at_the_same_time(tmp_path, another_rank_is_faster):
    with new_directories(tmp_path / "a" / "out"):
        assert (tmp_path / "a" / "out").is_dir()


def test_what_another_rank_made_is_not_taken_back(tmp_path, another_rank_is_faster):
    with pytest.raises(ZeroDivisionError), new_directories(tmp_path / "out"):
        raise ZeroDivisionError
    assert (tmp_path / "out").is_dir()


def test_a_file_in_the_way_is_no_directory(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(CannotStart, match=r"out: Not a directory"), new_directories(tmp_path / "out"):
        pytest.fail("the body ran")


def test_an_earlier_run_is_set_aside_whole(tmp_path):
    assert set_aside_earlier_run(tmp_path) is None
    for text in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(text)
        set_aside_earlier_run(tmp_path)
    assert (tmp_path / "earlier-1" / "metrics.jsonl").read_text() == "first"
    assert (tmp_path / "earlier-2" / "metrics.jsonl").read_text() == "second"
    assert not (tmp_path / "metrics.jsonl").exists()

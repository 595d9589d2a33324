"""trace() writes JSON that Perfetto reads, in which the overlap is seen."""

from __future__ import annotations

import json

import pytest
from zinf_testing import config, make, offloaded, train

import zinf
from zinf.config import OVERLAPS


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_timeline_holds_every_stage(nvme, tmp_path, overlap):
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    train(model, optimizer, 1)
    with zinf.trace(model, tmp_path / "trace.json"):
        train(model, optimizer, range(1, 3))
    train(model, optimizer, [3])
    data = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} >= {"nc", "optimizer", "write"}
    for event in events:
        assert event["dur"] >= 0
        assert isinstance(event["ts"], float)
    named = {event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert {event["cat"] for event in events} <= named


def test_the_file_is_written_also_when_the_block_raises(nvme, tmp_path):
    model, _ = offloaded(config(nvme))
    with pytest.raises(KeyError), zinf.trace(model, tmp_path / "trace.json"):
        raise KeyError
    json.loads((tmp_path / "trace.json").read_text())
    with pytest.raises(TypeError), zinf.trace(make(), tmp_path / "other.json"):
        pass


def test_a_path_that_cannot_be_written_costs_no_steps(nvme, tmp_path):
    model, optimizer = offloaded(config(nvme))
    for wrong in (tmp_path, tmp_path / "absent" / "trace.json"):
        with pytest.raises(OSError, match=str(tmp_path)), zinf.trace(model, wrong):
            train(model, optimizer, 1)
    assert zinf.full_state(model.norm.weight)["step"] == 0

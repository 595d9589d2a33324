"""The report of a step says what API.md promises, and its parts add up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from zinf_testing import config, make, offloaded, plain, train

import zinf
from zinf.spans import Span, covered


def test_every_promised_entry(nvme):
    model, optimizer = offloaded(config(nvme, grads="nvme"))
    train(model, optimizer, 3)
    report = zinf.report(model)
    assert set(report["seconds"]) >= {"compute", "nc", "cg", "gg", "reduce", "optimizer", "stall", "step"}
    assert set(report["bytes"]) == {"nvme_read", "nvme_written", "by_kind"}
    assert set(report["bytes"]["by_kind"]) == {"parameters", "gradients", "optimizer", "activations"}
    assert set(report["peak"]) == {"device", "host"}
    assert set(report["prefetch"]) == {"hits", "misses"}
    assert set(report["limit"]) == {"compute", "drive", "link", "memory"}
    assert set(report["placement"]) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert report["io"]["dirs"] == [str(nvme)]
    assert report["io"]["backend"] in ("io_uring", "libaio", "threads")
    assert all(value >= 0 for value in report["seconds"].values())
    for direction, total in (("read", "nvme_read"), ("written", "nvme_written")):
        kinds = report["bytes"]["by_kind"].values()
        assert sum(kind[direction] for kind in kinds) == report["bytes"][total] > 0


def test_reports_are_plain_data(nvme):
    import json

    model, optimizer = offloaded(config(nvme))
    json.dumps(zinf.report(model))
    train(model, optimizer, 1)
    json.dumps(zinf.report(model))


@pytest.mark.parametrize("overlap", ["backward", False])
def test_what_happens_between_steps_counts_for_none(nvme, overlap):
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    train(model, optimizer, 3)
    wanted = zinf.report(model)["bytes"]
    with torch.no_grad():
        model(model.data(0))
    train(model, optimizer, [3])
    assert zinf.report(model)["bytes"] == wanted


@pytest.mark.parametrize("how", ["setting", "function"])
def test_the_norm_is_in_the_report_and_stays_with_the_optimizer(nvme, how):
    reference, _ = plain()
    reference.loss(reference.data(0)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
    model = zinf.shard(make(), config(nvme))
    assert zinf.report(model)["grad_norm"] is None
    optimizer = zinf.AdamW(model.parameters(), grad_clip=1.0 if how == "setting" else None)
    model.loss(model.data(0)).backward()
    if how == "function":
        zinf.clip_grad_norm_(model, 1.0)
    optimizer.step()
    assert zinf.report(model)["grad_norm"] == optimizer.grad_norm == pytest.approx(wanted, rel=1e-6)
    optimizer.grad_clip = None
    train(model, optimizer, [1])
    assert zinf.report(model)["grad_norm"] is optimizer.grad_norm is None


def test_models_of_one_optimizer_report_one_norm(nvme):
    models = [zinf.shard(make(seed), config(nvme)) for seed in (1, 2)]
    optimizer = zinf.AdamW([param for model in models for param in model.parameters()], grad_clip=1.0)
    sum(model.loss(model.data(0)) for model in models).backward()
    optimizer.step()
    assert [zinf.report(model)["grad_norm"] for model in models] == [optimizer.grad_norm] * 2


def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r"zinf|partitioned"):
        zinf.report(make())


@pytest.mark.parametrize("overlap", zinf.config.OVERLAPS)
def test_the_parts_of_a_step_make_the_whole(nvme, overlap):
    """An update that runs while its unit is waited for is the optimizer's time, and is not counted as a stall too."""
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    train(model, optimizer, 3)
    seconds = zinf.report(model)["seconds"]
    assert seconds["optimizer"] > 0
    assert seconds["compute"] + seconds["stall"] + seconds["optimizer"] == pytest.approx(seconds["step"], rel=1e-9)


def test_overlapping_spans_count_once():
    spans = [
        Span("stall", "", 0.0, 4.0),  # within it an update ran, from 1 to 3, and a read until 6
        Span("optimizer", "", 1.0, 3.0),
        Span("nc", "", 2.0, 6.0),
        Span("nc", "", 5.0, 7.0),
    ]
    assert covered(spans, "nc") == 5.0
    assert covered(spans, "stall", "optimizer") - covered(spans, "optimizer") == 2.0
    assert covered(spans, "stall", "nc") == 7.0
    assert covered(spans, "cg") == 0.0


def test_several_ranks_report_the_time_of_their_collectives(tmp_path, ranks):
    alone = _collectives(0, 1, str(tmp_path))
    for seconds in ranks(_collectives, 2, str(tmp_path)):
        assert seconds["gg"] > 0 == alone["gg"]
        assert seconds["reduce"] > 0 == alone["reduce"]


def _collectives(rank, world, folder):
    nvme = Path(folder) / f"{world} {rank}"
    nvme.mkdir(exist_ok=True)
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, 2, rank, world)
    return zinf.report(model)["seconds"]

"""What cannot work is refused before a byte is moved, by the name of its field."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy
import pytest
import torch

import zinf
from zinf.config import PRESETS

BAD = [
    ({"params": "disk"}, "params='disk'"),
    ({"grads": "gpu"}, "grads='gpu'"),
    ({"optimizer": None}, "optimizer=None"),
    ({"activations": "tape"}, "activations='tape'"),
    ({"shard": ("params",)}, "shard="),
    ({"shard": ("grads",)}, "shard="),
    ({"params": "cpu", "shard": ("grads", "optimizer")}, "params='cpu'"),
    ({"dtype": torch.float64}, "dtype="),
    ({"dtype": "bf16"}, "dtype='bf16'"),
    ({"params": "nvme"}, "nvme"),
    ({"grads": "nvme"}, "nvme"),
    ({"loss_scale": "static"}, "loss_scale"),
    ({"loss_scale": 0}, "loss_scale"),
    ({"loss_scale": -1.0}, "loss_scale"),
    ({"loss_scale": True}, "loss_scale"),
    ({"loss_scale": float("inf")}, "loss_scale"),
    ({"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8"),
    ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16'"),
    ({"shard": True}, "shard=True"),
    ({"shard": ""}, "shard=''"),
    ({"nvme": 5}, "nvme=5"),
    ({"nvme": ""}, "nvme=''"),
    ({"nvme": ["/tmp", ""]}, "nvme="),
    ({"prefetch": "no"}, "prefetch='no'"),
    ({"checksum": None}, "checksum=None"),
    ({"device_memory": "8 potatoes"}, "device_memory"),
    ({"host_memory": -1}, "host_memory"),
    ({"resident": 1.5}, "resident"),
    ({"unit_size": "big"}, "unit_size"),
    ({"overlap_optimizer": "sometimes"}, "overlap_optimizer='sometimes'"),
    ({"overlap_optimizer": True}, "overlap_optimizer=True"),
    ({"overlap_optimizer": 0}, "overlap_optimizer=0"),
    ({"resident": 2**63}, f"resident={2**63}"),
    ({"host_memory": "9" * 400 + "GiB"}, "host_memory"),
    ({"loss_scale": 10**400}, "loss_scale"),
    ({"group": "gloo"}, "group='gloo'"),
    ({"group": -100}, "group=-100"),  # what new_group returns to a process that is not in it
    ({"overlap_optimizer": "backward", "loss_scale": "dynamic"}, "needs 'next-forward' or False"),
]


@pytest.mark.parametrize(("changes", "named"), BAD, ids=lambda value: str(value))
def test_bad_values(changes, named):
    with pytest.raises(zinf.ConfigError) as refusal:
        zinf.Config(**changes)
    assert named in str(refusal.value)
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("name", sorted(field.name for field in fields(zinf.Config)))
@pytest.mark.parametrize(
    "value", [numpy.array([1, 2]), torch.tensor([1, 2]), object(), [["x"]], b"\xff", 1j], ids=lambda v: type(v).__name__
)
def test_no_field_takes_what_has_nothing_to_do_with_it(name, value):
    """nvme is given a number where it takes a value of this kind."""
    value = 5 if name == "nvme" else value
    with pytest.raises(zinf.ConfigError, match=f"{name}[:=]"):
        zinf.Config(**{name: value})


def test_presets_are_the_rows_of_table_2():
    """Device of parameters, of optimizer states; what is partitioned (paper, Table 2)."""
    rows = {
        "ddp": ("device", "device", 0), "zero1": ("device", "device", 1), "zero2": ("device", "device", 2),
        "zero-offload": ("device", "cpu", 2), "zero3": ("device", "device", 3), "inf-cpu": ("cpu", "cpu", 3),
        "inf-nvme": ("nvme", "nvme", 3),
    }  # fmt: skip
    assert set(rows) == set(PRESETS)
    for name, (params, optimizer, kinds) in rows.items():
        cfg = zinf.Config.preset(name, nvme=["/tmp"])
        assert (cfg.params, cfg.optimizer, len(cfg.shard)) == (params, optimizer, kinds)


def test_unknown_presets_and_settings_name_the_choices():
    with pytest.raises(zinf.ConfigError, match="inf-nvme"):
        zinf.Config.preset("zero4")
    with pytest.raises(zinf.ConfigError, match="inf-nvme"):
        zinf.Config.preset(["zero3"])
    with pytest.raises(zinf.ConfigError, match="host_memory"):
        zinf.Config.preset("zero3", hostmemory=1)


def test_sizes_and_paths():
    cfg = zinf.Config(device_memory="1MiB", host_memory="2GiB", resident=0, unit_size="512KiB", nvme=Path("/tmp"))
    assert (cfg.device_memory, cfg.host_memory, cfg.resident, cfg.unit_size) == (1 << 20, 2 << 30, 0, 512 << 10)
    assert cfg.nvme == ("/tmp",)
    assert zinf.Config(nvme=["/a", Path("/b"), b"/c"]).nvme == ("/a", "/b", "/c")


def test_a_config_is_a_value():
    cfg = zinf.Config.preset("zero3")
    with pytest.raises(AttributeError):
        cfg.params = "cpu"
    assert cfg.replace(prefetch=False) == zinf.Config.preset("zero3", prefetch=False)
    assert zinf.Config().overlap_optimizer == "next-forward"

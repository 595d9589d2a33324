"""Bytes that a step sends, as the kernel counts them on a link between two ranks: no collective in disguise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zero3

rank, settings, link = int(sys.argv[1]), eval(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2)
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)])
zero3.shard(model, unit_size="1MiB", **settings)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(4, 512, dtype=settings.get("dtype"), requires_grad=True)  # so that backward needs every weight

def sent():
    dist.barrier()
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())

def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
before = sent()
for _ in range(3):
    step()
after = sent()
units = zero3.units(model)
gathered = sum(unit.padded_numel * unit.dtype.itemsize for unit in units)
reduced = sum(unit.padded_numel * unit.wire_dtype.itemsize for unit in units)
print((after - before) / 3, gathered / 2, reduced / 2, len(units))
"""


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@pytest.fixture
def link():
    """Two network namespaces with a cable between them: [(namespace, device, address)]."""
    ends = [
        (f"zero3-{os.getpid()}-{end}", f"z3v{os.getpid() % 100000}{end}", f"10.211.7.{end + 1}") for end in range(2)
    ]
    try:
        for namespace, _, _ in ends:
            ip(f"netns add {namespace}")
        ip(f"link add {ends[0][1]} netns {ends[0][0]} type veth peer name {ends[1][1]} netns {ends[1][0]}")
        for namespace, device, address in ends:
            ip(f"-n {namespace} address add {address}/24 dev {device}")
            for name in (device, "lo"):
                ip(f"-n {namespace} link set {name} up")
        yield ends
    finally:
        for namespace, _, _ in ends:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


@pytest.mark.root
@pytest.mark.parametrize(
    ("settings", "gathers"),
    [
        ("{}", 2),  # for forward and for backward
        ("{'dtype': torch.bfloat16}", 2),
        ("{'dtype': torch.bfloat16, 'reduce_dtype': torch.float32}", 2),
        ("{'shard': ('grads', 'optimizer')}", 1),  # after the update
    ],
)
def test_a_step_sends_its_gathers_and_one_reduce_scatter(link, settings, gathers):
    ranks = []
    for rank, (namespace, device, _) in enumerate(link):
        environment = os.environ | {
            "MASTER_ADDR": link[0][2],
            "MASTER_PORT": "29500",  # nobody else is in this namespace
            "GLOO_SOCKET_IFNAME": device,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", RANK, str(rank), settings, device]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
        )
    try:
        answers = [rank.communicate(timeout=100)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for answer in answers:
        sent, shards, reduced, units = (float(word) for word in answer)
        assert units == 8
        assert shards * gathers + reduced <= sent <= 1.05 * (shards * gathers + reduced)

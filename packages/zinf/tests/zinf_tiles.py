"""What the tests of operators in tiles share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zinf_testing import SETTINGS, config, make

import zinf
from zero3.tiles import tiles_of

COUNTS = [1, 2, 3, 4, 16]


def of_transformers(name: str):
    """A class of transformers; without that package the test is skipped."""
    package = pytest.importorskip("transformers", reason="its models are what is put in tiles")
    return getattr(package.pytorch_utils if name == "Conv1D" else package, name)


def tile_all(model: nn.Module, count: int) -> nn.Module:
    """Every operator whose weight has so many rows."""
    for module in model.modules():
        own = [param for param in module.parameters(recurse=False) if param.ndim >= 2]
        if own and min(len(param) for param in own) >= count:
            zinf.tiled(module, count)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, of a model of ours or a plain one."""
    sharded = hasattr(model, "_zero3_model")
    return {n: zinf.full_grad(p) if sharded else p.grad for n, p in model.named_parameters()}


def in_tiles(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if tiles_of(param) is not None]


def tiled_model(nvme, count, seed=1, **changes):
    model = zinf.shard(tile_all(make(seed), count), config(nvme, **changes))
    return model, zinf.AdamW(model.parameters(), **SETTINGS)


def mixtral(implementation: str = "eager", experts: int = 6) -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(2)
    return of_transformers("MixtralForCausalLM")(
        of_transformers("MixtralConfig")(
            **sizes, vocab_size=31, num_hidden_layers=2, num_local_experts=experts, num_experts_per_tok=1,
            experts_implementation=implementation,
        )
    )  # fmt: skip


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of any floating-point result: buffers of the I/O are bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.is_floating_point() and not one.is_meta:
                self.nbytes = max(self.nbytes, min(one.nbytes, one.untyped_storage().nbytes()))
        return result

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero3_models import Block, Perceptron, SmallGPT

import zero3
from zero3.unit_grouping import group, parse_size


def own(param):
    return param.dtype, param.dtype


def names_by_group(model, unit_size="auto"):
    return {one.name: [names[0] for _, names in one.params] for one in group(model, unit_size, own)}


def test_every_parameter_is_in_exactly_one_group():
    model = SmallGPT()
    grouped = [param for one in group(model, "auto", own) for param, _ in one.params]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(model.parameters())


def test_a_submodule_that_fits_is_one_group_and_a_bigger_one_is_split_at_its_children():
    model = nn.Sequential(Block(16), Block(16))
    block_bytes = sum(p.numel() for p in model[0].parameters()) * 4
    assert list(names_by_group(model, block_bytes)) == ["0", "1"]
    assert list(names_by_group(model, block_bytes - 1)) == [
        "0.norm",
        "0.attention",
        "0.mlp",
        "1.norm",
        "1.attention",
        "1.mlp",
    ]
    assert list(names_by_group(model, 10 * block_bytes)) == ["(root)"]


def test_auto_gives_several_units_whatever_the_size():
    assert len(names_by_group(Perceptron())) >= 4


def test_a_tied_weight_belongs_to_the_first_module_and_knows_all_its_names():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    (one,) = group(model, "auto", own)
    assert one.host is model[0]
    assert one.params[0][1] == ["0.weight", "1.weight"]


def test_containers_are_never_hosts():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.Linear(2, 2)])
    hosts = [one.host for one in group(model, "1GiB", own)]
    assert hosts == [model.layers[0]["a"], model.layers[1]]


def test_parameters_in_a_list_are_hosted_by_the_module_that_uses_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.zeros(3), torch.zeros(4)])

        def forward(self, x):
            return x

    model = Model()
    (one,) = group(model, 1, own)
    assert one.host is model


def test_dtypes_and_frozen_parameters_have_groups_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4).requires_grad_(False))
    zero3.as_unit(model)
    assert names_by_group(model) == {
        "(root)": ["0.weight", "0.bias"],
        "#1": ["1.weight", "1.bias"],
        "#2": ["2.weight", "2.bias"],
    }


def test_as_unit_takes_the_whole_subtree():
    model = nn.Sequential(Block(16), Block(16))
    zero3.as_unit(model[1])
    assert list(names_by_group(model, 1))[-1] == "1"


def test_as_unit_wins_over_another_path_to_the_same_modules_and_over_a_bigger_unit():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.router = nn.Linear(2, 2)
            self.block = nn.Sequential(*self.experts)
            zero3.as_unit(self.block)

        def forward(self, x):
            return self.block(x)

    grouped = names_by_group(Model(), "1GiB")
    assert grouped == {
        "router": ["router.weight", "router.bias"],
        "block": ["experts.0.weight", "experts.0.bias", "experts.1.weight", "experts.1.bias"],
    }


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (17, 17),
        ("17", 17),
        ("17 B", 17),
        ("512KiB", 512 << 10),
        ("1.5MiB", 3 << 19),
        ("8GiB", 8 << 30),
        ("1tib", 1 << 40),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "1MB", "five", "-3", -3, 2.5, None, True, "1e400GiB", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)

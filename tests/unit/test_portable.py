"""Optimizer state by name and by position."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distdl.checkpoint.portable import is_named, names_of, to_indices, to_names


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(module: nn.Module, groups: list[list[str]]) -> torch.optim.Optimizer:
    own = dict(module.named_parameters())
    params = [
        {"params": [own[n] for n in names], "lr": 0.1 / (i + 1)} for i, names in enumerate(groups)
    ]
    optimizer = torch.optim.SGD(params, momentum=0.9)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


GROUPS = [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_there_and_back() -> None:
    module = model()
    optimizer = trained(module, GROUPS)
    before = optimizer.state_dict()
    named = to_names(before, optimizer, module)
    assert is_named(named) and not is_named(before)
    assert [group["params"] for group in named["param_groups"]] == GROUPS
    own = dict(module.named_parameters())
    for name, value in named["state"].items():
        assert value["momentum_buffer"] is optimizer.state[own[name]]["momentum_buffer"]
    assert to_names(named, optimizer, module) == named, "nothing is done twice"

    again = to_indices(named, optimizer, module)
    assert again["param_groups"] == before["param_groups"]
    assert again["state"].keys() == before["state"].keys()
    assert to_indices(before, optimizer, module) == before, "a file of distdl 0.1"


def test_another_order_of_parameters_and_groups() -> None:
    module = model()
    named = to_names((optimizer := trained(module, GROUPS)).state_dict(), optimizer, module)
    twin = model()
    other = trained(twin, [["1.bias", "0.bias"], ["1.weight", "0.weight"]])
    other.load_state_dict(to_indices(named, other, twin))
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.1]
    own = dict(twin.named_parameters())
    for name, value in named["state"].items():
        assert torch.equal(other.state[own[name]]["momentum_buffer"], value["momentum_buffer"])


def test_a_stage_takes_its_share() -> None:
    module = model()
    optimizer = trained(module, GROUPS)
    named = to_names(optimizer.state_dict(), optimizer, module)
    stage = nn.Sequential(nn.Identity(), module[1])
    own = torch.optim.SGD(
        [{"params": [stage[1].weight]}, {"params": [stage[1].bias]}], lr=1.0, momentum=0.9
    )
    own.load_state_dict(to_indices(named, own, stage))
    assert own.param_groups[1]["lr"] == 0.05
    buffer = own.state[stage[1].weight]["momentum_buffer"]
    assert torch.equal(buffer, named["state"]["1.weight"]["momentum_buffer"])


def test_what_does_not_fit_is_named() -> None:
    module = model()
    optimizer = trained(module, [["0.weight"], ["0.bias"]])
    named = to_names(optimizer.state_dict(), optimizer, module)
    whole = trained(module, GROUPS)
    with pytest.raises(ValueError, match=r"for 2 of the parameters.*1\.weight"):
        to_indices(named, whole, module)
    with pytest.raises(ValueError, match=r"\[1, 1\] parameters, and the checkpoint's \[2, 2\]"):
        to_names(whole.state_dict(), optimizer, module)


def test_a_pruned_weight_keeps_its_name() -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("bias_orig", nn.Parameter(torch.ones(1)))  # which is none
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    nn.utils.prune.l1_unstructured(module, "weight", 1)
    assert names_of(optimizer, module) == [["weight", "bias", "bias_orig"]]

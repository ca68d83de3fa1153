"""Optimizer state by name and by position."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distdl.checkpoint.portable import is_named, names_of, to_indices, to_names

GROUPS = [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def trained(groups: list[list[str]] = GROUPS) -> tuple[torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    own = dict(module.named_parameters())
    rated = [
        {"params": [own[n] for n in names], "lr": 0.1 / i} for i, names in enumerate(groups, 1)
    ]
    optimizer = torch.optim.SGD(rated, momentum=0.9)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer, module


def test_there_and_back() -> None:
    optimizer, module = trained()
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
    named = to_names((pair := trained())[0].state_dict(), *pair)
    other, twin = trained([["1.bias", "0.bias"], ["1.weight", "0.weight"]])
    other.load_state_dict(to_indices(named, other, twin))
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.1]
    own = dict(twin.named_parameters())
    for name, value in named["state"].items():
        assert torch.equal(other.state[own[name]]["momentum_buffer"], value["momentum_buffer"])


def test_a_stage_takes_its_share() -> None:
    optimizer, module = trained()
    named = to_names(optimizer.state_dict(), optimizer, module)
    stage = nn.Sequential(nn.Identity(), module[1])  # type: ignore[index]
    groups = [{"params": [p]} for p in stage.parameters()]
    own = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    own.load_state_dict(to_indices(named, own, stage))
    assert own.param_groups[1]["lr"] == 0.05
    buffer = own.state[next(stage.parameters())]["momentum_buffer"]
    assert torch.equal(buffer, named["state"]["1.weight"]["momentum_buffer"])


def test_what_does_not_fit_is_named() -> None:
    part, all_of_it = trained([["0.weight"], ["0.bias"]]), trained()
    with pytest.raises(ValueError, match=r"for 2 of the parameters.*1\.weight"):
        to_indices(to_names(part[0].state_dict(), *part), *all_of_it)
    with pytest.raises(ValueError, match=r"\[1, 1\] parameters, and the checkpoint's \[2, 2\]"):
        to_names(all_of_it[0].state_dict(), *part)


def test_a_pruned_weight_keeps_its_name() -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("bias_orig", nn.Parameter(torch.ones(1)))  # which is none
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    nn.utils.prune.l1_unstructured(module, "weight", 1)
    assert names_of(optimizer, module) == [["weight", "bias", "bias_orig"]]

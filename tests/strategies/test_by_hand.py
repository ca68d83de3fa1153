"""Modules that step by hand under fsdp: as under ddp, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from distdl.strategies.fsdp import units
from tests.strategies.two_ranks import results

pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results("tests.strategies.ddp_cases")


@pytest.mark.parametrize("name", ["parts", "direct", "after", "inside"])
def test_fsdp_trains_what_ddp_trains(found: dict[str, Any], name: str) -> None:
    for fsdp, ddp in zip(found[f"fsdp_{name}"], found[f"ddp_{name}"], strict=True):
        assert len(fsdp["losses"]) >= 4
        assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert fsdp["sums"] == pytest.approx(ddp["sums"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [("penalty", "create_graph=True"), ("during", "training_step changes weights (target.")],
)
def test_what_fsdp_would_get_wrong_is_refused_on_all_ranks(
    found: dict[str, Any], name: str, said: str
) -> None:
    for rank in found[f"fsdp_{name}"]:
        assert said in rank and "strategy=ddp" in rank


def test_units_of_parts_that_are_called_by_themselves() -> None:
    attention = nn.MultiheadAttention(16, 2)
    model = nn.Sequential(nn.Linear(3, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), attention)
    assert units(model, 300) == [attention], "its out_proj has weights, and is not called"
    assert units(model, 200) == [model[1][0], attention]
    assert units(model, 300, each=True) == [attention, model[0], model[1][0]]

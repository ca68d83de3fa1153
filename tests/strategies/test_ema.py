"""An exponential moving average of the weights: the same under ZeRO-1 and 2, and then under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distdl.strategies import DeepSpeedStrategy, FSDPStrategy
from tests.strategies.matrix import HALF, SAME_TO, STEPS, TOPOLOGIES, Runs, Topology, apart, step

pytestmark = pytest.mark.xdist_group("strategies")

EMA = ("callbacks=[ema]", "callbacks.ema.decay=0.9")
NODE = {"ema": {"_target_": "distdl.callbacks.EMAWeightAveraging"}}


def averaged(name: str) -> Topology:
    return Topology(TOPOLOGIES[name].ranks, (*TOPOLOGIES[name].overrides, *EMA))


def saved(checkpoints: Path) -> dict[str, Any]:
    return torch.load(step(checkpoints, STEPS), weights_only=True)


def test_averages_as_ddp_does_and_goes_on_there(runs: Runs) -> None:
    ddp = saved(runs.train("ema ddp", averaged("ddp x2")))
    zero1 = runs.train("ema zero1", averaged("zero1 x2"))
    middle = step(zero1, HALF)
    after = saved(runs.train("ema zero1 then ddp", averaged("ddp x2"), resume=middle))
    for other in (saved(zero1), after):
        for part in ("state_dict", "current_model_state"):  # the average, and what is trained
            assert apart(ddp[part], other[part]) < SAME_TO
    plain = saved(runs.whole("ddp x2"))
    assert apart(ddp["current_model_state"], plain["state_dict"]) < SAME_TO
    assert apart(ddp["state_dict"], plain["state_dict"]) > 1e-3, "nothing was averaged"


@pytest.mark.parametrize(
    ("strategy", "node", "refused"),
    [
        (FSDPStrategy, {}, True),
        (DeepSpeedStrategy, {"stage": 3}, True),
        (DeepSpeedStrategy, {"stage": 2}, False),
    ],
)
def test_refused_where_no_rank_has_whole_weights(strategy: Any, node: Any, refused: bool) -> None:
    config = {"trainer": {"precision": "32-true"}, "callbacks": NODE}
    context = {"accelerator": "cpu", "local": True, "config": config}
    said = [f"{p.path}: {p.what}; {p.remedy}" for p in strategy.check(node, context)]
    assert len(said) == refused
    assert all("callbacks.ema averages whole weights" in s and "zero2" in s for s in said)

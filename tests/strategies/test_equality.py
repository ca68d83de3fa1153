"""The same training under every strategy: against one process with the same micro-batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distdl.strategies.pipeline import stage_rules
from tests.strategies.matrix import (
    GLOBAL_BATCH,
    HALF,
    PIPELINE,
    SAME_TO,
    STEPS,
    TOPOLOGIES,
    Runs,
    Topology,
    apart,
    batch,
    difference,
    step,
)

# With test_any_to_any: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")

MORE = {
    "zero2 x2": Topology(2, ("strategy=deepspeed_zero2", *batch(4))),
    "offload x2": Topology(2, ("strategy=deepspeed_offload", *batch(4))),
    **{
        f"{schedule} x2": Topology(
            2, (*PIPELINE, f"strategy.schedule={schedule}", "strategy.micro_batches=4", *batch(8))
        )
        for schedule in ("gpipe", "interleaved", "zero_bubble")
    },
}
EVERYONE = {**{k: v for k, v in TOPOLOGIES.items() if k != "single"}, **MORE}
MATRIX = "DISTDL_MATRIX" in os.environ
# Elsewhere test_pipeline has the other schedules, and the cases below have the other stages.
TRAINED = EVERYONE if MATRIX else [n for n in EVERYONE if n in (*TOPOLOGIES, "offload x2")]


def losses(runs: Runs, name: str, accumulate: int = 1) -> list[float]:
    """Of each optimizer step: Lightning divides those of accumulated batches already."""
    seen = runs.seen[name].losses
    return [sum(seen[i : i + accumulate]) for i in range(0, STEPS * accumulate, accumulate)]


@pytest.mark.parametrize("name", TRAINED)
def test_trains_as_one_process_does(name: str, runs: Runs) -> None:
    if name == "zero_bubble x2" and not stage_rules.splits_backward():
        pytest.skip("this torch does not split the backward of every network")
    alone = runs.whole("single")
    together = runs.train(name, EVERYONE[name])
    assert difference(step(alone, STEPS), step(together, STEPS)) < SAME_TO
    ours, theirs = losses(runs, name), losses(runs, "single", accumulate=2)
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


# Two epochs of 20 samples: three accumulated batches of 2 x 2 and a rest that is stepped, too; the
# norm is clipped; 21 samples are validated, which no two ranks share evenly.
HARD = (
    "data.train_samples=20",
    "trainer.max_epochs=2",
    "trainer.max_steps=-1",
    "+trainer.gradient_clip_val=0.5",
    "optimizer=adamw",
    "checkpoint.every_n_steps=null",
    *batch(2, 3),
)


STAGES = ["fsdp", *(["deepspeed_zero1"] if MATRIX else []), "deepspeed_zero2", "deepspeed_zero3"]


@pytest.mark.parametrize("name", STAGES)
def test_accumulates_clips_and_validates_as_ddp_does(name: str, runs: Runs) -> None:
    ddp = runs.train("hard ddp", Topology(2, ("strategy=ddp", *HARD)))
    ours = runs.train(f"hard {name}", Topology(2, (f"strategy={name}", *HARD)))
    assert difference(ddp / "last.ckpt", ours / "last.ckpt") < SAME_TO
    theirs, metrics = runs.seen["hard ddp"].metrics, runs.seen[f"hard {name}"].metrics
    assert metrics["val/samples"] == theirs["val/samples"] == 21
    assert metrics["val/loss"] == pytest.approx(theirs["val/loss"], abs=1e-6)


# channels_last chooses other kernels for DDP's weights, and a fused step rounds once less than that
# of sharded weights: both show in 16 bits.
HALF_PRECISION = (
    "model.norm=batch",
    "model.channels_last=false",
    "optimizer.fused=false",
    "+trainer.precision=bf16-mixed",
    *batch(4),
)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed_zero2", "deepspeed_zero3"])
def test_bf16_with_batch_norm_and_its_statistics(name: str, runs: Runs) -> None:
    ddp = runs.train("bf16 ddp", Topology(2, ("strategy=ddp", *HALF_PRECISION)))
    ours = runs.train(f"bf16 {name}", Topology(2, (f"strategy={name}", *HALF_PRECISION)))
    assert difference(step(ddp, STEPS), step(ours, STEPS)) == 0


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.parametrize("name", [*EVERYONE])
def test_resnet50(name: str, runs: Runs) -> None:
    alone = runs.train("resnet50 single", TOPOLOGIES["single"], "model=resnet50")
    ours = runs.train(f"resnet50 {name}", EVERYONE[name], "model=resnet50")
    assert difference(step(alone, STEPS), step(ours, STEPS)) < 10 * SAME_TO


# ------------------------------------------------- an exponential moving average of the weights


EMA = ("callbacks=[ema]", "callbacks.ema.decay=0.9")


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


def test_the_global_batch_is_the_same_everywhere() -> None:
    for name, topology in {**TOPOLOGIES, **MORE}.items():
        given = dict(o.split("=", 1) for o in topology.overrides)
        own = int(given["data.batch_size"]) * int(given["trainer.accumulate_grad_batches"])
        shares = topology.ranks // 2 if "pipeline" in topology.overrides[0] else topology.ranks
        assert own * shares == GLOBAL_BATCH, name

"""Each strategy on simulated GPUs: it trains, is saved, and goes on; nothing waits in a step.

A rehearsal, not a GPU run: docs/gpu_rehearsal.md says what it shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.gpu_rehearsal.counting import Counts
from tests.strategies import matrix
from tests.strategies.ranks import Case, Ranks

pytestmark = pytest.mark.timeout(600)

STEPS, HALF, LOG_EVERY = 12, 6, 4
COMMON = (
    *(o for o in matrix.COMMON if not o.startswith(("trainer.", "checkpoint.every"))),
    "trainer.accelerator=gpu",
    "trainer.max_epochs=1",
    f"trainer.max_steps={STEPS}",
    f"trainer.log_every_n_steps={LOG_EVERY}",
    "+trainer.enable_model_summary=false",
    f"checkpoint.every_n_steps={HALF}",
    "data.batch_size=4",
)
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "single": ("strategy=single",),
    "ddp": ("strategy=ddp",),
    "local_sgd": ("strategy=local_sgd", "strategy.sync_every=5"),
    "fsdp": ("strategy=fsdp", "strategy.min_parameters=10000"),
    "fsdp offload": ("strategy=fsdp", "strategy.offload=true"),
    "zero2": ("strategy=deepspeed_zero2",),
    "zero2 offload": ("strategy=deepspeed_offload",),
    "zero3": ("strategy=deepspeed_zero3",),
    "pipeline": (*matrix.PIPELINE, "strategy.micro_batches=2"),
    "ddp ema": ("strategy=ddp", "callbacks=[default,ema]"),
}
TWO_ONLY = ("pipeline", "zero3", "ddp ema")
EVERY = [
    *((name, 1) for name in STRATEGIES if name not in TWO_ONLY),
    *((name, 2) for name in STRATEGIES if name != "single"),
]
# One rank opens its own group; two have everything else.
FEW = [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)]
CASES = EVERY if "DISTDL_MATRIX" in os.environ else FEW


@pytest.mark.parametrize(("strategy", "size"), CASES, ids=[f"{s} x{n}" for s, n in CASES])
def test_trains_and_goes_on(
    strategy: str, size: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    overrides = [*COMMON, *STRATEGIES[strategy]]
    whole = ranks(size).train(Case(overrides, tmp_path / "whole"))
    assert steps_of(tmp_path / "whole") == [HALF, STEPS]
    middle = matrix.step(tmp_path / "whole/checkpoints", HALF)
    ranks(size).train(Case(overrides, tmp_path / "rest", resume=middle))
    assert steps_of(tmp_path / "rest") == [STEPS]
    assert len(whole.counts) == size
    for counts in whole.counts:
        assert len(counts) == STEPS - 1 and counts[0]["launches"]
        if strategy.startswith("zero"):
            # DeepSpeed itself waits: once a step for the device, and where it reads the norm.
            assert all(waited["devicesync"] <= 1 for waited in waits(counts).values())
        else:
            assert waits(counts) == {}


def steps_of(run: Path) -> list[int]:
    """The steps of a run's checkpoints, each of which is opened."""
    found = [torch.load(path, weights_only=True) for path in (run / "checkpoints").glob("*.ckpt")]
    return sorted({checkpoint["global_step"] for checkpoint in found})


def waits(counts: list[Counts]) -> dict[int, Counts]:
    """step -> for what the host waited, in the steps after which nothing is reported or saved.

    Without the first two: optimizers make their state there.
    """
    quiet = [step for step in range(3, STEPS) if step % LOG_EVERY and step != HALF]
    names = ("streamsync", "devicesync", "pageable")
    found = {step: {name: counts[step - 1][name] for name in names} for step in quiet}
    return {step: waited for step, waited in found.items() if any(waited.values())}

"""`strategy.autotune=true`: a short measured search for the fastest way to run the same training.

The global batch does not change. The candidates differ in how the batch is divided
(`data.batch_size` against `trainer.accumulate_grad_batches`) and in the ZeRO stage, unless the user
gives DeepSpeed a config file. Each candidate trains a few steps on the job's devices. The fastest
is written into the attempt's launch.yaml, so a resume uses it and does not measure again.
(DeepSpeed's own autotuner restarts the job for each candidate. A job on a cluster cannot do this.)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig, OmegaConf

from distdl.callbacks import Checkpointer, StepMetrics
from distdl.config import recipe as configs
from distdl.config import task_facts
from distdl.config.schema import TrainerArguments
from distdl.distributed import process_group
from distdl.job import Resources
from distdl.loops.fit import fit_loop_of
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.util.errors import UserError
from distdl.worker import kept_choices
from distdl.worker.briefly import train_briefly
from distdl.worker.rank_context import RankContext

WARM_UP, MEASURED = 2, 5  # optimizer steps
HALVINGS = 3  # how often the batch is halved at most
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Candidate:
    """One setting to measure: its changes to the config by path, and its name in messages."""

    changes: dict[str, Any]
    name: str


@dataclass(frozen=True)
class Measured:
    """The slowest rank's `seconds` per step (None: cannot train), the largest `memory` in bytes."""

    candidate: Candidate
    seconds: float | None
    memory: int = 0
    why: str = ""


def tuned(config: DictConfig, context: RankContext) -> DictConfig:
    """Returns the config with the fastest candidate, or unchanged if the task is not training.
    Raises a UserError if no candidate can train. Collective."""
    if not task_facts.of(config).trains:
        return config
    environment = context.environment
    measured = []
    for candidate in candidates(config):
        each = measure(config, candidate, environment, context.resources, context.stop)
        kept_choices.report(environment, "autotune: %s", line(each))
        measured.append(each)
    best = fastest(measured, "strategy.autotune").candidate
    lines = [*map(line, measured)]
    return kept_choices.freeze(config, context, "autotune", best.changes, best.name, lines)


def fastest(measured: list[Measured], path: str) -> Measured:
    """The candidate with the shortest step. If none can train: a UserError about option `path`."""
    trained = [each for each in measured if each.seconds is not None]
    if not trained:
        raise UserError.at(
            path,
            what=f"none of {len(measured)} settings can train; the last one: {measured[-1].why}",
            remedy="try a smaller data.batch_size",
            code="failed",
        )
    return min(trained, key=lambda each: each.seconds or 0.0)


def candidates(config: DictConfig) -> Iterator[Candidate]:
    """All divisions of a rank's share of the global batch, for each ZeRO stage."""
    accumulate = TrainerArguments.of(config.trainer).accumulate_grad_batches
    batch = int(config.data.batch_size) * accumulate
    sizes = [batch // 2**n for n in range(HALVINGS + 1) if batch % 2**n == 0]
    config_file = config.strategy.get("config")  # its ZeRO stage is kept
    for stage in (None,) if config_file else STAGES:
        if stage == 3 or not config.strategy.get("offload_parameters"):
            yield from (division(size, batch // size, stage) for size in sizes)


def division(batch_size: int, accumulate: int, stage: int | None) -> Candidate:
    """A candidate that divides the batch in one way, with a ZeRO stage unless it is None."""
    name = f"data.batch_size={batch_size} x {accumulate} accumulated"
    changes = {"data.batch_size": batch_size, "trainer.accumulate_grad_batches": accumulate}
    changes["strategy.autotune"] = False
    if stage is None:
        return Candidate(changes, name)
    return Candidate({**changes, "strategy.stage": stage}, f"ZeRO-{stage}, {name}")


def measure(
    config: DictConfig,
    candidate: Candidate,
    environment: Environment,
    resources: Resources,
    stop: StopRequest,
    *,
    warm_up: int = WARM_UP,
    steps: int = MEASURED,
    survivable: type[Exception] = torch.cuda.OutOfMemoryError,
) -> Measured:
    """Trains a few steps in this process and cleans up afterwards. Collective.

    Args:
        warm_up, steps: Optimizer steps before the measurement, and during it.
        survivable: Exceptions that only rule the candidate out, as running out of memory does.

    Raises:
        Stopped: A rank was asked to end before the measurement was complete.
    """
    stop.check()
    changes = {**candidate.changes, "trainer.max_steps": warm_up + steps}
    settings = configs.merge(config, OmegaConf.create({}), changes)
    settings.callbacks = {}
    clock = Clock(warm_up, steps)
    why = ""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        without = (Checkpointer, StepMetrics)
        train_briefly(settings, environment, resources, stop, without, [clock])
    except torch.cuda.OutOfMemoryError:
        why = "out of memory"
    except (Stopped, UserError):
        raise
    except survivable as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
    gc.collect()
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    torch.cuda.empty_cache()
    # A signal also reaches the compiler's processes, so it may have caused the failure above.
    process_group.check_all(stop, "before training began")
    times, memories, reasons = zip(*process_group.gather((clock.seconds, memory, why)), strict=True)
    why = next(filter(None, reasons), "")
    return Measured(candidate, None if why else max(times), max(memories), why)


class Clock(Callback):
    """Measures the seconds per optimizer step, over `steps` steps after the first `warm_up`."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up = warm_up
        self.steps = steps
        self.seconds = 0.0
        self._started = 0.0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        if fit_loop_of(trainer).epoch_loop.accumulates:
            return
        if trainer.global_step not in (self.warm_up, self.warm_up + self.steps):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds = (now - self._started) / self.steps
        self._started = now


def line(measured: Measured) -> str:
    """One row of the table that is logged and kept in launch.yaml."""
    took = measured.why if measured.seconds is None else f"{measured.seconds * 1000:9.1f} ms a step"
    memory = f", {measured.memory / 2**30:6.2f} GiB" if measured.memory else ""
    return f"{measured.candidate.name:<48}{took}{memory}"

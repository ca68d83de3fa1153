"""Makes a plan from overrides: the measured step, all estimates and the recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import (
    batches,
    choices,
    compose,
    consent,
    grammar,
    own_code,
    programs,
    published,
    resources,
)
from distdl.job import Resources
from distdl.launch.launch import root_of
from distdl.tools.measure import recompute_choice
from distdl.tools.measure.estimate import Estimate, Machine, by_strategy, estimates
from distdl.tools.measure.largest_batch import KEY, largest_batch
from distdl.tools.measure.measured_step import MeasuredStep
from distdl.tools.measure.mesh import NAME, NOTE, rows_of
from distdl.tools.measure.recommendation import StrategyAdvice, advise, gib
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError
from distdl.validation import validate

RECOMPUTE = "model.recompute=blocks"


@dataclass(frozen=True)
class StrategyPlan:
    """Everything that `plan` shows."""

    measured: MeasuredStep
    machine: Machine
    rows: list[Estimate]
    advice: StrategyAdvice
    notes: list[str]
    recomputing: Recomputing | None = None


@dataclass(frozen=True)
class Recomputing:
    """What `model.recompute=blocks` would do for a batch that does not fit.

    Args:
        strategy: ddp, or single for one device.
        before, after: Bytes on the fullest device.
        fits: Whether the whole batch then fits.
        work: By how much the operations of a step grow: 0.33 are a third more.
    """

    strategy: str
    before: float
    after: float
    fits: bool
    work: float


def plan_strategy(
    overrides: Sequence[str], devices: int | None, memory: float, link: float, flops: float
) -> StrategyPlan:
    """Measures a step of a run's config and estimates it under every strategy.

    Args:
        overrides: As for a run.
        devices: Total number; None: chosen by `how_many`.
        memory, link, flops: Of a device; see `Machine`.

    Raises:
        UserError: The config or the training step has an error.
    """
    composed = compose.composed(grammar.parse_overrides(overrides))
    config = composed.config
    programs.refuse(config, "plan")
    consent.refuse(config, composed.typed)
    devices, note = how_many(config.trainer, devices)
    size = Resources(1, devices, "gpu")
    folders = own_code.own_folders(root_of(config))
    notes, facts = validate.validate(config, size, folders=folders)
    if not config.get("optimizer") and not facts.get("model_configures_optimizers"):
        raise UserError.at(
            "optimizer",
            what="the run has none",
            remedy="choose one, e.g. optimizer=sgd",
            code="incomplete",
        )
    config.pop("hydra", None)
    if published.name_in(config):  # a step takes as long from random weights
        OmegaConf.update(config, published.KEY, None)
    own_code.make_importable(folders)
    if choices.asks(config, "batch_size"):
        found = largest_batch(config, devices, memory)
        OmegaConf.update(config, KEY, found.batch)
        notes = [f"{KEY}=auto is {found.batch}: {found.reason}", *notes]
    global_batch = batches.global_batch_size(config, size) or devices
    if choices.asks(config, "recompute"):
        value, reason = _recompute_chosen(config, global_batch, devices, memory)
        OmegaConf.update(config, recompute_choice.KEY, value)
        notes = [f"{recompute_choice.KEY}=auto is {value}: {reason}", *notes]
    measured = measure(config, global_batch)
    machine = Machine(devices, memory, link, flops)
    by_name = rows_of(config, measured, machine)
    rows = [*by_name.values()]
    if NAME in by_name:
        notes = [*notes, NOTE]
    advice = advise(measured, rows, machine)
    if note:
        notes = [note, *notes]
    recomputing = None
    if not by_strategy(rows)[_simplest(machine)].fits(machine) and not _recomputes(config):
        recomputing = recomputed(config, global_batch, measured, rows, machine)
    if recomputing and recomputing.fits and not advice.overrides:
        reason = f"nothing else fits; {recomputing.strategy} then takes {gib(recomputing.after)}"
        advice = StrategyAdvice(
            (f"strategy={recomputing.strategy}", RECOMPUTE), f"{reason} of {gib(memory)} GiB"
        )
    every = [*notes, *measured.notes, *fast_path(config, machine)]
    return StrategyPlan(measured, machine, rows, advice, every, recomputing)


def fast_path(config: DictConfig, machine: Machine) -> list[str]:
    """What the numbers leave out of the settings of docs/fast.md."""
    notes = []
    if "compile" in config.model:
        mode = str(config.model.compile).lower()
        gain = "one H200 then took 1.42 times the images a second (resnet50, docs/fast.md)"
        if mode == "false":
            notes.append(f"model.compile=false: with auto, {gain}, after minutes of compiling")
        else:
            notes.append(f"model.compile={mode}: computed as not compiled; {gain}")
    if machine.devices == 1:
        notes.append("ddp: on one device it has no wrapper, and is as fast as single")
    return notes


def _recompute_chosen(
    config: DictConfig, global_batch: int, devices: int, memory: float
) -> tuple[str, str]:
    """What `model.recompute=auto` is, and why. If nothing fits, the advice goes on from `none`."""
    try:
        found = recompute_choice.recompute_for(config, global_batch, devices, memory)
    except UserError as error:
        return "none", error.problems[0].what
    return found.value, found.reason


def _simplest(machine: Machine) -> str:
    return "ddp" if machine.devices > 1 else "single"


def _recomputes(config: DictConfig) -> bool:
    return config.model.get("recompute") not in (None, "none")


def recomputed(
    config: DictConfig,
    global_batch: int,
    measured: MeasuredStep,
    rows: Sequence[Estimate],
    machine: Machine,
) -> Recomputing | None:
    """The step with `model.recompute=blocks`; None for a model without blocks."""
    other = config.copy()
    OmegaConf.update(other, "model.recompute", "blocks", force_add=True)
    try:
        again = measure(other, global_batch)
    except UserError:
        return None
    name = _simplest(machine)
    before = by_strategy(rows)[name]
    after = by_strategy(estimates(again, machine))[name]
    work = again.flops / measured.flops - 1 if measured.flops else 0.0
    return Recomputing(name, before.total, after.total, after.fits(machine), work)


def how_many(trainer: Mapping[str, Any], requested: int | None) -> tuple[int, str]:
    """The number of devices: requested, from the config, the visible GPUs, or 8; and a note."""
    devices = trainer.get("devices")
    nodes = int(trainer.get("num_nodes") or 1)
    if requested:
        return requested, ""
    if isinstance(devices, int) and devices > 0:
        return devices * nodes, ""
    if devices is not None and not isinstance(devices, (str, int)):
        return len(devices) * nodes, ""
    gpus = resources.visible_gpus()
    return (gpus, "") if gpus else (8, "assuming 8 devices: no GPU is visible (set --devices)")

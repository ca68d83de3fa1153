"""What is divided over ranks by DTensors, in `plan`: `strategy=fsdp`, and `strategy=model_parallel`
for a module that divides itself. Their steps are rehearsed (`sharded_step`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor import DTensor

from distdl.config.degrees import DATA, MESH, TENSOR, division_of
from distdl.config.recipe import plain
from distdl.strategies.mesh_rules import rehearsed, undivided
from distdl.tools.measure import sharded_step
from distdl.tools.measure.estimate import Estimate, Machine, by_strategy, estimates
from distdl.tools.measure.measured_step import MeasuredStep
from distdl.tools.measure.sharded_step import Divides
from distdl.util.errors import UserError

NAME = "model_parallel"
FSDP = "fsdp"
NOTE = f"{NAME}: what the ranks of a group exchange within layers is not counted in what is sent"
UNITS = 1_000_000  # FSDPStrategy's min_parameters


def rows_of(
    config: DictConfig,
    measured: MeasuredStep,
    machine: Machine,
    names: Collection[str] = (FSDP, NAME),
) -> dict[str, Estimate]:
    """All estimates of a run by name, that of its mesh among them.

    Args:
        names: Those of FSDP and NAME that are rehearsed. Otherwise fsdp has its formula.

    Raises:
        UserError: It has a mesh, and its module cannot be divided without devices.
    """
    rows = by_strategy(estimates(measured, machine))
    if FSDP in names and FSDP in rows:
        strategy = plain(config.get("strategy") or {})
        own = strategy if str(strategy.get("_target_")).endswith(".FSDPStrategy") else {}
        reshards = bool(own.get("reshard_after_forward", True))
        divide = sharded_step.by_fsdp(own.get("min_parameters", UNITS), reshards)
        rows[FSDP] = _rehearsed(rows[FSDP], config, measured, machine.devices, 1, divide)
    if NAME not in names:
        return rows
    if meshed := of_mesh(config, measured, machine):
        rows[NAME] = meshed
    elif division_of(config.get("strategy")) is MESH and machine.devices > 1:
        raise UserError.at(
            "model",
            what="its configure_model does not run without devices, so its memory is not known",
            remedy="task=benchmark measures it there",
            code="unsupported",
        )
    return rows


def _rehearsed(
    row: Estimate,
    config: DictConfig,
    measured: MeasuredStep,
    data: int,
    tensor: int,
    divide: Divides,
) -> Estimate:
    """The estimate with the peak of a rehearsed step; as it is, with a note, if the step reads
    values. What is neither weights, gradients nor optimizer state are activations as on one device,
    as far as the peak has room for them, and weights that are gathered for a moment."""
    try:
        peak = sharded_step.peak(config, data, tensor, divide)
    except Exception as error:  # the user's code runs
        measured.notes.append(f"{row.name}: by formula ({type(error).__name__} in a step)")
        return row
    rest = max(0.0, peak - row.weights - row.gradients - row.optimizer)
    activations = min(row.activations, rest)
    return replace(row, activations=activations, other=rest - activations)


def of_mesh(config: DictConfig, measured: MeasuredStep, machine: Machine) -> Estimate | None:
    """The estimate for the config's mesh, or one of all devices in one group; None for a module
    that does not divide itself."""
    strategy = plain(config.get("strategy") or {})
    node = strategy if division_of(strategy) is MESH else {}
    if [*MESH.problems(node, machine.devices)] or machine.devices < 2:
        return None
    sizes = {degree.key: size for degree, size in MESH.sizes(node, machine.devices).items()}
    data, tensor = sizes[DATA], sizes[TENSOR]
    model: Mapping[str, Any] = plain(config.model)
    try:
        with rehearsed(model, data, tensor) as module:
            if [*undivided(module, data, tensor)]:
                return None
            row = _parts(module, data, measured)
    except Exception:  # any class's methods run
        return None
    return _rehearsed(row, config, measured, data, tensor, sharded_step.by_itself)


def _parts(module: nn.Module, data: int, measured: MeasuredStep) -> Estimate:
    own = {name: _local(parameter) for name, parameter in module.named_parameters()}
    trained = {name: own[name] for name, p in module.named_parameters() if p.requires_grad}
    gradients = float(sum(trained.values()))
    state = measured.optimizer / measured.gradients if measured.gradients else 0.0
    return Estimate(
        NAME,
        weights=sum(own.values()) + measured.buffers,
        gradients=gradients,
        optimizer=state * gradients,
        activations=measured.activations + measured.transient,
        # As under fsdp, within the groups' copies: an all-gather for each pass, and one reduction.
        sent=3 * (data - 1) * gradients,
        overlap=1.0,
    )


def _local(tensor: nn.Parameter) -> int:
    """Bytes of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()

"""`python -m distdl.tools.measure.would_fit`: what a run that was out of memory could do, by the
numbers of `plan`. `distdl.launch.would_fit` starts it after a failure.

It reads the run, the attempt and the bytes of a device as JSON from its standard input, and prints
a `WouldFit` as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from distdl.config import batches, own_code
from distdl.config import recipe as configs
from distdl.config.schema import TrainerArguments
from distdl.job import Resources
from distdl.runs.bundle import Bundle
from distdl.runs.directory import Attempt, RunDirectory
from distdl.tools.measure.estimate import Estimate, Machine
from distdl.tools.measure.largest_batch import largest_batch, row_name
from distdl.tools.measure.measured_step import MeasuredStep
from distdl.tools.measure.mesh import rows_of
from distdl.tools.measure.recommendation import accumulated, gib
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.rules import strings
from distdl.validation.targets import Trust

RECOMPUTE = "model.recompute=blocks"
STRATEGIES = ("fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "pipeline")


@dataclass(frozen=True)
class WouldFit:
    """What the step takes as it is, and what to type with a resume instead, each with its bytes."""

    now: str
    instead: tuple[tuple[str, str], ...]


def would_fit(config: DictConfig, devices: int, memory: float) -> WouldFit:
    """Measures a step without its memory, and estimates what else would fit.

    Args:
        config: Of the attempt.
        devices: That share the data.
        memory: Bytes of a device.

    Raises:
        UserError: The step cannot be measured here.
    """
    machine = Machine(devices, memory, link=1.0, flops=1.0)
    size = Resources(1, devices, "gpu")
    global_batch = batches.global_batch_size(config, size) or devices
    measured = measure(config, global_batch)
    rows = rows_of(config, measured, machine)
    name = row_name(config.get("strategy"), devices)
    now = f"{gib(rows[name].total)} of {gib(memory)} GiB under {name}"
    found = _instead(config, measured, rows, name, machine)
    return WouldFit(now, tuple((words, f"{gib(total)} GiB") for words, total in found))


def _instead(
    config: DictConfig,
    measured: MeasuredStep,
    rows: Mapping[str, Estimate],
    name: str,
    machine: Machine,
) -> Iterator[tuple[str, float]]:
    if rows[name].fits(machine):
        return
    if config.model.get("recompute") in (None, "none"):
        with suppress(UserError):  # a model without blocks
            changed = configs.merge(config, OmegaConf.create({}), {"model.recompute": "blocks"})
            again = measure(changed, measured.batch_size * machine.devices)
            row = rows_of(changed, again, machine, [name])[name]
            if row.fits(machine):
                yield RECOMPUTE, row.total
    before = TrainerArguments.of(config.trainer).accumulate_grad_batches
    if smaller := accumulated(measured, rows[name], machine):
        batch, parts = (int(word.partition("=")[2]) for word in smaller)
        activations = rows[name].activations / parts
        words = f"data.batch_size={batch} trainer.accumulate_grad_batches={parts * before}"
        yield words, replace(rows[name], activations=activations).total
    with suppress(UserError):  # not one sample fits
        found = largest_batch(config, machine.devices, machine.memory)
        share = found.batch / measured.batch_size
        activations = rows[name].activations * share
        row = replace(rows[name], activations=activations)
        yield f"data.batch_size={found.batch}", row.total
    for other in STRATEGIES:
        if other in rows and other != name and rows[other].fits(machine):
            yield f"strategy={other}", rows[other].total


def of_attempt(run: RunDirectory, attempt: Attempt, memory: float) -> WouldFit:
    """`would_fit` of an attempt of a run that was started from here."""
    from distdl.worker.main import effective_config

    bundle = Bundle(run.path)
    launch = attempt.launch()
    config = effective_config(bundle, launch)
    folders = bundle.python_path(launch)
    own_code.make_importable(folders)
    allow = OmegaConf.select(config, "project.allow") or ()
    kinds.refuse(resolve(config).values, Trust(tuple(folders), tuple(strings([*allow]))))
    return would_fit(config, attempt.resources(launch).world_size, memory)


def main() -> None:
    request = json.loads(sys.stdin.readline())
    run = RunDirectory(Path(request["run"]))
    attempt = Attempt(Path(request["attempt"]))
    with warnings.catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
        found = of_attempt(run, attempt, float(request["memory"]))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()

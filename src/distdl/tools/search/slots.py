"""Where the trials of this machine run: each on devices of its own, so that none slows another."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from distdl.config import resources
from distdl.launch.planning import Plan
from distdl.util.errors import Problem, UserError
from distdl.util.wording import plural

FLAG = "--parallel"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Slot:
    """A part of this machine, or a place among the jobs of a platform.

    Args:
        gpus: Names as in $CUDA_VISIBLE_DEVICES; empty: a trial has those that this command has.
        cores: Numbers of CPU cores; empty: all.
    """

    number: int
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    def enter(self) -> None:
        """Confines this process, which a trial will have for itself, and all that it starts."""
        if self.gpus:
            os.environ[resources.VISIBLE] = ",".join(self.gpus)
        if not self.cores:
            return
        os.sched_setaffinity(0, self.cores)
        if THREADS not in os.environ:
            os.environ[THREADS] = str(len(self.cores))
            if torch := sys.modules.get("torch"):  # which has counted all cores
                torch.set_num_threads(len(self.cores))


def slots_of(plan: Plan, parallel: int | None) -> list[Slot]:
    """The slots of a search, for trials of the size that `plan` has.

    Args:
        parallel: How many; None: as many as there are groups of GPUs here, else one.

    Raises:
        UserError: There are not so many devices.
    """
    size = plan.resources
    if not plan.launch.is_local:
        if plan.launch.in_turn and parallel not in (None, 1):
            raise UserError.at(
                "launcher",
                what="has no queue, so its trials run one by one",
                remedy=f"{FLAG} 1",
                code="unsupported",
            )
        return [Slot(number) for number in range(parallel or 1)]
    if problems := [*_problems(plan, parallel)]:
        raise UserError(*problems)
    if size.accelerator == "gpu" and size.device_ids is None:
        names = resources.visible()
        count = parallel or len(names) // size.devices
        groups = (names[n * size.devices : (n + 1) * size.devices] for n in range(count))
        cores = _shares(count)
        return [Slot(n, tuple(group), cores[n]) for n, group in enumerate(groups)]
    count = parallel or 1
    return [Slot(number, (), cores) for number, cores in enumerate(_shares(count))]


def _problems(plan: Plan, parallel: int | None) -> Iterator[Problem]:
    size = plan.resources
    if size.accelerator != "gpu" or parallel in (None, 1):
        return
    if size.device_ids is not None:
        yield Problem(
            "trainer.devices",
            what=(
                f"names the GPUs {', '.join(size.device_ids)}, "
                f"and {parallel} trials would share them"
            ),
            remedy=(
                f"trainer.devices={size.devices}, and CUDA_VISIBLE_DEVICES=... before the command"
            ),
            code="conflict",
        )
        return
    here = len(resources.visible())
    assert parallel is not None
    if parallel * size.devices > here:
        yield Problem(
            FLAG,
            what=(
                f"{parallel} trials of {size.devices} {plural('GPU', size.devices)} at once, "
                "and this "
                f"machine shows {here}"
            ),
            remedy=f"{FLAG} {max(1, here // size.devices)}",
            code="not-enough",
        )


def _shares(count: int) -> list[tuple[int, ...]]:
    """The cores of each of `count` trials: equal shares, or one core for several trials. Empty for
    a single trial, and where cores cannot be chosen."""
    if count == 1 or not hasattr(os, "sched_getaffinity"):
        return [()] * count
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // count
    if not each:
        return [(cores[number % len(cores)],) for number in range(count)]
    return [tuple(cores[number * each : (number + 1) * each]) for number in range(count)]

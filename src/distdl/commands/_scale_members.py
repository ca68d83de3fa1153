"""Which runs a scaling measurement is made of: a size, a strategy and a batch each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from distdl import compose, jobs, resources
from distdl import config as configs
from distdl.errors import Problem, UserError
from distdl.job import JobState
from distdl.run_directory import RunDirectory, read_json

WEAK, STRONG = "weak", "strong"
MODES = (WEAK, STRONG)
FILE = "benchmark.json"
BASE = "single"


@dataclass
class Member:
    """One run. Weak and strong scaling may share it.

    Args:
        strategy: As given: an option of the group and what else it is to have.
        nodes, devices: Devices are per node.
        modes: Which of weak and strong it belongs to.
        overrides: For Hydra.
        config: As composed.
        run: Where it lies, or will lie.
    """

    strategy: str
    nodes: int
    devices: int
    modes: list[str]
    overrides: list[str]
    config: DictConfig
    run: RunDirectory
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def name(self) -> str:
        return self.run.path.name

    def state(self) -> JobState | None:
        """None: it was never started."""
        last = self.run.last_attempt() if self.run.exists else None
        return jobs.state(last) if last else None

    def read(self) -> bool:
        """Takes in what the last attempt measured; False if there is nothing yet."""
        found = read_json(self.run.path / FILE)
        last = self.run.last_attempt() if found else None
        # An older file is that of other settings, or was here before an attempt that failed.
        stale = last is not None and found.get("attempt", last.number) != last.number
        self.found = {} if stale else found
        return bool(self.found)

    def other_task(self) -> list[str]:
        """What the last attempt's task was told otherwise than this one's: `task.steps=5`."""
        last = self.run.last_attempt()
        where = (last.launch().get("where") if last else None) or {}
        then, now = where.get("task") or {}, configs.plain(self.config.task)
        return [f"task.{k}={then.get(k)}" for k in sorted(now) if then.get(k, now[k]) != now[k]]


def sizes(devices: Sequence[int], nodes: Sequence[int]) -> list[tuple[int, int]]:
    """(nodes, devices per node): all numbers of devices in one node, then full nodes."""
    found = [(1, d) for d in sorted(set(devices))]
    return found + [(n, max(devices)) for n in sorted(set(nodes)) if n > 1]


def members(
    overrides: Sequence[str],
    strategies: Sequence[str],
    counts: Sequence[tuple[int, int]],
    modes: Sequence[str],
) -> list[Member]:
    """All runs, the smallest first. One device is measured without a strategy, once for all.

    Raises:
        UserError: A batch does not divide, or an override names what is measured here.
    """
    _refuse(overrides)
    first = compose.compose(list(overrides))
    batch = (first.get("data") or {}).get("batch_size")
    problems = []
    if STRONG in modes and batch is None:
        what = "strong scaling needs a batch that can be divided, and the data names none"
        problems.append(Problem("--mode", what, "--mode weak"))
        raise UserError(*problems)
    folder = first.name or f"scale-{configs.hash_of(chr(10).join(sorted(overrides)), 6)}"
    above = Path(first.output_dir).resolve() / str(first.experiment_name) / str(folder)
    found: dict[str, Member] = {}
    for nodes, devices in counts:
        for strategy in strategies if nodes * devices > 1 else (BASE,):
            for mode in modes:
                try:
                    given = list(_overrides(overrides, strategy, nodes, devices, mode, batch))
                except UserError as error:
                    problems += error.problems
                    continue
                config = compose.compose(given)
                per = (config.get("data") or {}).get("batch_size")
                name = _slug(f"{strategy}-{nodes}x{devices}" + (f"-batch{per}" if per else ""))
                if name in found:
                    found[name].modes.append(mode)
                else:
                    run = RunDirectory(above / name)
                    found[name] = Member(strategy, nodes, devices, [mode], given, config, run)
    if problems:
        raise UserError(*problems)
    return list(found.values())


def _refuse(overrides: Sequence[str]) -> None:
    taken = {
        "task": "only its settings: task.steps=20",
        "trainer.devices": "--devices 1,2,4",
        "trainer.num_nodes": "--nodes 2,4",
        "strategy": "--strategy ddp",
    }
    with compose.hydra_session():
        keys = [o.key_or_group for o in compose.parse_overrides(overrides)]
    problems = [Problem(k, "is what `scale` varies", taken[k]) for k in keys if k in taken]
    problems += [
        Problem(k, "belongs to a strategy", '--strategy "ddp strategy.comm_hook=bf16"')
        for k in keys
        if k.startswith("strategy.")
    ]
    if problems:
        raise UserError(*problems)


def _overrides(
    overrides: Sequence[str],
    strategy: str,
    nodes: int,
    devices: int,
    mode: str,
    batch: int | None,
) -> Iterator[str]:
    option, *settings = shlex.split(strategy)
    own = [f"strategy={option}", *settings]
    yield "task=benchmark"
    yield from overrides
    yield from own
    yield from (f"trainer.devices={devices}", f"trainer.num_nodes={nodes}")
    if batch is None:
        return
    world = nodes * devices
    node = configs.plain(compose.compose([*overrides, *own]).strategy)
    # The ranks of a pipeline share one batch.
    shares = resources.replicas(node, world)
    whole = batch * world if mode == WEAK else batch
    if whole % shares:
        above = -(-whole // shares) * shares
        raise UserError(
            Problem(
                "data.batch_size",
                f"a global batch of {whole} does not divide by {shares} (strong scaling)",
                f"data.batch_size={above}, or --mode weak",
            )
        )
    yield f"data.batch_size={whole // shares}"


def _slug(text: str) -> str:
    """A name for a folder; what would be lost is hashed into it."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return plain if plain == text else f"{plain}-{configs.hash_of(text, 4)}"

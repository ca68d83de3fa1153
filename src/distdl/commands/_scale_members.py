"""Which runs a scaling measurement is made of: a size, a strategy and a batch each."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
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
RESNET50 = re.compile(r"(?<![a-z_])resnet50(?![a-z0-9_])", re.IGNORECASE)
# Without them a result is none.
NEEDED = {"device", "model", "setting", "real", "held", "verdict"}

Wanted = tuple[str, int, int, str]  # strategy, nodes, devices of each, mode


@dataclass
class Member:
    """One run. Weak and strong scaling may share it.

    Args:
        strategy: As given: an option of the group and what else it is to have.
        nodes, devices: Devices are per node.
        modes: Which of weak and strong it belongs to.
        config: As composed.
        run: Where it lies, or will lie.
        found: What it measured, once that was read.
        under_way: It waits in a queue, or runs.
        elsewhere: It has ended, and its result is still where it ran.
    """

    strategy: str
    nodes: int
    devices: int
    modes: list[str]
    config: DictConfig
    run: RunDirectory
    found: dict[str, Any] = field(default_factory=dict)
    under_way: bool = False
    elsewhere: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def is_resnet50(self) -> bool:
        """Whether others' numbers of that network stand beside this one's."""
        return bool(RESNET50.search(configs.to_yaml(self.config.model)))

    def state(self) -> JobState | None:
        """None: it was never started."""
        last = self.run.last_attempt() if self.run.exists else None
        return jobs.state(last) if last else None

    def read(self) -> bool:
        """Takes in what the last attempt measured; False if there is nothing yet."""
        found = self._result()
        last = self.run.last_attempt() if found else None
        # An older file is that of other settings, or was here before an attempt that failed.
        stale = last is not None and found.get("attempt", last.number) != last.number
        self.found = {} if stale else found
        return bool(self.found)

    def _result(self) -> dict[str, Any]:
        found = read_json(self.run.path / FILE)
        return found if isinstance(found, dict) and found.keys() >= NEEDED else {}

    def damaged(self) -> bool:
        """Whether there is a file of a result, and none can be read from it."""
        return (self.run.path / FILE).exists() and not self._result()

    def set_damaged_aside(self) -> Path | None:
        """Keeps a damaged file from being overwritten by a new attempt; where it is then."""
        if not self.damaged():
            return None
        aside = self.run.path / f"{FILE}.damaged"
        return (self.run.path / FILE).replace(aside)

    def can_be_fetched(self) -> bool:
        """Whether the last attempt ran where its files are not ours (`jobs fetch` brings them)."""
        last = self.run.last_attempt()
        return bool(last and last.job() and hasattr(jobs.of(last), "fetch"))

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
    wanted = [
        (strategy, nodes, devices, mode)
        for nodes, devices in counts
        for strategy in (strategies if nodes * devices > 1 else (BASE,))
        for mode in modes
    ]
    found, problems = _composed(overrides, wanted)
    if problems:
        raise UserError(*problems)
    return found


def kept(
    overrides: Sequence[str], found: Sequence[Member], rows: Sequence[dict[str, Any]]
) -> tuple[list[Member], list[str]]:
    """What an earlier call measured in this folder and this one does not ask for; what to say.

    Args:
        overrides: Of this call, and so of the folder.
        found: What is asked for; gets the modes that it had before.
        rows: Of the scale.json that lies there.
    """
    asked = {(m.strategy, m.nodes, m.devices, mode) for m in found for mode in m.modes}
    then = [(r["strategy"], r["nodes"], r["devices"], r["mode"]) for r in rows]
    same = {m.name: m for m in found}
    more, notes = [], []
    for member in _composed(overrides, [each for each in then if each not in asked])[0]:
        if member.name in same:
            same[member.name].modes += member.modes
        elif not member.run.exists or not member.read():
            notes.append(f"left out: {member.name}, there is no {FILE} of it any more")
        elif not configs.same_recipe(member.config, member.run.recipe()) or member.other_task():
            notes.append(f"left out: {member.name}, it was measured with other settings")
        else:
            more.append(member)
    return more, notes


def _composed(
    overrides: Sequence[str], wanted: Sequence[Wanted]
) -> tuple[list[Member], list[Problem]]:
    """A member for each run, and every problem once."""
    first = compose.compose(list(overrides))
    batch = (first.get("data") or {}).get("batch_size")
    problems: list[Problem] = []
    if batch is None and any(mode == STRONG for *_, mode in wanted):
        what = "strong scaling needs a batch that can be divided, and the data names none"
        return [], [Problem("--mode", what, "--mode weak")]
    folder = first.name or f"scale-{configs.hash_of(chr(10).join(sorted(overrides)), 6)}"
    above = Path(first.output_dir).resolve() / str(first.experiment_name) / str(folder)
    found: dict[str, Member] = {}

    @functools.cache
    def node_of(strategy: str) -> Any:
        return configs.plain(compose.compose([*overrides, *_chosen(strategy)]).strategy)

    for strategy, nodes, devices, mode in wanted:
        try:
            given = [
                "task=benchmark",
                *overrides,
                *_chosen(strategy),
                f"trainer.devices={devices}",
                f"trainer.num_nodes={nodes}",
            ]
            if batch is not None:
                given.append(_batch(node_of(strategy), nodes * devices, mode, batch))
        except UserError as error:
            problems += [p for p in error.problems if p not in problems]
            continue
        config = compose.compose(given)
        per = (config.get("data") or {}).get("batch_size")
        name = _slug(f"{strategy}-{nodes}x{devices}" + (f"-batch{per}" if per else ""))
        if name in found:
            found[name].modes.append(mode)
        else:
            run = RunDirectory(above / name)
            found[name] = Member(strategy, nodes, devices, [mode], config, run)
    return list(found.values()), problems


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


def _chosen(strategy: str) -> list[str]:
    option, *settings = shlex.split(strategy)
    return [f"strategy={option}", *settings]


def _batch(node: Any, world: int, mode: str, batch: int) -> str:
    """The override of a rank's batch, for a strategy's node."""
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
    return f"data.batch_size={whole // shares}"


def _slug(text: str) -> str:
    """A name for a folder; what would be lost is hashed into it."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return plain if plain == text else f"{plain}-{configs.hash_of(text, 4)}"

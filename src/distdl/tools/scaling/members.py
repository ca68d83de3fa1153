"""The runs of a scaling measurement: lists them, and starts those that are missing."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from distdl.config import choices, compose, grammar, groups, programs, resources
from distdl.config import recipe as configs
from distdl.job import JobState
from distdl.launch import dry_run, jobs, planning, submitting, sweeps
from distdl.runs.directory import RunDirectory, read_json, shown
from distdl.tools.measure import FILE
from distdl.util.errors import Problem, UserError
from distdl.util.screen import say

WEAK, STRONG = "weak", "strong"
MODES = (WEAK, STRONG)
BASE = "single"
RESNET50 = re.compile(r"(?<![a-z_])resnet50(?![a-z0-9_])", re.IGNORECASE)
# Keys of every result.
NEEDED = {"device", "model", "setting", "real", "held", "verdict"}

Wanted = tuple[str, int, int, str]  # strategy, nodes, devices of each, mode


@dataclass
class Member:
    """One run, which weak and strong scaling may share; its directory may not exist yet.

    Args:
        strategy: As typed: an option of the group and overrides of its settings.
        nodes, devices: Devices are per node.
        result: Its measurements, once read.
        lacking: Why there is no result: "not measured", "under way" or "not fetched".
    """

    strategy: str
    nodes: int
    devices: int
    modes: list[str]
    config: DictConfig
    run: RunDirectory
    result: dict[str, Any] = field(default_factory=dict)
    lacking: str = "not measured"

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def file(self) -> Path:
        return self.run.path / FILE

    @property
    def is_resnet50(self) -> bool:
        """Whether the model is a ResNet-50, of which published numbers are shown beside it."""
        return bool(RESNET50.search(configs.to_yaml(self.config.model)))

    def read(self) -> bool:
        """Reads the last attempt's measurements; False if there are none yet."""
        result = _intact(self.file)
        last = self.run.last_attempt() if result else None
        # An older file belongs to other settings, or to an attempt before a failed one.
        stale = last is not None and result.get("attempt", last.number) != last.number
        self.result = {} if stale else result
        return bool(self.result)

    def is_damaged(self) -> bool:
        return self.file.exists() and not _intact(self.file)

    def other_task(self) -> list[str]:
        """Settings of the last attempt's task that differ from this one's: `task.steps=5`."""
        last = self.run.last_attempt()
        where = (last.launch().get("where") if last else None) or {}
        then = where.get("task") or {}
        now = configs.plain(self.config.task)
        return [f"task.{k}={then.get(k)}" for k in sorted(now) if then.get(k, now[k]) != now[k]]

    def is_due(self) -> bool:
        """Whether it has to be measured now. If not, it prints a line with the reason."""
        last = self.run.last_attempt() if self.run.exists else None
        state = jobs.state(last) if last else None
        path = shown(self.run.path)
        if state is not None and not configs.same_recipe(self.config, self.run.recipe()):
            raise UserError.at(
                "name",
                what=f"{path} was measured with another config",
                remedy="choose another name=, or leave it out",
                code="mismatch",
            )
        if self.is_damaged():
            say(f"{self.name}: {shown(self.file)} could not be read")
        if state in (JobState.PENDING, JobState.RUNNING):
            say(f"{self.name}: {state.lower()}")
            self.lacking = "under way"
        elif last is None or state is not JobState.SUCCEEDED:
            return True
        elif other := self.other_task():
            say(f"{self.name}: measured before with {', '.join(other)}, so it is measured again")
            return True
        elif self.read():
            say(f"{self.name}: measured before")
        # If its files are on another machine, the attempt has a job that fetches them.
        elif last.job() and jobs.job_of(last).is_remote:
            say(f"{self.name}: done; to fetch its result: python -m distdl jobs fetch {path}")
            self.lacking = "not fetched"
        else:
            say(f"{self.name}: done, but it has no readable {FILE}, so it is measured again")
            return True
        return False


def _intact(path: Path) -> dict[str, Any]:
    """A result; empty if there is none or it cannot be read."""
    result = read_json(path)
    return result if isinstance(result, dict) and result.keys() >= NEEDED else {}


def measure(members: Sequence[Member]) -> int:
    """Starts missing runs: one by one here, all at once on a cluster. Returns an exit code."""
    due = [member for member in members if member.is_due()]
    # All are checked before the first one starts.
    folder = members[0].run.path.parent.name
    planned = [planning.plan(m.config, name=f"{folder}/{m.name}") for m in due]
    for plan in planned:
        planning.check_classes(plan, apart=True)
    code = 0
    for number, (member, plan) in enumerate(zip(due, planned, strict=True), 1):
        if plan.config.dry_run:
            say(f"\n# {member.name}")
            dry_run.show(plan)
            continue
        say(f"\n[{number}/{len(due)}] {member.name}")
        if member.is_damaged():
            kept = member.file.replace(member.file.with_name(f"{FILE}.damaged"))
            say(f"the damaged file is kept as {shown(kept)}")
        if not plan.launch.in_turn:
            _, job = submitting.submit(plan, sys.argv)
            member.lacking = "under way"
            say(f"submitted  {job.handle}")
            continue
        plan.launch = plan.launch.followed()
        state = sweeps.run_one(plan)
        member.read()
        if state is not JobState.SUCCEEDED:
            code = code or 1
        if state in (JobState.PREEMPTED, JobState.CANCELLED):
            return state.exit_code
    return code


def sizes(devices: Sequence[int], nodes: Sequence[int]) -> list[tuple[int, int]]:
    """(nodes, devices per node): each number of devices in one node, then full nodes."""
    inside = [(1, d) for d in sorted(set(devices))]
    return inside + [(n, max(devices)) for n in sorted(set(nodes)) if n > 1]


def members(
    overrides: Sequence[str],
    strategies: Sequence[str],
    counts: Sequence[tuple[int, int]],
    modes: Sequence[str],
) -> list[Member]:
    """All runs, the smallest first. One device is measured once, without a strategy."""
    _refuse(overrides)
    wanted = [
        (strategy, nodes, devices, mode)
        for nodes, devices in counts
        for strategy in (strategies if nodes * devices > 1 else (BASE,))
        for mode in modes
    ]
    made, problems = _composed(overrides, wanted)
    if problems:
        raise UserError(*problems)
    return made


def measured_before(
    overrides: Sequence[str], members: Sequence[Member], rows: Sequence[dict[str, Any]]
) -> tuple[list[Member], list[str]]:
    """The members that an earlier call measured in this folder (`rows` of its scale.json) and this
    call does not request; and notes. Requested members also get the modes that they had before."""
    requested = {(m.strategy, m.nodes, m.devices, mode) for m in members for mode in m.modes}
    then = [(r["strategy"], r["nodes"], r["devices"], r["mode"]) for r in rows]
    by_name = {m.name: m for m in members}
    more, notes = [], []
    for member in _composed(overrides, [each for each in then if each not in requested])[0]:
        if member.name in by_name:
            by_name[member.name].modes += member.modes
        elif not member.run.exists or not member.read():
            notes.append(f"left out: {member.name}, whose {FILE} is gone")
        elif not configs.same_recipe(member.config, member.run.recipe()) or member.other_task():
            notes.append(f"left out: {member.name}, which was measured with other settings")
        else:
            more.append(member)
    return more, notes


def _composed(
    overrides: Sequence[str], wanted: Sequence[Wanted]
) -> tuple[list[Member], list[Problem]]:
    """A member for each run, and each problem once."""
    first = compose.compose(list(overrides))
    programs.refuse(first, "scale")
    batch = (first.get("data") or {}).get("batch_size")
    if choices.asks(first, "batch_size"):
        return [], [
            Problem(
                "data.batch_size",
                what="is auto, and members are compared at batches that are known",
                remedy="data.batch_size=32",
                code="conflict",
            )
        ]
    if batch is None and any(mode == STRONG for *_, mode in wanted):
        return [], [
            Problem(
                "--mode",
                what="strong scaling divides data.batch_size, which this data does not have",
                remedy="--mode weak",
                code="incomplete",
            )
        ]
    folder = first.name or f"scale-{configs.hash_of(chr(10).join(sorted(overrides)), 6)}"
    above = Path(first.output_dir).resolve() / str(first.experiment_name) / str(folder)
    members: dict[str, Member] = {}
    problems: dict[Problem, None] = {}

    @functools.cache
    def node_of(strategy: str) -> dict[str, Any]:
        return configs.plain(compose.compose([*overrides, *_chosen(strategy)]).strategy)

    for strategy, nodes, devices, mode in wanted:
        chosen = [
            "task=benchmark",
            *overrides,
            *_chosen(strategy),
            f"trainer.devices={devices}",
            f"trainer.num_nodes={nodes}",
        ]
        try:
            if batch is not None:
                chosen.append(_batch(node_of(strategy), nodes * devices, mode, batch))
        except UserError as error:
            problems.update(dict.fromkeys(error.problems))
            continue
        config = compose.compose(chosen)
        per = (config.get("data") or {}).get("batch_size")
        name = _slug(f"{strategy}-{nodes}x{devices}" + (f"-batch{per}" if per else ""))
        if name in members:
            members[name].modes.append(mode)
        else:
            run = RunDirectory(above / name)
            members[name] = Member(strategy, nodes, devices, [mode], config, run)
    return list(members.values()), list(problems)


def _refuse(overrides: Sequence[str]) -> None:
    remedies = {
        "task": "only its settings: task.steps=20",
        "strategy": "--strategy ddp",
        "trainer.devices": "--devices 1,2,4",
        "trainer.num_nodes": "--nodes 2,4",
    }
    with groups.hydra_session():
        keys = [o.key_or_group for o in grammar.parse_overrides(overrides)]
    problems = [
        Problem(k, what="is set by `scale`", remedy=remedies[k], code="reserved")
        for k in keys
        if k in remedies
    ]
    remedy = '--strategy "ddp strategy.comm_hook=bf16"'
    settings = ("strategy.",)
    problems += [
        Problem(k, what="belongs to a strategy", remedy=remedy, code="conflict")
        for k in keys
        if k.startswith(settings)
    ]
    if problems:
        raise UserError(*problems)


def _chosen(strategy: str) -> list[str]:
    option, *settings = shlex.split(strategy)
    return [f"strategy={option}", *settings]


def _batch(node: Mapping[str, Any], world: int, mode: str, batch: int) -> str:
    """The override of a rank's batch for a strategy's node."""
    # All ranks of one pipeline share a batch.
    shares = resources.replicas(node, world)
    total = batch * world if mode == WEAK else batch
    if total % shares:
        raise UserError.at(
            "data.batch_size",
            what=f"a global batch of {total} does not divide by {shares} (strong scaling)",
            remedy=f"data.batch_size={-(-total // shares) * shares}, or --mode weak",
            code="indivisible",
        )
    return f"data.batch_size={total // shares}"


def _slug(text: str) -> str:
    """A folder name; if characters are replaced, a hash of the text is added."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return plain if plain == text else f"{plain}-{configs.hash_of(text, 4)}"

"""The next attempt without the hosts that are lost or slow, at the same global batch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from threading import Event, Thread
from typing import Any

from omegaconf import OmegaConf

from distdl.config import batches
from distdl.config import recipe as configs
from distdl.incident import incident
from distdl.job import JobBase, LauncherBase
from distdl.launch.planning import Plan
from distdl.runs.directory import Attempt
from distdl.util.errors import UserError
from distdl.util.hosts import short
from distdl.util.screen import say

HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,254}")
LOOK_S = 30.0  # between two looks at lost hosts; twice as long for each time that some were lost


def fit(planned: Plan, slow: set[str], *, retry: bool = False) -> Plan:
    """The plan of the next attempt: `planned`, or without some of its hosts.

    Args:
        planned: With all hosts of the run.
        slow: Hosts that were slow in an earlier attempt of this command; gets those of the last.
        retry: Whether this command has started the run before. Then each host that does not answer
            is left out; otherwise only if the last attempt had lost one, or ran without it.
    """
    last = planned.last_attempt
    if last is None:
        return planned
    launcher = planned.launch.build_launcher()
    lost = lost_hosts(last)
    slow |= slow_hosts(last, launcher, planned.resources.num_nodes)
    if launcher.names_hosts():  # those that answer again are used again
        doubted = retry or lost or last.launch().get("left_out")
        asks = doubted and not planned.config.dry_run
        lost = set(launcher.unreachable(planned.resources)) if asks else set[str]()
    names = sorted({name for name in lost | slow if HOST.fullmatch(name)})
    for settings in launcher.without(names, planned.resources) if names else ():
        with suppress(UserError):  # so many hosts do not divide the batch
            return without(planned, settings, names)
    return planned


@contextmanager
def watched(planned: Plan, fitted: Plan, slow: set[str], job: JobBase) -> Iterator[Event]:
    """While a job runs without lost hosts of `planned`: cancels it once more of them answer in two
    looks in a row. Its ranks save, and the event that is set says that it is to start again."""
    back, ended = Event(), Event()
    if fitted.left_out and fitted.config.launcher.get("max_attempts"):
        Thread(target=_look, args=(planned, fitted, slow, job, back, ended), daemon=True).start()
    try:
        yield back
    finally:
        ended.set()


def _look(
    planned: Plan, fitted: Plan, slow: set[str], job: JobBase, back: Event, ended: Event
) -> None:
    losses = sum("left_out" in attempt.launch() for attempt in planned.run.attempts())
    answered = False
    while not ended.wait(LOOK_S * 2 ** min(losses - 1, 6)):
        more = fit(planned, {*slow}, retry=True).resources.num_nodes
        answers = more > fitted.resources.num_nodes
        if answers and answered and not ended.is_set():
            back.set()
            say(f"{more} hosts answer: saving, to go on with them", to=sys.stderr)
            job.cancel()
            return
        answered = answers


def lost_hosts(attempt: Attempt) -> set[str]:
    report = incident.read(attempt)
    return {short(report.host)} if report and report.cause == "lost host" else set()


def slow_hosts(attempt: Attempt, launcher: LauncherBase[Any], nodes: int) -> set[str]:
    """The host of the straggler, if the job is faster without it: always if the platform has
    another one, else if a step gets shorter by more than the host's part of the work."""
    slow = attempt.status().get("slow") or {}
    host, share = slow.get("host"), slow.get("share")
    if not isinstance(host, str) or not isinstance(share, int | float):
        return set()
    worth = share > 1 / nodes if launcher.names_hosts() else True
    return {short(host)} if worth else set()


def without(planned: Plan, settings: dict[str, Any], names: Iterable[str]) -> Plan:
    """The plan with other settings of where it runs. Raises a UserError if they do not fit it."""
    config = deepcopy(planned.config)
    for path, value in settings.items():
        OmegaConf.update(config, path, value, force_add=True, merge=False)
    launch = planned.launch.resized(config)
    kept = batches.Kept()
    if not configs.evaluates(config):
        kept = batches.keep_global_batch(
            config,
            launch.size,
            batches.global_batch_size(planned.config, planned.resources),
            (),
            batches.recorded(attempt.status() for attempt in reversed(planned.run.attempts())),
        )
    changes = {**planned.changes, **kept.changes}
    launch = launch.with_config(configs.merge(planned.recipe, launch.where, changes))
    notes = [*planned.notes, f"left out: {', '.join(names)} (lost or slow)", *kept.notes]
    where = OmegaConf.to_container(planned.launch.where, resolve=False)
    left_out = {"hosts": list(names), "where": where}
    return replace(planned, launch=launch, changes=changes, notes=notes, left_out=left_out)

"""Starts the runs of a scaling measurement that have nothing to show yet."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distdl import config as configs
from distdl import dry_run, launch, planning, sweeps
from distdl.commands._scale_members import FILE, Member
from distdl.errors import Problem, UserError
from distdl.job import JobState
from distdl.run_directory import shown


def measure(found: Sequence[Member]) -> int:
    """Starts what is missing, one after the other here, all at once on a cluster; an exit code."""
    due = [member for member in found if is_due(member)]
    # All are checked before the first one starts.
    folder = found[0].run.path.parent.name
    planned = [planning.plan(m.config, name=f"{folder}/{m.name}") for m in due]
    for each in planned:
        planning.check_classes(each, apart=True)
    code = 0
    for number, (member, plan) in enumerate(zip(due, planned, strict=True), 1):
        if plan.config.dry_run:
            print(f"\n# {member.name}\n{dry_run.render(plan)}")
            continue
        print(f"\n[{number}/{len(due)}] {member.name}", flush=True)
        if kept := member.set_damaged_aside():
            print(f"kept as {shown(kept)}", flush=True)
        if not launch.goes_in_turn(plan.config):
            _, job = launch.submit(plan, sys.argv)
            member.under_way = True
            print(f"submitted  {job.handle}")
            continue
        plan.config.follow = True
        state = sweeps.run_one(plan)
        member.read()
        if state is not JobState.SUCCEEDED:
            code = code or 1
        if state in (JobState.PREEMPTED, JobState.CANCELLED):
            return state.exit_code
    return code


def is_due(member: Member) -> bool:
    """Whether it is to be measured now; if not, a line says why.

    Raises:
        UserError: It was measured with another config.
    """
    state = member.state()
    if state is not None and not configs.same_recipe(member.config, member.run.recipe()):
        what = f"{shown(member.run.path)} was measured with another config"
        raise UserError(Problem("name", what, "choose another name=, or leave it out"))
    if member.damaged():
        print(f"{member.name}: {shown(member.run.path / FILE)} could not be read")
    if state in (JobState.PENDING, JobState.RUNNING):
        print(f"{member.name}: {state.lower()}")
        member.under_way = True
        return False
    if state is not JobState.SUCCEEDED:
        return True
    if other := member.other_task():
        print(f"{member.name}: measured before, with {', '.join(other)}: once more")
        return True
    if member.read():
        print(f"{member.name}: measured before")
        return False
    if member.can_be_fetched():
        where = shown(member.run.path)
        print(f"{member.name}: done, and not here: python -m distdl jobs fetch {where}")
        member.elsewhere = True
        return False
    # Nowhere else can it be got from.
    print(f"{member.name}: done, and there is no {FILE} of it to read: once more")
    return True

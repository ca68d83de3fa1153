"""`-m`: every combination is a run of its own, in a process of its own.

A member's directory is named by a hash of its overrides, so a sweep that is started again skips
the members that succeeded and goes on with the others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from distdl import compose, jobs, launch, planning, user_conf
from distdl import config as configs
from distdl.errors import Problem, UserError
from distdl.job import JobState
from distdl.planning import Plan
from distdl.run_directory import shown

Member = tuple[str, Plan]  # its share of what is swept, such as "seed=1 optimizer.lr=0.1"


def main(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Checks every member. Here, and under mpirun, they run one after the other; to a queue all are
    submitted.

    Raises:
        UserError: Any member is wrong; none is started.
    """
    user_conf.print_shadowed()
    members = compose.sweep(overrides, config_dirs)
    swept = compose.sweep_keys(overrides)
    if "name" in swept:
        raise UserError(Problem("name", "a sweep names its members itself", "name=<sweep>"))
    problems: list[Problem] = []
    planned: list[Member] = []
    seen: set[str] = set()
    for member in members:
        try:
            chosen = " ".join(o for o in member if _key(o) in swept)
            planned.append((chosen, plan(member, swept, config_dirs)))
        except UserError as error:
            fresh = [p for p in error.problems if str(p) not in seen]
            seen |= {str(p) for p in fresh}
            problems += fresh
    if problems:
        raise UserError(*problems)
    print(f"sweep of {len(planned)} runs over {', '.join(swept) or 'nothing'}")
    if planned[0][1].config.dry_run:
        print_requests(planned)
        return 0
    if launch.goes_in_turn(planned[0][1].config):
        return _run_all(planned)
    return _submit_all(planned)


def print_requests(planned: Sequence[Member]) -> None:
    plans = [each for _, each in planned]
    whole = launch.request_together(plans, [launch.next_attempt(each) for each in plans])
    if whole is not None:
        print("\n".join(f"# {i}: {chosen}" for i, (chosen, _) in enumerate(planned)))
        print(whole.render())
        return
    for chosen, each in planned:
        print(f"\n# {chosen}\n{launch.render(each)}")


def plan(member: Sequence[str], swept: Sequence[str], config_dirs: Sequence[str]) -> Plan:
    """One member: the run `<sweep>/<hash of its overrides>`."""
    config = compose.compose(member, config_dirs)
    relevant = sorted(o for o in member if _key(o) in swept or not _is_where(_key(o)))
    common = [o for o in relevant if _key(o) not in swept]
    sweep = config.name or "sweep-" + configs.hash_of("\n".join([*common, *sorted(swept)]), 6)
    return planning.plan(config, name=f"{sweep}/{configs.hash_of(chr(10).join(relevant))}")


def _run_all(planned: Sequence[Member]) -> int:
    results: list[tuple[str, Plan, JobState]] = []
    stop: JobState | None = None
    for number, (chosen, each) in enumerate(planned, 1):
        last = each.run.last_attempt() if each.run.exists else None
        state = last.state() if last else JobState.PENDING
        title = f"[{number}/{len(planned)}] {chosen}"
        if state is JobState.SUCCEEDED:
            print(f"{title}: succeeded before, skipped", flush=True)
        elif stop is None:
            print(f"\n{title}", flush=True)
            each.config.follow = True
            state = run_one(each)
            if state in (JobState.PREEMPTED, JobState.CANCELLED) or not state.ended:
                stop = state
        results.append((chosen, each, state))
    _print_table(results)
    if stop is not None:
        return stop.exit_code
    return 0 if all(state is JobState.SUCCEEDED for _, _, state in results) else 1


def _submit_all(planned: Sequence[Member]) -> int:
    """All members go to their queue: as one array where the launcher has such, else one by one."""
    due = []
    for chosen, each in planned:
        state = _state_of(each)
        if state in (JobState.SUCCEEDED, JobState.PENDING, JobState.RUNNING):
            print(f"{chosen}: {state.lower()}, skipped")
        else:
            due.append(each)
    if due:
        launch.submit_together(due, sys.argv)
    _print_table([(chosen, each, _state_of(each)) for chosen, each in planned])
    folder = shown(planned[0][1].run.path.parent)
    print(f"watch   python -m distdl jobs list {folder}")
    print(f"cancel  python -m distdl jobs cancel {folder}")
    return 0


def _state_of(each: Plan) -> JobState | None:
    last = each.run.last_attempt() if each.run.exists else None
    return jobs.state(last) if last else None


def run_one(each: Plan) -> JobState:
    """In a fresh process: nothing leaks from one member to the next."""
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(each, sys.argv))
    process.start()
    before = {
        # A terminal sends Ctrl-C to the child as well; other signals come to us alone.
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: _forward(process, number)),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, _: _forward(process, number)),
    }
    try:
        process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    last = each.run.last_attempt() if each.run.exists else None
    return last.state() if last else JobState.FAILED


def _child(each: Plan, command: list[str]) -> None:
    try:
        sys.exit(launch.start(each, command))
    except UserError as error:  # such as: this member is running already
        print(f"distdl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _forward(process: Any, number: int) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)


def _print_table(results: Sequence[tuple[str, Plan, JobState | None]]) -> None:
    table = Table("overrides", "state", "metrics", "run", title="sweep")
    for chosen, each, state in results:
        last = each.run.last_attempt() if each.run.exists else None
        metrics = (last.status().get("metrics") if last else None) or {}
        values = "  ".join(
            f"{k} {v:.4g}" for k, v in sorted(metrics.items()) if k.startswith(("val", "train"))
        )
        table.add_row(chosen, str(state or "UNKNOWN").lower(), values, shown(each.run.path))
    # In a log nothing is as narrow as a terminal, and a path that is broken cannot be copied.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _is_where(key: str) -> bool:
    """Whether a key says where a member runs, and not what it is."""
    return any(key == w or key.startswith(f"{w}.") for w in ("name", *configs.WHERE))


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]

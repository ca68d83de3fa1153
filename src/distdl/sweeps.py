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

from distdl import compose, launch, user_conf
from distdl import config as configs
from distdl.errors import Problem, UserError
from distdl.job import JobState

Member = tuple[str, launch.Plan]  # its share of what is swept, such as "seed=1 optimizer.lr=0.1"


def main(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Checks every member, then runs them one after the other.

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
        for chosen, each in planned:
            print(f"\n# {chosen}\n{launch.render(each)}")
        return 0
    return _run_all(planned)


def plan(member: Sequence[str], swept: Sequence[str], config_dirs: Sequence[str]) -> launch.Plan:
    """One member: the run `<sweep>/<hash of its overrides>`."""
    config = compose.compose(member, config_dirs)
    relevant = sorted(o for o in member if _key(o) in swept or not _is_where(_key(o)))
    common = [o for o in relevant if _key(o) not in swept]
    sweep = config.name or "sweep-" + configs.hash_of("\n".join([*common, *sorted(swept)]), 6)
    return launch.plan(config, name=f"{sweep}/{configs.hash_of(chr(10).join(relevant))}")


def _run_all(planned: Sequence[Member]) -> int:
    results: list[tuple[str, launch.Plan, JobState]] = []
    stop: JobState | None = None
    for number, (chosen, each) in enumerate(planned, 1):
        last = each.run.last_attempt() if each.run.exists else None
        state = last.state() if last else JobState.PENDING
        title = f"[{number}/{len(planned)}] {chosen}"
        if state is JobState.SUCCEEDED:
            print(f"{title}: succeeded before, skipped", flush=True)
        elif stop is None:
            print(f"\n{title}", flush=True)
            state = _run_one(each)
            if state in (JobState.PREEMPTED, JobState.CANCELLED):
                stop = state
        results.append((chosen, each, state))
    _print_table(results)
    if stop is not None:
        return stop.exit_code
    return 0 if all(state is JobState.SUCCEEDED for _, _, state in results) else 1


def _run_one(each: launch.Plan) -> JobState:
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


def _child(each: launch.Plan, command: list[str]) -> None:
    try:
        sys.exit(launch.start(each, command))
    except UserError as error:  # such as: this member is running already
        print(f"distdl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _forward(process: Any, number: int) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)


def _print_table(results: Sequence[tuple[str, launch.Plan, JobState]]) -> None:
    table = Table("overrides", "state", "metrics", "run", title="sweep")
    for chosen, each, state in results:
        last = each.run.last_attempt() if each.run.exists else None
        metrics = (last.status().get("metrics") if last else None) or {}
        shown = "  ".join(
            f"{k} {v:.4g}" for k, v in sorted(metrics.items()) if k.startswith(("val", "train"))
        )
        table.add_row(chosen, state.lower(), shown, launch.shown(each.run.path))
    # In a log nothing is as narrow as a terminal, and a path that is broken cannot be copied.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _is_where(key: str) -> bool:
    """Whether a key says where a member runs, and not what it is."""
    return any(key == w or key.startswith(f"{w}.") for w in ("name", *configs.WHERE))


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]

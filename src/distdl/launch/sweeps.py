"""`-m` (a sweep): every combination of values is a run of its own, a member, in its own process.

A member's directory is named by a hash of its overrides. So a sweep that is started again skips
the members that succeeded and resumes the others.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from distdl.config import compose, grammar, programs, user_conf
from distdl.config import recipe as configs
from distdl.job import JobState
from distdl.launch import dry_run, job_status, jobs, planning, start, submitting
from distdl.launch.answers import ShownRequest, SweepMember, SweepState, ended
from distdl.launch.planning import Plan
from distdl.ranks import stopping
from distdl.runs import judging
from distdl.runs.directory import shown
from distdl.runs.judging import Score
from distdl.util import table
from distdl.util.answers import Answer
from distdl.util.errors import Problem, Unchecked, UserError
from distdl.util.orphans import die_with_parent
from distdl.util.redact import redact_command
from distdl.util.screen import say

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

Item = TypeVar("Item")
Result = TypeVar("Result")
Ended = tuple[str, Plan, JobState | None]  # a member's text, plan and state
Show = Callable[[Sequence[Ended]], None]
# The text has its values of the swept keys: "seed=1 optimizer.lr=0.1".
PlannedMember = tuple[str, Plan]


def main(
    overrides: Sequence[Override],
    config_dirs: Sequence[str] = (),
    show: Show | None = None,
) -> Answer:
    """Checks every member, then starts them: one after the other with launcher=local or mpi, all at
    once if the platform has a queue. `show` prints the members at the end, in place of a table of
    their states."""
    show = show or print_table
    user_conf.print_shadowed()
    members = compose.sweep(overrides, config_dirs)
    swept = grammar.sweep_keys(overrides)
    if "name" in swept:
        raise UserError.at(
            "name",
            what="cannot be swept: a sweep names its members",
            remedy="name=SWEEP",
            code="unsupported",
        )

    def chosen_and_plan(member: Sequence[str]) -> PlannedMember:
        each = plan(member, swept, config_dirs)
        if last := each.last_attempt:
            last.state()  # raises if the files cannot be read
        return named(member), each

    def named(member: Sequence[str]) -> str:
        return " ".join(o for o in member if _key(o) in swept)

    planned = map_all(chosen_and_plan, members, Unchecked, named)
    check = functools.partial(planning.check_classes, apart=True)
    map_all(lambda member: check(member[1]), planned, UserError, lambda member: member[0])
    say(f"sweep of {len(planned)} runs over {', '.join(swept) or 'nothing'}")
    if planned[0][1].config.dry_run:
        names, plans = zip(*planned, strict=True)
        text = dry_run.show_sweep(plans, names)
        return Answer(ShownRequest([shown(each.run.path) for each in plans], text))
    if planned[0][1].launch.in_turn:
        return _run_all(planned, show)
    return _submit_all(planned, show)


def map_all(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    kind: type[UserError],
    name: Callable[[Item], str],
    kind_of_item: str = "member",
) -> list[Result]:
    """The function's result for each item. Raises the problems of all items, each problem once. If
    only some items have a problem, it has the name of the first."""
    results: list[Result] = []
    problems: dict[Problem, list[str]] = {}
    for item in items:
        try:
            results.append(function(item))
        except UserError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(name(item))
    if problems:
        suffixes = {
            p: f", in the {kind_of_item} {of[0]}"
            for p, of in problems.items()
            if len(of) < len(items)
        }
        raise kind(*(replace(p, what=p.what + suffixes.get(p, "")) for p in problems))
    return results


def plan(member: Sequence[str], swept: Sequence[str], config_dirs: Sequence[str]) -> Plan:
    """One member: the run `<sweep>/<hash of its overrides>`."""
    composed = compose.composed(grammar.parse_checked(member), config_dirs)
    config = composed.config
    common = [o for o in _relevant(member, swept) if _key(o) not in swept]
    sweep = config.name or "sweep-" + configs.hash_of("\n".join([*common, *sorted(swept)]), 6)
    name = f"{sweep}/{name_of(member, swept)}"
    planned = planning.plan(config, name, composed.typed)
    planned.swept = [o for o in member if _key(o) in swept]
    return planned


def name_of(member: Sequence[str], swept: Sequence[str]) -> str:
    """The name of a member in its sweep: a hash of what it does, wherever it runs."""
    return configs.hash_of("\n".join(_relevant(member, swept)))


def _relevant(member: Sequence[str], swept: Sequence[str]) -> list[str]:
    return sorted(o for o in member if _key(o) in swept or not is_where(_key(o)))


def _run_all(planned: Sequence[PlannedMember], show: Show) -> Answer:
    results: list[Ended] = []
    with MemberRunner() as runner:
        for number, (chosen, each) in enumerate(planned, 1):
            last = each.last_attempt
            state = last.state() if last else JobState.PENDING
            title = f"[{number}/{len(planned)}] {chosen}"
            if state is JobState.SUCCEEDED:
                say(f"{title}: succeeded before, skipped")
            elif runner.state is None:
                say(f"\n{title}")
                each.launch = each.launch.followed()
                state = run_one(each, runner)
                if state in (JobState.PREEMPTED, JobState.CANCELLED) or not state.ended:
                    runner.state = runner.state or state
            results.append((chosen, each, state))
    show(results)
    if runner.state is not None:
        say(f"{runner.state.lower()}. To resume:\n  {_again()}")
        return _answer(results, runner.state.exit_code)
    _print_next(results)
    return _answer(results, int(any(state is not JobState.SUCCEEDED for _, _, state in results)))


def _answer(results: Sequence[Ended], code: int) -> Answer:
    return Answer(functools.partial(_swept, results), code)


def _swept(results: Sequence[Ended]) -> SweepState:
    best = best_of(results)
    members = [
        SweepMember(chosen, number == best, ended(each.run))
        for number, (chosen, each, _) in enumerate(results)
    ]
    return SweepState(members, _again())


class MemberRunner(stopping.StopRequest):
    """Runs the members of a sweep one after the other. A signal that asks to end is forwarded to
    the running member, and no further member is started."""

    process: Any = None

    def __enter__(self) -> MemberRunner:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.state = stopping.STATE_AFTER[signal.Signals(number)]
        # A terminal sends Ctrl-C to the child as well; other signals reach only this process.
        if number != signal.SIGINT:
            self.forward(number)

    def forward(self, number: int) -> None:
        if self.process is not None and self.process.is_alive():
            os.kill(self.process.pid, number)


def _submit_all(planned: Sequence[PlannedMember], show: Show) -> Answer:
    """Submits all members: as one array if the launcher supports it, else one by one."""
    due = []
    for (chosen, each), state in zip(planned, _states_of(planned), strict=True):
        if state in (JobState.SUCCEEDED, JobState.PENDING, JobState.RUNNING):
            say(f"{chosen}: {state.lower()}, skipped")
        else:
            due.append(each)
    if due:
        submitting.submit_sweep(due, sys.argv)
    states = _states_of(planned)
    results = [(*member, state) for member, state in zip(planned, states, strict=True)]
    all_ended = all(state is not None and state.ended for _, _, state in results)
    if not due and all_ended:
        show(results)
        _print_next(results)
        return _answer(results, 0)
    print_table(results)
    folder = shown(planned[0][1].run.path.parent)
    say(f"watch   python -m distdl jobs list {folder}")
    say(f"cancel  python -m distdl jobs cancel {folder}")
    return _answer(results, 0)


def _states_of(planned: Sequence[PlannedMember]) -> list[JobState | None]:
    """The state of each member's last attempt; None if it has none."""
    last = [each.last_attempt for _, each in planned]
    known = iter(jobs.states([attempt for attempt in last if attempt]))
    return [next(known) if attempt else None for attempt in last]


def run_one(planned: Plan, runner: MemberRunner | None = None) -> JobState:
    """Runs a member in a fresh process, so that nothing leaks from one member to the next."""
    if runner is None:  # not a member of a sweep
        with MemberRunner() as alone:
            return run_one(planned, alone)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=start_here, args=(planned, sys.argv, os.getpid()))
    if runner.state is None:  # a signal may have come since the caller looked
        process.start()
        runner.process = process
        if runner.state is not None:  # or while it was starting
            runner.forward(signal.SIGTERM)
        process.join()
        runner.process = None
    last = planned.last_attempt
    return last.state() if last else runner.state or JobState.FAILED


def start_here(planned: Plan, command: list[str], parent: int) -> None:
    """Starts a run in this process, which was made for it."""
    die_with_parent(parent)
    try:
        with stopping.raise_on_signal():
            sys.exit(start.start(planned, command))
    except stopping.Ended as ended:  # before an attempt existed that could record the end
        sys.exit(ended.state.exit_code)
    except UserError as error:  # for example, this member is running already
        say(f"distdl: {error}", to=sys.stderr)
        sys.exit(error.exit_code)


def print_table(results: Sequence[Ended]) -> None:
    """The members with their states, and the best of them."""
    rows = []
    best = best_of(results)
    for number, (chosen, each, state) in enumerate(results):
        last = each.last_attempt
        values = job_status.metrics_text(last.status().get("metrics") or {}) if last else ""
        mark = ", best" if number == best else ""
        word = str(state or "UNKNOWN").lower()
        rows.append((chosen, word + mark, values, shown(each.run.path)))
    table.show(("overrides", "state", "metrics", "run"), rows)


def score_of(planned: Plan) -> Score:
    """The metric by which a member's best.ckpt is chosen, and the member's value of it."""
    last = planned.last_attempt
    metrics = last.status().get("metrics") if last else None
    settings = planned.config.get("checkpoint") or {}  # a program has none
    return judging.score(planned.run.checkpoints, settings, metrics)


def best_of(results: Sequence[Ended]) -> int | None:
    """The index of the best of the members that succeeded; None if there are no two to compare, or
    they have different metrics."""
    succeeded = (n for n, (*_, state) in enumerate(results) if state is JobState.SUCCEEDED)
    return judging.best_of({number: score_of(results[number][1]) for number in succeeded})


def _print_next(results: Sequence[Ended]) -> None:
    """Prints what to type after a sweep whose members have ended."""
    succeeded = [each for _, each, state in results if state is JobState.SUCCEEDED]
    failed = [each for _, each, state in results if state is not JobState.SUCCEEDED]
    if failed:
        say(f"failed  python -m distdl jobs status {shlex.quote(shown(failed[0].run.path))}")
        say(f"again   {_again()}")
    best = best_of(results)
    of_programs = any(programs.is_program(each.config) for each in succeeded)
    if best is None and len(succeeded) > 1 and not of_programs:
        judged = [score_of(each).judged for each in succeeded]
        metrics = sorted({str(each.monitor) for each in judged})
        choose = ": checkpoint.monitor=NAME checkpoint.mode=min|max"
        lacks = f"no run has a {metrics[0]} at its end"
        if len(metrics) > 1:
            lacks = f"the runs are judged by different metrics ({', '.join(metrics)}){choose}"
        elif judged[0].monitor is None:
            lacks = f"no metric is chosen{choose}"
        say(f"best    unknown, as {lacks}")
    chosen = succeeded[:1]
    if best is not None:
        text, each, _ = results[best]
        score = score_of(each)
        say(f"best    {text}: {score.judged.monitor} {score.value:.4g}")
        chosen = [each]
    for each in chosen:
        folder = shlex.quote(shown(each.run.path))
        say(f"next    python -m distdl report {folder}")
        if len(results) > 1:
            every = shlex.quote(shown(each.run.path.parent))
            say(f"        python -m distdl compare {every}")
        if any(each.run.checkpoints.glob("*.ckpt")) and not configs.not_exportable(each.config):
            format = configs.export_formats(each.config).formats[0]
            say(f"        python -m distdl export {folder} --to {format}")
    print(end="", flush=True)


def _again() -> str:
    """The command that was typed; it starts only the members that have not succeeded."""
    return shlex.join(["python", "-m", "distdl", *redact_command(sys.argv[1:])])


def is_where(key: str) -> bool:
    """Whether a key only affects where or under which name a member runs."""
    return any(key == w or key.startswith(f"{w}.") for w in ("name", *configs.WHERE))


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]

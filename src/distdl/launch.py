"""A plan becomes a run, an attempt, a job."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl import batches, following, jobs, provenance, snapshot, stopping
from distdl import config as configs
from distdl.bundle import Bundle
from distdl.errors import Problem, UserError
from distdl.failures import KILLED, told
from distdl.job import EXIT_REFUSED, Job, JobSpec, JobState, Launcher, Request
from distdl.own_code import python_path
from distdl.planning import Plan, launcher_class, never_trained, root_of
from distdl.redact import redact, redact_command
from distdl.run_directory import Attempt, RunDirectory, shown
from distdl.snapshot import Snapshot


def start(planned: Plan, command: Sequence[str]) -> int:
    """Writes the run, starts it, stays with it, and returns the exit code."""
    if planned.finished:
        print(how_to_train_longer(planned))
        return 0
    make_room(planned)
    attempts_left = int(planned.config.launcher.get("max_attempts") or 0)
    while True:
        with begun_on_record(planned):
            attempt, job = submit(planned, command)
            state = stay(job, attempt, planned)
        if state is None or state is JobState.UNKNOWN:  # it goes on, and we do not know how
            return 0 if state is None else state.exit_code
        report_failure(attempt)
        if state not in (JobState.FAILED, JobState.PREEMPTED) or attempts_left <= 0:
            break
        if attempt.status().get("exit_code") == EXIT_REFUSED:
            break  # it would be refused again
        attempts_left -= 1
        print(f"{state.lower()}: starting again ({attempts_left} more)", file=sys.stderr)
    code = int(attempt.status().get("exit_code", state.exit_code))
    if state is not JobState.SUCCEEDED and code != EXIT_REFUSED:  # which has said what to do
        say_how_to_go_on(planned, attempt, state, command)
    return code


def say_how_to_go_on(
    planned: Plan, attempt: Attempt, state: JobState, command: Sequence[str]
) -> None:
    if (attempt.first_error() or {}).get("type") == "BdbQuit":  # whoever typed q knows
        return
    if state is JobState.FAILED and never_trained(planned.run):
        again = shlex.join(["python", "-m", "distdl", *redact_command(command[1:])])
        print(f"failed before its first checkpoint. Mend it, then start it again:\n  {again}")
        return
    print(f"{state.lower()}. To go on:\n  python -m distdl resume {shown(planned.run.path)}")


def make_room(planned: Plan) -> None:
    """A run of this name that never trained gets another one."""
    if planned.old_run is not None:
        jobs.refuse_second(planned.run)
        planned.run.path.rename(planned.old_run)
        planned.old_run = None


def submit(planned: Plan, command: Sequence[str]) -> tuple[Attempt, Job]:
    """Lays down the run and one attempt, and hands it to the launcher.

    Raises:
        UserError: The launcher refuses it, or the run is under way already. Until the launcher has
            seen the request and asked its place, nothing is written.
    """
    launcher = jobs.instantiate(planned.config.launcher)
    refuse_unset(planned)
    code = snapshot_of(planned)
    reach(launcher, launcher.request(spec_of(planned, next_attempt(planned))))
    attempt = lay_down(planned, command, code)
    say_left_out(code)
    with kept(attempt):
        job = launcher.submit(launcher.request(spec_of(planned, attempt)))
    if code is not None:
        jobs.record(attempt, job)
    return attempt, job


def submit_together(planned: Sequence[Plan], command: Sequence[str]) -> None:
    """Hands the members of a sweep to the launcher: as one request if it has one for them all.

    Raises:
        UserError: See `submit`.
    """
    request = request_together(planned, [next_attempt(each) for each in planned])
    if request is None:
        for each in planned:
            attempt, job = submit(each, command)
            print(f"submitted  {job.handle}  {shown(each.run.path)}", flush=True)
        return
    refuse_unset(*planned)
    code = snapshot_of(planned[0])
    reach(jobs.instantiate(planned[0].config.launcher), request)
    with ExitStack() as stack:
        stack.enter_context(begun_on_record(*planned))
        attempts = [lay_down(each, command, code) for each in planned]
        say_left_out(code)
        for attempt in attempts:
            stack.enter_context(kept(attempt))
        launcher: Any = jobs.instantiate(planned[0].config.launcher)
        submitted = launcher.submit(request_together(planned, attempts))
    for attempt, job in zip(attempts, submitted, strict=True):
        jobs.record(attempt, job)
        print(f"submitted  {job.handle}  {shown(attempt.path.parents[1])}", flush=True)


def request_together(planned: Sequence[Plan], attempts: Sequence[Attempt]) -> Request | None:
    """One request for all members; None if this launcher, or their settings, ask for one each."""
    launcher = jobs.instantiate(planned[0].config.launcher)
    whole = getattr(launcher, "request_sweep", None)
    if whole is None or any(p.config.launcher != planned[0].config.launcher for p in planned):
        return None
    return whole([spec_of(*pair) for pair in zip(planned, attempts, strict=True)])


def unset(planned: Plan) -> list[str]:
    """Variables that the job is to have, and that this shell has not."""
    if is_foreground(planned.config):  # what this shell has, its ranks have
        return []
    forwarded = planned.config.launcher.get("forward_env") or ()
    return [name for name in forwarded if name not in os.environ]


def refuse_unset(*planned: Plan) -> None:
    missing = dict.fromkeys(name for each in planned for name in unset(each))
    if missing:
        what = f"not set in this shell: {', '.join(missing)}"
        remedy = f"export {next(iter(missing))}=..."
        raise UserError(Problem("launcher.forward_env", what, remedy))


def reach(launcher: Launcher, request: Request) -> None:
    """Lets the launcher ask its place, if it can: what is refused there leaves no run behind."""
    ask = getattr(launcher, "reach", None)
    if ask is not None:
        ask(request)


def lay_down(planned: Plan, command: Sequence[str], code: Snapshot | None) -> Attempt:
    """Writes the run, if it is new, and its next attempt.

    Raises:
        UserError: It is under way, or its folder cannot be written.
    """
    root, new = root_of(planned.config), not planned.run.exists
    jobs.refuse_second(planned.run)
    try:
        if new:
            recipe = configs.to_yaml(planned.recipe)
            chosen = (planned.overrides, planned.swept)
            planned.run.create(recipe, provenance.collect(command, root, *chosen))
        record = launch_record(planned, root)
        attempt = planned.run.begin_attempt(record, lambda: jobs.refuse_second(planned.run))
    except OSError as error:  # a full disk, a quota, what no permission shows
        if new:
            with suppress(OSError):
                planned.run.take_back()
        what = f"{shown(planned.run.path)} cannot be written: {error.strerror}"
        raise UserError(Problem("output_dir", what, "choose another: output_dir=FOLDER")) from error
    if code is not None:
        with kept(attempt):
            Bundle.write(planned.run, attempt, code)
    return attempt


@contextmanager
def begun_on_record(*planned: Plan) -> Iterator[None]:
    """However early a signal comes: no attempt that this process has begun waits for ever."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        state = stopping.state_of(-stopping.number_of(interrupt))
        for each in planned:
            last = each.run.last_attempt()
            if last is not None and last.is_mine():
                last.end(state, error=f"{str(interrupt) or 'interrupted'} before training began")
        raise


@contextmanager
def kept(attempt: Attempt) -> Iterator[None]:
    """An attempt that could not be submitted is on record as such."""
    try:
        yield
    except BaseException as error:
        state = JobState.FAILED
        if isinstance(error, KeyboardInterrupt):
            state = stopping.state_of(-stopping.number_of(error))
        attempt.end(state, error=f"not submitted: {redact(str(error))}")
        run = shown(attempt.path.parents[1])
        print(
            f"{run} is kept. Once it is mended:\n  python -m distdl resume {run}", file=sys.stderr
        )
        raise


def stay(job: Job, attempt: Attempt, planned: Plan) -> JobState | None:
    """With a job until its end; None if it goes on without us."""
    if is_foreground(planned.config):
        return job.wait()
    print(f"submitted  {job.handle}")
    for note in planned.notes:
        print(f"note       {note}")
    if job.url:
        print(f"watch      {job.url}")
    if not planned.config.follow:
        following.print_left(job, attempt)
        return None
    print(flush=True)
    return following.follow(job, attempt)


def is_foreground(config: DictConfig) -> bool:
    """Whether the job lives in this process, and so with the code that is imported here."""
    return bool(getattr(launcher_class(config), "foreground", False))


def goes_in_turn(config: DictConfig) -> bool:
    """Whether the members of a sweep must wait for each other here, as nothing queues them."""
    return is_foreground(config) or bool(getattr(launcher_class(config), "in_turn", False))


def snapshot_of(planned: Plan) -> Snapshot | None:
    """The code that goes with the job; None if it stays here.

    Raises:
        UserError: There is too much of it, or a secret in a module.
    """
    if is_foreground(planned.config):
        return None
    return snapshot.take(
        root_of(planned.config),
        exclude=[Path(planned.config.output_dir).resolve(), planned.run.path],
        limit_mb=planned.config.project.max_snapshot_mb,
        secret_names=tuple(planned.config.launcher.get("forward_env") or ()),
    )


def say_left_out(code: Snapshot | None) -> None:
    for line in code.told() if code else ():
        print(f"left out   {line}", file=sys.stderr, flush=True)


def next_attempt(planned: Plan) -> Attempt:
    """Where the next attempt will be."""
    goes_on = planned.run.exists and planned.old_run is None
    last = planned.run.last_attempt() if goes_on else None
    return Attempt(planned.run.path / "attempts" / f"{last.number + 1 if last else 1:03d}")


def how_to_train_longer(planned: Plan) -> str:
    path = shown(planned.run.path)
    return (
        f"{path} has finished: nothing to do. To train longer:\n"
        f"  python -m distdl resume {path} {configs.longer(planned.config)}"
    )


def render(planned: Plan) -> str:
    """What would run, for `dry_run=true`: starts nothing, writes nothing but `launcher.files`."""
    attempt, code = next_attempt(planned), snapshot_of(planned)
    request = jobs.instantiate(planned.config.launcher).request(spec_of(planned, attempt))
    files = write_files(planned, spec_of(planned, attempt), code)
    size, batch = planned.resources, batches.describe(planned.config, planned.resources)
    lines = [
        f"run        {shown(planned.run.path)}" + (" (goes on)" if attempt.number > 1 else ""),
        f"resources  {size.num_nodes} x {size.devices} {size.accelerator}",
        *([f"batch      {batch}"] if batch else []),
        *([f"code       {code.describe()}"] if code else []),
        *(f"left out   {line}" for line in (code.told() if code else ())),
        *(f"note       {note}" for note in planned.notes),
        *(f"note       ${name} is not set here: it must be to submit" for name in unset(planned)),
        *(f"file       {shown(file)}" for file in files),
        "",
        request.render(),
    ]
    return "\n".join(lines)


def write_files(planned: Plan, spec: JobSpec, code: Snapshot | None) -> list[Path]:
    """What the place's own tools take: the request as files, with the bundle beside them.

    Raises:
        UserError: Their folder is there already.
    """
    if code is None or not planned.config.launcher.get("files"):
        return []
    target = Path(planned.config.launcher.files).expanduser().absolute() / planned.run_id
    if target.exists():
        what = f"{shown(target)} is there already"
        raise UserError(Problem("launcher.files", what, "remove it, or name another folder"))
    request: Any = jobs.instantiate(planned.config.launcher).request(replace(spec, bundle="bundle"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
        run, made = RunDirectory(Path(temporary, "run")), Path(temporary, "files")
        attempt = lay_down(replace(planned, run=run), sys.argv, code)
        made.mkdir()
        (attempt.path / "bundle").rename(made / "bundle")
        for name, text in request.files().items():
            (made / name).write_text(text, encoding="utf-8")
        made.rename(target)
    return [target / name for name in request.files()]


def spec_of(planned: Plan, attempt: Attempt) -> JobSpec:
    here = is_foreground(planned.config)
    return JobSpec(
        name=planned.run_id,
        bundle=str(planned.run.path if here else attempt.path / "bundle"),
        store=str(planned.run.path),
        attempt=attempt.number,
        resources=planned.resources,
        forward_env=tuple(planned.config.launcher.get("forward_env") or ()),
    )


def launch_record(planned: Plan, root: Path) -> dict[str, Any]:
    """The attempt's launch.yaml."""
    where = OmegaConf.to_container(configs.where_of(planned.config), resolve=False)
    assert isinstance(where, dict)
    where.setdefault("project", {})["root"] = str(root)
    size = planned.resources
    return {
        "run_id": planned.run_id,
        "python_path": python_path(root),
        "where": where,
        "resources": {
            "num_nodes": size.num_nodes,
            "devices": size.devices,
            "accelerator": size.accelerator,
            "device_ids": list(size.device_ids) if size.device_ids else None,
        },
        "changes": planned.changes,
        "global_batch_size": batches.global_batch_size(planned.config, size),
        "notes": planned.notes,
    }


def report_failure(attempt: Attempt) -> None:
    """Names the rank that failed first: the others usually fail because of it."""
    first = attempt.first_error()
    if first is not None and (first["rank"] != 0 or first["type"] == KILLED):
        print(
            f"rank {first['rank']} failed first: {told(first)}\n"
            f"  {shown(attempt.logs / 'rank_{}.log'.format(first['rank']))}",
            file=sys.stderr,
        )

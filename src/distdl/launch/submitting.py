"""Writes the run and the attempt of a plan, and submits the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distdl.config import batches, consent, programs
from distdl.config import recipe as configs
from distdl.config.own_code import python_path
from distdl.job import JobBase, JobSpec, JobState, LauncherBase, Request, adapted_job, blamed
from distdl.launch import jobs
from distdl.launch.planning import Plan, refuse_second
from distdl.ranks import scratch, stopping
from distdl.runs import inputs, provenance, snapshot
from distdl.runs.bundle import Bundle
from distdl.runs.directory import Attempt, shown
from distdl.runs.snapshot import Snapshot
from distdl.util.errors import UserError
from distdl.util.redact import redact
from distdl.util.screen import escaped, say


def move_failed_run(planned: Plan) -> None:
    """Renames an old run of this name that failed before its first checkpoint."""
    if planned.old_run is not None:
        refuse_second(planned)
        planned.run.path.rename(planned.old_run)
        planned.old_run = None


def submit(planned: Plan, command: Sequence[str]) -> tuple[Attempt, JobBase]:
    """Writes the run and one attempt, and submits it.

    Nothing is written before the launcher has made the request and checked its platform.
    """
    submitted = _submit([planned], command, sweep=False)
    assert submitted is not None
    return submitted[0]


def submit_sweep(planned: Sequence[Plan], command: Sequence[str]) -> None:
    """Submits the members of a sweep, as one request if the launcher supports that."""
    with interruption_recorded(*planned):
        submitted = None
        if same_launcher(planned):
            submitted = _submit(planned, command, sweep=True)
        for attempt, job in submitted or (submit(each, command) for each in planned):
            say(f"submitted  {job.handle}  {shown(attempt.path.parents[1])}")


def _submit(
    planned: Sequence[Plan], command: Sequence[str], *, sweep: bool
) -> list[tuple[Attempt, JobBase]] | None:
    """Each attempt and its job. None, with nothing written, if the launcher makes no one request
    for a sweep."""
    launcher = planned[0].launch.build_launcher()
    refuse_unset(planned)
    if planned[0].launch.foreground:  # elsewhere each rank looks
        scratch.refuse(planned[0].config.get("data"), planned[0].resources.devices)
    expected = [next_attempt(each) for each in planned]
    request = request_for(launcher, specs_of(planned, expected), sweep)
    if request is None:
        return None
    code = snapshot_of(*planned)
    launcher.reach(request)
    attempts = [create_attempt(each, command, code) for each in planned]
    for line in code.lines_left_out() if code else ():
        say(escaped(f"left out   {line}"), to=sys.stderr)
    if attempts != expected:  # another start took the expected number in between, and has ended
        request = request_for(launcher, specs_of(planned, attempts), sweep)
    with ExitStack() as stack:
        for each, attempt in zip(planned, attempts, strict=True):
            stack.enter_context(refusal_recorded(each, attempt))
        submitted = launcher.submit(request)
    submitted_jobs = submitted if isinstance(submitted, list) else [submitted]
    pairs = list(zip(attempts, map(adapted_job, submitted_jobs), strict=True))
    for attempt, job in pairs if code is not None else ():
        jobs.record(attempt, job)
    return pairs


def request_for(
    launcher: LauncherBase[Any], specs: Sequence[JobSpec], sweep: bool = False
) -> Request | None:
    """The request for one attempt, or that for a sweep, if the launcher makes one."""
    with blamed(type(launcher), "request_sweep" if sweep else "request"):
        if sweep:
            return launcher.request_sweep(specs)
        (spec,) = specs
        return launcher.request(spec)


def same_launcher(planned: Sequence[Plan]) -> bool:
    """Whether all members have the same launcher settings."""
    return all(each.config.launcher == planned[0].config.launcher for each in planned)


def unset_names(planned: Plan) -> list[str]:
    """Variables of `launcher.forward_env` that are not set in this shell."""
    if planned.launch.foreground:  # the ranks have this shell's variables
        return []
    return [name for name in planned.launch.forwarded_names if name not in os.environ]


def refuse_unset(planned: Sequence[Plan]) -> None:
    if missing := list(dict.fromkeys(name for each in planned for name in unset_names(each))):
        raise UserError.at(
            "launcher.forward_env",
            what=f"not set in this shell: {', '.join(missing)}",
            remedy=f"export {missing[0]}=...",
            code="incomplete",
        )


def create_attempt(planned: Plan, command: Sequence[str], code: Snapshot | None) -> Attempt:
    """Creates the run, if it is new, and its next attempt. Raises a UserError if they cannot be
    written."""
    new = not planned.run.exists
    with must_be_written("output_dir", planned.run.path):
        try:
            attempt = begin_attempt(planned, command)
        except OSError:
            if new:
                with suppress(OSError):
                    planned.run.undo_create()
            raise
        if code is not None:
            with refusal_recorded(planned, attempt):
                Bundle.write(planned.run, attempt, code)
    return attempt


def begin_attempt(planned: Plan, command: Sequence[str]) -> Attempt:
    """Writes the run, if it is new, and its next attempt, without a bundle."""
    refuse_second(planned)
    inputs.store(planned.inputs, planned.run.path)
    if not planned.run.exists:
        recipe = configs.to_yaml(planned.recipe)
        root = planned.launch.root
        record = provenance.collect(command, root, planned.overrides, planned.swept)
        if unknown := record["git"].get("error"):
            note = escaped(f"note       no commit is recorded: {unknown}")
            say(note, to=sys.stderr)
        if planned.inputs:
            record[inputs.RECORD] = {each.key: each.record() for each in planned.inputs}
        planned.run.create(recipe, record)
    record = launch_record(planned)
    consent.remember(planned.config)
    return planned.run.begin_attempt(record, lambda: refuse_second(planned))


@contextmanager
def must_be_written(key: str, folder: Path) -> Iterator[None]:
    """Refuses the folder of a setting when the system does, as with a full disk or quota, which
    earlier checks cannot see."""
    try:
        yield
    except OSError as error:
        raise UserError.at(
            key,
            what=f"{shown(folder)} cannot be written: {error.strerror}",
            remedy=f"choose another: {key}=FOLDER",
            code="not-writable",
        ) from error


@contextmanager
def interruption_recorded(*planned: Plan) -> Iterator[None]:
    """Ends the attempts of this process if a signal comes early, so that none remains pending."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        state = stopping.state_after_exit(-stopping.signal_number(interrupt))
        for each in planned:
            last = each.run.last_attempt()
            if last is not None and last.is_starting_here():
                last.end(state, error=f"{str(interrupt) or 'interrupted'} before training began")
        raise


@contextmanager
def refusal_recorded(planned: Plan, attempt: Attempt) -> Iterator[None]:
    """Records the end of an attempt that could not be submitted."""
    try:
        yield
    except BaseException as error:  # an SDK's error, a bug, Ctrl-C: each ends the attempt
        state = JobState.FAILED
        if isinstance(error, KeyboardInterrupt):
            state = stopping.state_after_exit(-stopping.signal_number(error))
        attempt.end(state, error=f"not submitted: {redact(str(error))}")
        run = shown(attempt.path.parents[1])
        say(
            f"{run} is kept. Once the problem is fixed:\n  {planned.resume_command()}",
            to=sys.stderr,
        )
        raise


def snapshot_of(*planned: Plan) -> Snapshot | None:
    """The snapshot of the code for one job, or for the members of a sweep; None if it runs in this
    process."""
    first = planned[0]
    if first.launch.foreground:
        return None
    return snapshot.take(
        first.launch.root,
        exclude=written_by_runs(first),
        limit_mb=first.config.project.max_snapshot_mb,
        secret_names=first.launch.forwarded_names,
        imported=sorted({file for each in planned for file in each.imported}),
        started=sorted({file for each in planned for file in each.started}),
    )


def written_by_runs(planned: Plan) -> list[Path]:
    """Where runs are written, which no job gets: `output_dir`. If that holds the project itself, as
    with `output_dir=.`, only the experiment's folder, and what MLflow keeps."""
    outputs = Path(planned.config.output_dir).resolve()
    experiment = planned.run_id.partition("/")[0]
    names = (experiment, "mlflow.db", "mlflow-artifacts")
    folders = [outputs, *(outputs / name for name in names), planned.run.path]
    root = planned.launch.root.resolve()
    return [folder for folder in folders if not root.is_relative_to(folder)]


def next_attempt(planned: Plan) -> Attempt:
    """The next attempt, before it is created."""
    if planned.old_run is None:
        return planned.run.next_attempt()
    return Attempt(planned.run.path / "attempts" / "001")


def specs_of(planned: Sequence[Plan], attempts: Sequence[Attempt]) -> list[JobSpec]:
    """Each attempt as the launcher receives it."""
    return [
        JobSpec(
            name=each.run_id,
            bundle=str(each.run.path if each.launch.foreground else attempt.path / "bundle"),
            store=str(each.run.path),
            attempt=attempt.number,
            resources=each.resources,
            forward_env=each.launch.forwarded_names,
            judged=bool((each.search or {}).get("judged")),
        )
        for each, attempt in zip(planned, attempts, strict=True)
    ]


def launch_record(planned: Plan) -> dict[str, Any]:
    """The attempt's launch.yaml."""
    launch, size = planned.launch, planned.resources
    where = OmegaConf.to_container(launch.where, resolve=False)
    assert isinstance(where, dict)
    where.setdefault("project", {})["root"] = str(launch.root)
    return {
        "run_id": planned.run_id,
        "python_path": python_path(launch.root, launch.trust.folders),
        "where": where,
        "resources": {**asdict(size), "device_ids": list(size.device_ids or ()) or None},
        **({"folder": launch.folder} if programs.is_program(planned.config) else {}),
        "changes": planned.changes,
        "global_batch_size": batches.global_batch_size(planned.config, size),
        "notes": planned.notes,
        **({"left_out": planned.left_out} if planned.left_out else {}),
        **({"search": planned.search} if planned.search else {}),
        "network_gbps": launch.launcher and launch.launcher.network_gbps(where["launcher"]),
    }

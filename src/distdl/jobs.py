"""The jobs of runs, from the run directory alone: what the place says and the run says, as one.

A place knows whether a job waits, runs or is gone; torchrun, mpirun and srun swallow the rest,
which stands in the attempt's status.json. Where the store is not on this machine, the place is
believed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distdl.errors import Problem, UserError
from distdl.job import Job, JobState, Launcher
from distdl.provenance import make_importable
from distdl.run_directory import Attempt, RunDirectory, shown, write_json


def record(attempt: Attempt, job: Job) -> None:
    """Notes the submitted job, for later shells."""
    write_json(attempt.path / "job.json", {"handle": job.handle, "url": job.url})


def of(attempt: Attempt) -> Job:
    """The job of an attempt.

    Raises:
        UserError: Its launcher does not know it.
    """
    from distdl.launchers.local import LocalLauncher

    handle = attempt.job().get("handle")
    if handle is None:  # it lived in a process on some machine, and wrote here
        return LocalLauncher().attach(f"local://{attempt.path}")
    launch = attempt.launch()
    root = (launch["where"].get("project") or {}).get("root")
    if root:
        make_importable(Path(root), launch.get("python_path") or ["."])
    return instantiate(launch["where"]["launcher"]).attach(handle)


def place_of(attempt: Attempt) -> str:
    """Where an attempt without a job is or was: on a host, or nowhere, as it was refused."""
    target = str(attempt.launch()["where"]["launcher"].get("_target_", ""))
    if target.startswith("distdl.launchers.local.") or not target:
        return f"local, {attempt.status().get('host', '?')}"
    name = target.removeprefix("distdl.launchers.").partition(".")[0]
    return f"{name}, not submitted"


def named(handle: str) -> Job:
    """A job by its handle alone, `slurm://123`, with the launcher's default settings.

    Raises:
        UserError: No launcher of this name, or it does not know the job.
    """
    from distdl import compose

    scheme = handle.partition("://")[0]
    return instantiate(compose.compose([f"launcher={scheme}"]).launcher).attach(handle)


def instantiate(node: Any) -> Launcher:
    """The launcher of a config node.

    Raises:
        UserError: Its own, if it refuses its settings.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as build

    try:
        return build(OmegaConf.create(node), _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        if "Error locating target" in str(error):
            target = str(OmegaConf.create(node).get("_target_"))
            what = f"{target} cannot be imported here"
            remedy = f"is {target.partition('.')[0]} installed in this environment?"
            raise UserError(Problem("launcher", what, remedy)) from error
        raise


def state(attempt: Attempt, job: Job | None = None) -> JobState:
    """How an attempt stands; what its place knows is put on record once it has ended."""
    recorded = attempt.state()
    if not attempt.job():
        return recorded
    if recorded.ended and attempt.status().get("concluded"):
        return recorded
    place = (job or of(attempt)).state()
    if place.ended:
        return attempt.conclude(place)
    if place is JobState.UNKNOWN:
        return recorded if recorded.ended else place
    return place


def refuse_second(run: RunDirectory) -> None:
    """One run trains once at a time, wherever it is.

    Raises:
        UserError: Its newest attempt waits in a queue or runs.
    """
    last = run.last_attempt()
    if last is None or not last.job():
        return
    found = state(last)
    if found in (JobState.PENDING, JobState.RUNNING):
        path = shown(run.path)
        raise UserError(
            Problem(
                path,
                f"attempt {last.number} is {found.lower()} ({last.job()['handle']})",
                f"watch it: python -m distdl jobs logs --follow {path}, "
                f"or end it: python -m distdl jobs cancel {path}",
            )
        )


def runs_below(folder: Path) -> list[RunDirectory]:
    """Every run in a folder of runs (or of sweeps), the newest first."""
    found = [RunDirectory(path.parent) for path in folder.resolve().rglob("config.yaml")]
    started = [run for run in found if run.last_attempt() is not None]
    return sorted(started, key=lambda run: -(run.path / "config.yaml").stat().st_mtime)

"""The jobs of runs, from the run directory alone: what the place says and the run says, as one.

A place knows whether a job waits, runs or is gone; torchrun, mpirun and srun swallow the rest,
which stands in the attempt's status.json. Where the store is not on this machine, the place is
believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distdl import failures, kinds, provenance, user_conf
from distdl.errors import Problem, UserError
from distdl.job import Job, JobState, Launcher
from distdl.own_code import make_importable, own_folders
from distdl.redact import looks_secret
from distdl.resolve import resolve
from distdl.run_directory import Attempt, RunDirectory, shown, write_json
from distdl.targets import Trust, target_problems

# Folders of a run in which no other run lies; of copied code they may hold thousands.
INSIDE = ("attempts", "checkpoints", "logs", "tracking")


def record(attempt: Attempt, job: Job) -> None:
    """Notes the submitted job, for later shells."""
    write_json(attempt.path / "job.json", {"handle": job.handle, "url": job.url})


def own_trust(allow: Sequence[str] = ()) -> Trust:
    """Whose code may run while a run is looked at, or gone on with: the project that the command is
    typed in, what its `conf/` allows, and what the command line does. Never what the run's own
    files say: they may come from somebody else."""
    folders = own_folders(provenance.project_root(None))
    return Trust(folders, (*user_conf.allowed(), *allow))


class Places:
    """The places of several attempts: each launcher is built once, however many jobs it has.

    Args:
        allow: As `project.allow`, from the command line.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.trust = own_trust(allow)
        self._known: dict[str, Launcher | Problem] = {}

    def job(self, attempt: Attempt) -> Job:
        """The job of an attempt, without running what the run's files name.

        Returns:
            Its job; `Unasked` where asking its place would run code that is not trusted.

        Raises:
            UserError: Its launcher does not know it.
        """
        from distdl.launchers.local import LocalLauncher

        handle = attempt.job().get("handle")
        if handle is None:  # it lived in a process on some machine, and wrote here
            return LocalLauncher().attach(f"local://{attempt.path}")
        written = attempt.launch()["where"]["launcher"]
        if (key := repr(written)) not in self._known:
            self._known[key] = self._launcher(written)
        found = self._known[key]
        if isinstance(found, Problem):
            return Unasked(str(handle), found)
        if is_elsewhere(str(handle), attempt):
            why = f"job.json names a job of another folder: {handle}"
            return Unasked(str(handle), Problem("launcher", f"{why}: it was not asked"))
        return found.attach(str(handle))

    def _launcher(self, written: Any) -> Launcher | Problem:
        """What launch.yaml names, or why it is not asked."""
        found = resolve({"launcher": written})
        node = found.section("launcher")
        for _, refused in target_problems({"launcher": node}, self.trust):
            why = f"{refused.what}; the run's launch.yaml says so, and its place was not asked"
            return Problem(refused.path, why, refused.remedy)
        secret = [name for _, name, _ in found.variables() if looks_secret(name)]
        if secret:
            why = f"the run's launch.yaml asks for ${secret[0]}, which no look at a run gives away"
            return Problem("launcher", f"{why}: its place was not asked")
        if self.trust.covers(str(node["_target_"])):
            make_importable(self.trust.folders)
        return instantiate(node)


def of(attempt: Attempt, allow: Sequence[str] = ()) -> Job:
    """As `Places.job`, of one attempt."""
    return Places(allow).job(attempt)


def ask(jobs: Iterable[Job]) -> None:
    """Asks each place once about all of its jobs, where it can be asked so."""
    kinds_of: dict[type, list[Job]] = {}
    for job in jobs:
        kinds_of.setdefault(type(job), []).append(job)
    for kind, some in kinds_of.items():
        if len(some) > 1 and hasattr(kind, "ask"):
            with suppress(Exception):  # then each is asked by itself
                kind.ask(some)


def is_elsewhere(handle: str, attempt: Attempt) -> bool:
    """Whether a handle that names a folder (local, mpi) names another than that of its attempt."""
    scheme, _, rest = handle.partition("://")
    folder = Path("/" + rest.partition("/")[2])
    return scheme in ("local", "mpi") and folder.resolve() != attempt.path.resolve()


@dataclass
class Unasked:
    """A job whose place nobody asks, and why."""

    handle: str
    problem: Problem
    url = None

    @property
    def why(self) -> str:
        return str(self.problem)

    def state(self) -> JobState:
        return JobState.UNKNOWN

    def wait(self) -> JobState:
        raise UserError(self.problem)

    def logs(self, follow: bool = False) -> Iterator[str]:
        raise UserError(self.problem)

    def cancel(self) -> None:
        raise UserError(self.problem)


def place_of(attempt: Attempt) -> str:
    """Where an attempt without a job is or was: on a host, or nowhere, as it was refused."""
    target = str(attempt.launch()["where"]["launcher"].get("_target_", ""))
    if target.startswith("distdl.launchers.local.") or not target:
        host = attempt.status().get("host")
        return f"local, {host}" if host else "local"
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
    """The launcher of a config node that was found to be allowed.

    Raises:
        UserError: Its own, if it refuses its settings; or the node leads to no launcher.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as build

    node = OmegaConf.create(node)
    target = str(node.get("_target_"))
    try:
        found = kinds.locate(target)
    except (ImportError, AttributeError) as error:
        what = f"{target} cannot be imported here"
        remedy = f"is {target.partition('.')[0]} installed in this environment?"
        raise UserError(Problem("launcher", what, remedy)) from error
    if not kinds.launches(found):
        raise UserError(Problem("launcher._target_", f"{target} is no launcher"))
    try:
        return build(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def is_settled(attempt: Attempt) -> bool:
    """Whether its own files say how it stands, and no place has to be asked."""
    if not attempt.job():
        return True
    return attempt.state().ended and bool(attempt.status().get("concluded"))


def state(attempt: Attempt, job: Job | None = None) -> JobState:
    """How an attempt stands; what its place knows is put on record once it has ended."""
    recorded = attempt.state()
    if is_settled(attempt):
        return recorded
    job = job or of(attempt)
    place = job.state()
    if place.ended:
        code, killed = getattr(job, "exit_code", None), getattr(job, "killed", "")
        first_end = getattr(job, "first_end", lambda logs: None)(attempt.logs)
        if first_end is not None:
            failures.record_first_end(attempt.errors, *first_end)
        return attempt.conclude(place, code, killed)
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
    found = []
    for top, folders, files in os.walk(folder.resolve()):
        if "config.yaml" in files:
            run = RunDirectory(Path(top))
            if run.last_attempt() is not None:
                folders[:] = [name for name in folders if name not in INSIDE]
                found.append((os.stat(os.path.join(top, "config.yaml")).st_mtime, run))
    return [run for _, run in sorted(found, key=lambda one: -one[0])]

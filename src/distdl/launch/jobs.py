"""The jobs of runs, found by the run directory: one state from the platform and the run itself.

A platform knows whether a job waits, runs or has ended. torchrun, mpirun and srun hide how it
ended; the attempt's status.json says so. If the store is not on this machine, only the platform is
asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from distdl.config import user_conf
from distdl.config.own_code import make_importable, own_folders
from distdl.job import Job, JobState, Launcher
from distdl.runs import failures, provenance
from distdl.runs.directory import Attempt, RunDirectory, shown, write_json
from distdl.util.errors import Problem, UserError
from distdl.util.redact import looks_secret
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.targets import Trust, target_problems

Target = tuple[Job, Attempt | None]  # None: the job was named by its handle alone
# Folders of a run that contain no other run; they may hold thousands of folders of copied code.
NO_RUNS_INSIDE = ("attempts", "checkpoints", "logs", "tracking")


def record(attempt: Attempt, job: Job) -> None:
    """Records the submitted job, for later shells."""
    write_json(attempt.path / "job.json", {"handle": job.handle, "url": job.url})


def project_trust(allow: Sequence[str] = ()) -> Trust:
    """Whose code may run while a run is inspected or resumed: that of the project of the current
    folder, and what its `conf/` and the command line (`project.allow`) allow. The run's own files
    are not trusted: they may come from somebody else."""
    return Trust(own_folders(provenance.project_root(None)), (*user_conf.allowed(), *allow))


class Platforms:
    """The platforms of several attempts. Each launcher is built only once."""

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.trust = project_trust(allow)
        self._known: dict[str, Launcher | Problem] = {}

    def job(self, attempt: Attempt) -> Job:
        """The job of an attempt, without running untrusted code that the run's files name.

        Returns:
            Its job; `Unqueried` if asking its platform would run code that is not trusted.
        """
        from distdl.launchers.local import LocalLauncher

        handle = attempt.job().get("handle")
        if handle is None:  # it was a process on some machine that wrote to this folder
            return LocalLauncher().attach(f"local://{attempt.path}")
        written = attempt.launch()["where"]["launcher"]
        if (key := repr(written)) not in self._known:
            self._known[key] = self._launcher(written)
        launcher = self._known[key]
        if not isinstance(launcher, Problem) and names_another_folder(str(handle), attempt):
            why = f"job.json names a job of another folder: {handle}"
            launcher = Problem("launcher", f"{why}: it was not asked")
        if isinstance(launcher, Problem):
            return Unqueried(str(handle), launcher)
        return launcher.attach(str(handle))

    def _launcher(self, written: Any) -> Launcher | Problem:
        """The launcher that launch.yaml names, or why it is not asked."""
        resolved = resolve({"launcher": written})
        node = resolved.section("launcher")
        for _, refused in target_problems({"launcher": node}, self.trust):
            why = f"{refused.what}; the run's launch.yaml says so, and its platform was not asked"
            return Problem(refused.path, why, refused.remedy)
        if secret := [name for _, name, _ in resolved.variables() if looks_secret(name)]:
            why = f"the run's launch.yaml asks for ${secret[0]}, which no look at a run gives away"
            return Problem("launcher", f"{why}: its platform was not asked")
        if self.trust.covers(str(node["_target_"])):
            make_importable(self.trust.folders)
        return instantiate(node)


def job_of(attempt: Attempt, allow: Sequence[str] = ()) -> Job:
    """`Platforms.job` of a single attempt."""
    return Platforms(allow).job(attempt)


def targets(text: str, number: int | None, allow: Sequence[str] = ()) -> list[Target]:
    """The jobs that a user named: by a handle, a run, or a folder of runs (a sweep); of the attempt
    of a number, by default the newest."""
    if "://" in text:
        return [(job_from_handle(text), None)]
    folder = Path(text)
    below = [] if (folder / "config.yaml").is_file() else runs_below(folder)
    attempts = [attempt_of(run, number) for run in below or [RunDirectory.open(text)]]
    platforms = Platforms(allow)
    return [(platforms.job(attempt), attempt) for attempt in attempts]


def attempt_of(run: RunDirectory, number: int | None = None) -> Attempt:
    chosen = {a.number: a for a in run.attempts()}
    if not chosen:
        remedy = f"start it, or resume it: python -m distdl resume {shown(run.path)}"
        raise UserError.at(shown(run.path), "has no attempt on record", remedy)
    if number is not None and number not in chosen:
        raise UserError.at("--attempt", f"there is no {number}", f"1 to {max(chosen)}")
    return chosen[number or max(chosen)]


def query_all(jobs: Iterable[Job]) -> None:
    """Asks each platform that supports it about all of its jobs at once."""
    by_class: dict[type, list[Job]] = {}
    for job in jobs:
        by_class.setdefault(type(job), []).append(job)
    for kind, some in by_class.items():
        if len(some) > 1 and hasattr(kind, "ask"):
            with suppress(Exception):  # each job is then asked separately, and reports the error
                kind.ask(some)


def names_another_folder(handle: str, attempt: Attempt) -> bool:
    """Whether a handle that names a folder (local, mpi) names another folder than its attempt's."""
    scheme, _, rest = handle.partition("://")
    folder = Path("/" + rest.partition("/")[2])
    return scheme in ("local", "mpi") and folder.resolve() != attempt.path.resolve()


@dataclass
class Unqueried:
    """A job whose platform is not asked, and why."""

    handle: str
    problem: Problem
    url = None

    @property
    def why(self) -> str:
        return str(self.problem)

    def state(self) -> JobState:
        return JobState.UNKNOWN

    def logs(self, follow: bool = False) -> NoReturn:
        raise UserError(self.problem)

    wait = cancel = logs


def job_from_handle(handle: str) -> Job:
    """The job of a handle such as `slurm://123`, with the launcher's default settings."""
    from distdl.config import compose

    scheme = handle.partition("://")[0]
    return instantiate(compose.compose([f"launcher={scheme}"]).launcher).attach(handle)


def instantiate(node: Any) -> Launcher:
    """Builds the launcher of a config node. The caller has checked that its target is allowed."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as build

    node = OmegaConf.create(node)
    target = str(node.get("_target_"))
    try:
        named = kinds.locate(target)
    except (ImportError, AttributeError) as error:
        what = f"{target} cannot be imported here"
        remedy = f"is {target.partition('.')[0]} installed in this environment?"
        raise UserError.at("launcher", what, remedy) from error
    if not kinds.launches(named):
        raise UserError.at("launcher._target_", f"{target} is not a launcher")
    try:
        return build(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def is_settled(attempt: Attempt) -> bool:
    """Whether the attempt's own files give its state, so that no platform has to be asked."""
    if not attempt.job():
        return True
    return attempt.state().ended and bool(attempt.status().get("concluded"))


def state(attempt: Attempt, job: Job | None = None) -> JobState:
    """The state of an attempt. Once its job has ended, what the platform reports is recorded."""
    recorded = attempt.state()
    if is_settled(attempt):
        return recorded
    job = job or job_of(attempt)
    seen = job.state()
    if seen.ended:
        code, killed = getattr(job, "exit_code", None), getattr(job, "killed", "")
        first_end = getattr(job, "first_end", lambda logs: None)(attempt.logs)
        if first_end is not None:
            failures.record_first_end(attempt.errors, *first_end)
        return attempt.conclude(seen, code, killed)
    return recorded if seen is JobState.UNKNOWN and recorded.ended else seen


def refuse_second(run: RunDirectory) -> None:
    """Refuses a second attempt of a run at the same time."""
    last = run.last_attempt()
    if last is None or not last.job() or (seen := state(last)).ended or seen is JobState.UNKNOWN:
        return
    path, job = shown(run.path), last.job()["handle"]
    remedy = f"watch it: python -m distdl jobs logs --follow {path}, "
    remedy += f"or end it: python -m distdl jobs cancel {path}"
    raise UserError.at(path, f"attempt {last.number} is {seen.lower()} ({job})", remedy)


def runs_below(folder: Path) -> list[RunDirectory]:
    """Every run in a folder of runs (or of sweeps), the newest first."""
    runs: list[RunDirectory] = []
    for top, folders, files in os.walk(folder.resolve()):
        run = RunDirectory(Path(top))
        if "config.yaml" in files and run.last_attempt() is not None:
            folders[:] = [name for name in folders if name not in NO_RUNS_INSIDE]
            runs.append(run)
    return sorted(runs, key=lambda run: -(run.path / "config.yaml").stat().st_mtime)

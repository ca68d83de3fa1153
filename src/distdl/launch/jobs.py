"""The jobs of runs, found by the run directory. A job's state comes from two sources.

The platform knows whether the job waits, runs or has ended. How it ended is in the attempt's
status.json, because torchrun, mpirun and srun hide it. If the store is not on this machine, only
the platform is queried.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from distdl.config import trust, user_conf
from distdl.config.own_code import make_importable, own_folders
from distdl.incident import incident
from distdl.job import JobBase, JobState, LauncherBase, adapted_job, adapted_launcher, is_launcher
from distdl.launch import asking
from distdl.runs import failures, provenance
from distdl.runs.attempt import place_of
from distdl.runs.directory import Attempt, RunDirectory, shown, write_json
from distdl.util.answering import refuse_silent
from distdl.util.errors import Problem, UserError
from distdl.util.secret_names import looks_secret
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.targets import Trust, target_problems

Target = tuple[JobBase, Attempt | None]  # None: the user named the job by its handle alone
# Folders inside a run, in which no other run is searched: they may have thousands of subfolders.
NO_RUNS_INSIDE = ("attempts", "checkpoints", "logs", "tracking")


def record(attempt: Attempt, job: JobBase) -> None:
    """Records the submitted job, for later shells."""
    place = {"host": socket.gethostname(), **place_of(attempt.path)}
    write_json(attempt.path / "job.json", {"handle": job.handle, "url": job.url, **place})


def project_trust(allow: Sequence[str] = ()) -> Trust:
    """The code that may run while a run is inspected or resumed: the current folder's project, and
    what its `conf/`, trust.yaml and the command line (`project.allow`) allow. The run's own files
    are not trusted, because they may come from somebody else."""
    return Trust(own_folders(provenance.project_root(None)), (*allowed_here(), *allow))


def allowed_here() -> tuple[str, ...]:
    """What the user's own `conf/` and trust.yaml allow (`project.allow`)."""
    return (*user_conf.allowed(), *trust.allowed())


class Platforms:
    """The platforms of several attempts. Each launcher is built only once."""

    def __init__(self, allow: Sequence[str] = ()) -> None:
        self.trust = project_trust(allow)
        self._known: dict[str, LauncherBase[Any] | Problem] = {}

    def job(self, attempt: Attempt) -> JobBase:
        """The job of an attempt; `Unqueried` if querying its platform would run untrusted code, or
        is not possible from here."""
        from distdl.launchers.local import LocalLauncher

        handle = attempt.job().get("handle")
        if handle is None:  # a local run, maybe on another machine that writes to this folder
            return LocalLauncher().attach(f"local://{attempt.path}")
        written = attempt.launch()["where"]["launcher"]
        key = repr(written)
        if key not in self._known:
            self._known[key] = self._launcher(written)
        launcher = self._known[key]
        if not isinstance(launcher, Problem) and names_another_folder(str(handle), attempt):
            launcher = Problem(
                "launcher",
                what=f"not queried: job.json names a job of another folder, {handle}",
                code="mismatch",
            )
        elif not isinstance(launcher, Problem) and (original := attempt.copy_of(attempt.job())):
            launcher = Problem(
                "launcher",
                what=f"not queried: job.json names the job of {original}, of which this is a copy",
                code="mismatch",
            )
        if isinstance(launcher, Problem):
            return Unqueried(str(handle), launcher)
        try:
            return adapted_job(launcher.attach(str(handle)))
        except UserError as error:  # its platform keeps it where this machine does not look
            return Unqueried(str(handle), error.problems[0])

    def _launcher(self, written: object) -> LauncherBase[Any] | Problem:
        """The launcher that launch.yaml names, or the reason why it is not used."""
        resolved = resolve({"launcher": written})
        node = resolved.section("launcher")
        for _, refused in target_problems({"launcher": node}, self.trust):
            return Problem(
                refused.path,
                what=(
                    f"{refused.what}; it is from the run's launch.yaml, "
                    "so its platform was not asked"
                ),
                remedy=refused.remedy,
                code=refused.code,
            )
        if secret := [name for _, name, _ in resolved.variables() if looks_secret(name)]:
            what = f"the run's launch.yaml asks for the secret ${secret[0]}, which it does not get"
            return Problem("launcher", what=f"{what}: its platform was not asked", code="private")
        if self.trust.covers(str(node["_target_"])):
            make_importable(self.trust.folders)
        return instantiate(node)


def job_of(attempt: Attempt, allow: Sequence[str] = ()) -> JobBase:
    """The job of a single attempt; see `Platforms.job`."""
    return Platforms(allow).job(attempt)


def targets(text: str, number: int | None, allow: Sequence[str] = ()) -> list[Target]:
    """The jobs that a user named by a handle, a run, or a folder of runs (a sweep). `number` is the
    attempt's, by default the newest."""
    if "://" in text:
        return [(job_from_handle(text), None)]
    folder = Path(text)
    refuse_silent(folder)
    below = [] if (folder / "config.yaml").is_file() else runs_below(folder)
    attempts = [attempt_of(run, number) for run in below or [RunDirectory.open(text)]]
    platforms = Platforms(allow)
    return [(platforms.job(attempt), attempt) for attempt in attempts]


def attempt_of(run: RunDirectory, number: int | None = None) -> Attempt:
    attempts = {a.number: a for a in run.attempts()}
    if not attempts:
        raise UserError.at(
            shown(run.path),
            what="has no recorded attempt",
            remedy=f"start it, or resume it: python -m distdl resume {shown(run.path)}",
            code="incomplete",
        )
    if number is not None and number not in attempts:
        raise UserError.at(
            "--attempt",
            what=f"there is no attempt {number}",
            remedy=f"1 to {max(attempts)}",
            code="not-found",
        )
    return attempts[number or max(attempts)]


def names_another_folder(handle: str, attempt: Attempt) -> bool:
    """Whether a handle contains a folder (local, mpi) that is not the attempt's."""
    scheme, _, rest = handle.partition("://")
    folder = Path("/" + rest.partition("/")[2])
    return scheme in ("local", "mpi") and folder.resolve() != attempt.path.resolve()


class Unqueried(JobBase):
    """A job whose platform is not queried, and the reason."""

    def __init__(self, handle: str, problem: Problem) -> None:
        self._handle = handle
        self._problem = problem
        self.why = str(problem)

    @property
    def handle(self) -> str:
        return self._handle

    def state(self) -> JobState:
        return JobState.UNKNOWN

    def logs(self, follow: bool = False) -> NoReturn:
        raise UserError(self._problem)

    wait = cancel = logs

    def read_on(self, name: str, start: int) -> NoReturn:
        raise UserError(self._problem)

    def leave(self, name: str, content: bytes) -> NoReturn:
        raise UserError(self._problem)


def job_from_handle(handle: str) -> JobBase:
    """The job of a handle such as `slurm://123`, attached with the launcher's default settings."""
    from distdl.config import compose

    scheme = handle.partition("://")[0]
    launcher = instantiate(compose.compose([f"launcher={scheme}"]).launcher)
    return adapted_job(launcher.attach(handle))


def instantiate(node: DictConfig | dict[Any, Any], known: type | None = None) -> LauncherBase[Any]:
    """Builds the launcher of a config node. The caller has checked that its target is allowed, and
    passes on the class that it names if it has looked it up."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as build

    node = OmegaConf.create(node)
    target = str(node.get("_target_"))
    try:
        kind = known or kinds.locate(target)
    except (ImportError, AttributeError) as error:
        raise UserError.at(
            "launcher",
            what=f"{target} cannot be imported here",
            remedy=f"is {target.partition('.')[0]} installed in this environment?",
            code="failed",
        ) from error
    if not is_launcher(kind):
        raise UserError.at(
            "launcher._target_",
            what=f"{target} is not a launcher",
            remedy="name a class with the methods request, submit and attach: docs/own_launcher.md",
            code="wrong-kind",
        )
    try:
        arguments = build(node, _target_="builtins.dict", _convert_="all")
        return adapted_launcher(kind)(**arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def states(attempts: Sequence[Attempt]) -> list[JobState]:
    """The states of several attempts. Each platform is asked once, and beside the others."""
    platforms = Platforms()
    jobs = [None if is_settled(attempt) else platforms.job(attempt) for attempt in attempts]
    reports = iter(asking.ask_all([job for job in jobs if job is not None]))
    return [
        state(attempt, job, None if job is None else next(reports))
        for attempt, job in zip(attempts, jobs, strict=True)
    ]


def answered(targets: Sequence[Target]) -> Iterator[tuple[JobBase, Attempt | None, asking.Report]]:
    """Each target with its state, and why that is UNKNOWN: first those whose files have the state,
    then the others as their platforms answer or are given up."""
    asked: list[Target] = []
    for job, attempt in targets:
        if attempt is not None and is_settled(attempt):
            yield job, attempt, asking.Report(attempt.state(), job.why)
        else:
            asked.append((job, attempt))
    for block in asking.blocks([job for job, _ in asked]):
        for position, report in block.items():
            job, attempt = asked[position]
            if report.error is not None:
                raise report.error
            known = state(attempt, job, report) if attempt else report.state
            yield job, attempt, replace(report, state=known)


def is_settled(attempt: Attempt) -> bool:
    """Whether the attempt's own files have its final state, so that no platform is queried."""
    if not attempt.job():
        return True
    return attempt.state().ended and bool(attempt.status().get("concluded"))


def state(
    attempt: Attempt, job: JobBase | None = None, report: asking.Report | None = None
) -> JobState:
    """The state of an attempt. Once its job has ended, records what the platform reports.

    Args:
        job: Its job, if the caller has it.
        report: What the platform has said about the job; None to ask it now.
    """
    recorded = attempt.state()
    if is_settled(attempt):
        return recorded
    job = job or job_of(attempt)
    report = report or asking.ask(job)
    if report.error is not None:
        raise report.error
    reported = report.state
    if reported.ended:
        first_end = job.first_end(attempt.logs)
        if first_end is not None:
            failures.record_first_end(attempt.errors, *first_end)
        recorded = attempt.conclude(reported, job.exit_code, job.killed)
        incident.write(attempt)
        return recorded
    return recorded if reported is JobState.UNKNOWN and recorded.ended else reported


def exit_code(state: JobState, attempt: Attempt | None) -> int:
    """That of a run which has ended: what its attempt has recorded, such as 137 of a rank that was
    killed; else the state's."""
    recorded = attempt.status().get("exit_code") if attempt and state.ended else None
    return state.exit_code if recorded is None else int(recorded)


def runs_below(folder: Path) -> list[RunDirectory]:
    """Every run in a folder of runs (or of sweeps), the newest first."""
    runs: list[RunDirectory] = []
    for top, folders, files in os.walk(folder.resolve()):
        run = RunDirectory(Path(top))
        if "config.yaml" in files and run.last_attempt() is not None:
            folders[:] = [name for name in folders if name not in NO_RUNS_INSIDE]
            runs.append(run)
    return sorted(runs, key=lambda run: -(run.path / "config.yaml").stat().st_mtime)

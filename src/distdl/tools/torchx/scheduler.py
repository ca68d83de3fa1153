"""The schedulers: `torchx run -s distdl_mpi dist.torchrun ...` is `distdl run` (docs/torchx.md).

An app is a run of the experiment `torchx` below the current folder, and its id is the run's name.
So `distdl jobs`, `resume` and the incident report know it as well.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torchx
from torchx.schedulers.api import (
    DescribeAppResponse,
    ListAppResponse,
    Scheduler,
    Stream,
    filter_regex,
)
from torchx.schedulers.ids import make_unique
from torchx.specs import (
    AppDef,
    AppDryRunInfo,
    AppState,
    CfgVal,
    InvalidRunConfigException,
    ReplicaStatus,
    Role,
    RoleStatus,
    macros,
    runopts,
)
from torchx.util.types import to_dict
from torchx.workspace import WorkspaceMixin

from distdl.config import compose, grammar
from distdl.job import JobState
from distdl.launch import answers, dry_run, job_status, jobs, planning, submitting
from distdl.launch.planning import Plan
from distdl.launchers.common import slug
from distdl.runs.directory import Attempt, RunDirectory
from distdl.tools.torchx import app as apps
from distdl.util.errors import UserError
from distdl.util.screen import escaped
from distdl.util.suggest import did_you_mean_word
from distdl.util.tail import plain, tail

log = logging.getLogger(__name__)

PREFIX = "distdl_"
LONGEST = 60  # characters of an app's name in its id
STATES = {
    JobState.PENDING: AppState.PENDING,
    JobState.RUNNING: AppState.RUNNING,
    JobState.SUCCEEDED: AppState.SUCCEEDED,
    JobState.PRUNED: AppState.SUCCEEDED,
    JobState.FAILED: AppState.FAILED,
    JobState.CANCELLED: AppState.CANCELLED,
    # It ends so. For torchx a preempted app waits, and is started again by its scheduler.
    JobState.PREEMPTED: AppState.FAILED,
    JobState.UNKNOWN: AppState.UNKNOWN,
}


class AppRefused(InvalidRunConfigException):
    """A refusal of distdl's, which torchx prints without a traceback."""

    def __init__(self, error: UserError) -> None:
        Exception.__init__(self, escaped(error.shown()))
        self.cfg_key = error.problems[0].path


class LauncherOptions(runopts):
    """The settings of a launcher, as torchx's options: `-cfg KEY=VALUE` is `launcher.KEY=VALUE`."""

    def __init__(self, launcher: str) -> None:
        super().__init__()
        node: Any = compose.compose([f"launcher={launcher}"]).launcher
        self.target = str(node.pop("_target_"))
        plain: Any = compose.OmegaConf.to_container(node, resolve=False)
        self.defaults: dict[str, Any] = plain
        about = jobs.instantiate({"_target_": self.target, **self.defaults}).about_settings()
        for key, default in self.defaults.items():
            text = f"{about.get(key, key)} ({default})".replace("\n", " ")
            self.add(key, type_=str, help=text)

    def cfg_from_str(self, cfg_str: str) -> dict[str, CfgVal]:
        """The keys and texts; `resolve` refuses a wrong one, which torchx prints as a message."""
        return {**to_dict(cfg_str)}

    def resolve(
        self, cfg: Mapping[str, CfgVal], *, ignore_unknown: bool = False
    ) -> dict[str, CfgVal]:
        if not ignore_unknown:
            self._refuse_unknown(cfg)
        return super().resolve(cfg, ignore_unknown=ignore_unknown)

    def _refuse_unknown(self, cfg: Mapping[str, Any]) -> None:
        for key in cfg:
            if key not in self.defaults:
                hint = did_you_mean_word(key, self.defaults) or f"one of {', '.join(self.defaults)}"
                raise InvalidRunConfigException(f"{key} is no setting: {hint}", key, cfg)


class Submission:
    """The request: a planned run, and what of the app has no effect."""

    def __init__(self, app_id: str, planned: Plan) -> None:
        self.app_id = app_id
        self.planned = planned

    def __str__(self) -> str:
        with refusals():
            return dry_run.render(self.planned)


class DistdlScheduler(WorkspaceMixin[None], Scheduler[Mapping[str, CfgVal]]):
    """A launcher of distdl's as a scheduler of torchx's."""

    def __init__(self, launcher: str, session_name: str) -> None:
        super().__init__(f"{PREFIX}{launcher}", session_name)
        self.launcher = launcher

    @cached_property
    def settings(self) -> LauncherOptions:
        return LauncherOptions(self.launcher)

    @cached_property
    def folder(self) -> Path:
        """Of the apps: of the experiment's runs."""
        config = compose.compose([f"launcher={self.launcher}"])
        return Path(str(config.output_dir)).resolve() / apps.EXPERIMENT

    def _run_opts(self) -> runopts:
        return self.settings

    # ---- to submit ------------------------------------------------------------------------------

    def caching_build_workspace_and_update_role(
        self, role: Role, cfg: Mapping[str, CfgVal], build_cache: dict[object, object]
    ) -> None:
        """Builds nothing: each job takes the code along, by distdl's own rules."""
        here = Path.cwd().resolve()
        folders = [Path(each).expanduser().resolve() for each in role.workspace.projects]
        if folders != [here] or not role.workspace.is_unmapped_single_project():
            what = "distdl sends the project of the current folder, and no other"
            with refusals():
                raise UserError.at(
                    "workspace", what=what, remedy=f"cd {folders[0]}", code="unsupported"
                )

    def _submit_dryrun(
        self, app: AppDef, cfg: Mapping[str, CfgVal]
    ) -> AppDryRunInfo[Submission, Mapping[str, CfgVal]]:
        app_id = make_unique(slug(app.name)[:LONGEST] or "app").lower()
        mark = f"replica-{uuid.uuid4().hex[:12]}"
        values = macros.Values(img_root="", app_id=app_id, replica_id=mark, rank0_env=apps.RANK0)
        roles = [values.apply(role) for role in app.roles]
        chosen = {key: str(value) for key, value in cfg.items() if value is not None}
        defaults = self.settings.defaults
        target = apps.LauncherFacts(self.launcher, defaults, chosen, torchx.IMAGE)
        with refusals():
            made = apps.translated(roles, target, app_id, mark)
            overrides = grammar.parse_checked(made.overrides)
            composed = compose.composed(overrides)
            planned = planning.plan(composed.config, typed=composed.typed)
            planning.check_classes(planned)
        planned.notes += made.notes
        return AppDryRunInfo(Submission(app_id, planned), str)

    def schedule(self, dryrun_info: AppDryRunInfo[Submission, Mapping[str, CfgVal]]) -> str:
        planned = dryrun_info.request.planned
        for note in planned.notes:
            log.warning("%s", escaped(note))
        # The output is torchx's, which may be read by a program (--json).
        with refusals(), contextlib.redirect_stdout(sys.stderr):
            with submitting.interruption_recorded(planned):
                _, job = submitting.submit(planned, [*sys.argv])
            print(f"submitted  {job.handle}")
        return dryrun_info.request.app_id

    # ---- later ----------------------------------------------------------------------------------

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        attempt = self._attempt(app_id)
        if attempt is None:
            return None
        job = jobs.job_of(attempt)
        ((_, _, report),) = jobs.answered([(job, attempt)])
        state = STATES[report.state]
        known = answers.state_of(job, attempt, report.state, report.why)
        command = _command(attempt)
        role = apps.role_of(command) or apps.EXPERIMENT
        size = attempt.resources()
        replicas = [
            ReplicaStatus(id=node, state=state, role=role, hostname=host)
            for node, host in enumerate(_hosts(attempt))
        ]
        first = command.index("--") + 1 if "--" in command else 0
        described = Role(
            name=role,
            image=str(attempt.launch()["where"]["launcher"].get("image") or ""),
            entrypoint=(command[first:] or [""])[0],
            args=command[first + 1 :],
            num_replicas=size.num_nodes,
        )
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            num_restarts=int(attempt.status().get("restarts") or 0),
            msg="\n".join(job_status.lines(known, attempt)),
            ui_url=job.url,
            roles=[described],
            roles_statuses=[RoleStatus(role, replicas)],
        )

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        if not self.folder.is_dir():
            return []
        found = [run.path.name for run in jobs.runs_below(self.folder)]
        attempts = {name: self._attempt(name) for name in found}
        own = {name: attempt for name, attempt in attempts.items() if attempt}
        states = jobs.states([*own.values()])
        return [
            ListAppResponse(app_id=name, state=STATES[state], name=apps.role_of(_command(attempt)))
            for (name, attempt), state in zip(own.items(), states, strict=True)
        ]

    def _cancel_existing(self, app_id: str) -> None:
        if attempt := self._attempt(app_id):
            jobs.job_of(attempt).cancel()

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """The lines of a node. Where the run's folder is not on this machine, the platform's log
        of it; Azure ML has that of the first node alone until the job has ended.

        Raises:
            ValueError: There is no such app or replica, or only one of its streams is asked for.
        """
        attempt = self._attempt(app_id)
        if attempt is None:
            raise ValueError(f"there is no app {app_id} in {self.folder}")
        if streams not in (None, Stream.COMBINED):
            raise ValueError("a run's log has both streams: --streams combined")
        if not 0 <= k < attempt.resources().num_nodes:
            raise ValueError(f"replica {k} of {attempt.resources().num_nodes}")
        lines = (f"{plain(line)}\n" for line in _lines(attempt, k, should_tail))
        return filter_regex(regex, lines) if regex else lines

    def _attempt(self, app_id: str) -> Attempt | None:
        """The newest attempt of an app; None if this scheduler has none of that name."""
        path = self.folder / app_id
        if path.parent != self.folder or not (path / "config.yaml").is_file():
            return None
        attempt = RunDirectory(path).last_attempt()
        if attempt is None:
            return None
        used = attempt.launch()["where"]["launcher"].get("_target_")
        return attempt if used == self.settings.target else None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Lets torchx print a refusal as it prints its own."""
    try:
        yield
    except UserError as error:
        raise AppRefused(error) from None


def _command(attempt: Attempt) -> list[str]:
    config = RunDirectory(attempt.path.parents[1]).recipe()
    return [str(word) for word in (config.get("program") or {}).get("command") or ()]


def _hosts(attempt: Attempt) -> list[str]:
    """The name of each node's host; empty while it is not known."""
    size = attempt.resources()
    names = {each.rank // size.devices: each.host for each in attempt.ranks()}
    return [plain(names.get(node, "")) for node in range(size.num_nodes)]


def _lines(attempt: Attempt, node: int, follow: bool) -> Iterator[str]:
    job = jobs.job_of(attempt)
    if job.is_remote:
        numbered = map(job.node_of, job.logs(follow))
        yield from (line for number, line in numbered if number == node)
        return
    file = attempt.logs / f"rank_{node * attempt.resources().devices}.log"
    yield from tail(file, lambda: follow and not job.state().ended)
    if node == 0 and not file.exists():  # the program was not started
        yield from job.logs()


# ---- the entry points ---------------------------------------------------------------------------


def azureml(session_name: str, **_: object) -> DistdlScheduler:
    return DistdlScheduler("azureml", session_name)


def kubernetes(session_name: str, **_: object) -> DistdlScheduler:
    return DistdlScheduler("kubernetes", session_name)


def mpi(session_name: str, **_: object) -> DistdlScheduler:
    return DistdlScheduler("mpi", session_name)


def sagemaker(session_name: str, **_: object) -> DistdlScheduler:
    return DistdlScheduler("sagemaker", session_name)

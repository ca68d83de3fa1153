"""What a composed config says about its start: derived once, and then passed on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distdl.config import programs, resources
from distdl.config import recipe as configs
from distdl.config.own_code import make_importable, own_folders
from distdl.config.schema import Size
from distdl.job import LauncherBase, Resources, adapted_launcher, blamed, is_launcher
from distdl.launch import checkpoint_checks, jobs, program_checks
from distdl.runs import provenance
from distdl.runs.directory import RunDirectory
from distdl.util.errors import Problem, UserError
from distdl.validation import kinds, validate
from distdl.validation.resolve import Resolved
from distdl.validation.rules import strings
from distdl.validation.targets import Trust, problem_of

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

LOCAL = "distdl.launchers.local.LocalLauncher"
# Groups that every training needs, and that every program needs.
REQUIRED = ("model", "strategy", "launcher")
REQUIRED_BY_PROGRAM = ("launcher",)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """One start, after the first stage of validation. Another config (`with_config`) has the same
    code and the same launcher's class.

    Args:
        config: The recipe and `where` (the keys on where a run runs).
        where: These keys alone, as launch.yaml records them.
        typed: The overrides of the command line, parsed.
        root: The root of the user's code.
        trust: Whose code may be imported; its folders are those of the user's own code.
        launcher_class: The launcher's class, as its author wrote it; None if it cannot be imported,
            which the second stage of validation reports.
        size: The number of ranks and their devices.
        folder: In which a program is started, relative to the root.
        resolved: The config with its interpolations resolved, as the first stage has checked it;
            None if the config has changed since.
    """

    config: DictConfig
    where: DictConfig
    typed: tuple[Override, ...]
    root: Path
    trust: Trust
    launcher_class: type | None
    size: Resources
    folder: str = "."
    resolved: Resolved | None = None

    @property
    def launcher(self) -> type[LauncherBase[Any]] | None:
        """The launcher's class, with the defaults for members that its author left out."""
        # Not a field, as a class that is made here cannot be sent to the process of a member.
        return adapted(self.launcher_class)

    @property
    def is_local(self) -> bool:
        return is_local(self.config)

    @property
    def foreground(self) -> bool:
        """Whether the job ends with this process. It then uses the code that is imported here."""
        return self.launcher is not None and self.launcher.foreground

    @property
    def in_turn(self) -> bool:
        """Whether the members of a sweep must run one by one, because no platform queues them."""
        return runs_in_turn(self.launcher_class)

    @property
    def forwarded_names(self) -> tuple[str, ...]:
        """The variables that go from this shell to the job."""
        return tuple(self.config.launcher.get("forward_env") or ())

    def launcher_notes(self) -> list[str]:
        """The launcher's notes for the user on its settings."""
        return notes_of(self.launcher, self.config)

    def build_launcher(self) -> LauncherBase[Any]:
        """The launcher, with the config's settings. Raises a UserError if they are wrong."""
        return jobs.instantiate(self.config.launcher, self.launcher_class)

    def followed(self) -> Launch:
        """The same start with `follow=true`: this process waits for the job."""
        follow = OmegaConf.create({"follow": True})
        return self.with_config(configs.merge(self.config, follow))

    def with_config(self, config: DictConfig) -> Launch:
        """The same start with other values of keys that decide neither code nor size."""
        return replace(self, config=config, where=configs.where_of(config), resolved=None)

    def resized(self, config: DictConfig) -> Launch:
        """The same start with other values, which are checked as the first ones were. Raises a
        UserError if they do not fit."""
        size, resolved = checked_size(config, self.trust, self.launcher)
        return replace(self.with_config(config), size=size, resolved=resolved)

    def checked(self) -> Launch:
        """The same start, after the first stage of validation also where its config has changed.
        Raises a UserError with all problems."""
        if self.resolved is not None:
            return self
        resolved = validate.refuse(self.config, self.size, folders=self.trust.folders)
        return replace(self, resolved=resolved)


def of(config: DictConfig, typed: Sequence[Override], run: RunDirectory | None = None) -> Launch:
    """Derives a start from a composed config, and runs the first stage of validation.

    Args:
        config: As composed, or as a resume has put it together.
        typed: The overrides of the command line.
        run: The run, in whose folder the checkpoints to start from must exist.

    Raises:
        UserError: with all problems that need only the config and the run's checkpoints.
    """
    root, trust, kind = code_of(config)
    folder = program_checks.folder_of(root, run) if run is not None else "."
    size, resolved = checked_size(config, trust, adapted(kind), run, typed, root / folder)
    where = configs.where_of(config)
    return Launch(config, where, tuple(typed), root, trust, kind, size, folder, resolved)


def code_of(config: DictConfig) -> tuple[Path, Trust, type | None]:
    """The root of the user's code, whose code is trusted, and the launcher's class; see `Launch`.
    Checks nothing."""
    root = root_of(config)
    trust = Trust(own_folders(root), allowed(config))
    make_importable(trust.folders)  # the launcher may be the user's own
    return root, trust, launcher_class(config, trust)


def checked_size(
    config: DictConfig,
    trust: Trust,
    launcher: type[LauncherBase[Any]] | None,
    run: RunDirectory | None = None,
    typed: Sequence[Override] = (),
    folder: Path | None = None,
) -> tuple[Resources, Resolved]:
    """Determines the size of the run, and runs the first stage of validation, which needs only the
    config, the checkpoints in the run's directory, and what a program starts in `folder`. Returns
    the resolved config, too."""
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    problems = [
        Problem(
            group,
            what="missing",
            remedy=f"write {group}=OPTION; --help lists the options",
            code="missing-key",
        )
        for group in (REQUIRED_BY_PROGRAM if programs.is_program(config) else REQUIRED)
        if not written.get(group)
    ]
    size, uncounted, known = None, None, None
    try:
        trainer = configs.plain(config.trainer)
        known = None
        if launcher:
            with blamed(launcher, "devices"):
                known = launcher.devices(written.get("launcher") or {})
        size = resources.resolve(Size.of(trainer), local=is_local(config), known=known)
    except UserError as error:
        if notes := "; ".join(notes_of(launcher, config)):
            problems += [replace(p, what=f"{p.what}: {notes}") for p in error.problems]
        elif launcher is None or (launcher.knows_sizes() and known is None):
            uncounted = error  # the second stage reports the launcher's own problem
        else:
            problems += error.problems
    except (OmegaConfBaseException, TypeError, ValueError):
        pass  # a broken value, which the first stage reports
    program = program_checks.section_of(config)
    if program is not None and folder is not None:
        node = written.get("launcher") or {}
        local = is_local(config)
        problems += program_checks.problems(program, folder, node, launcher, size, local)
    elif run is not None:
        # The first stage reports broken values.
        with suppress(OmegaConfBaseException, TypeError, KeyError, AttributeError):
            problems += checkpoint_checks.for_task(config, run, typed)
        with suppress(OmegaConfBaseException, TypeError, KeyError, AttributeError):
            problems += checkpoint_checks.for_start(config, run)
    if program is None:
        with suppress(OmegaConfBaseException, TypeError, KeyError, AttributeError):
            problems += checkpoint_checks.for_parts(config, launcher, size)
    if size is not None and size.accelerator == "cpu" and trainer.get("sync_batchnorm"):
        problems.append(
            Problem(
                "trainer.sync_batchnorm",
                what="synchronised batch norm needs a GPU",
                remedy=(
                    "write trainer.sync_batchnorm=false; model.norm=group needs no synchronising"
                ),
                code="unsupported",
            )
        )
    resolved = validate.refuse(config, size, folders=trust.folders, further=problems)
    if uncounted is not None:
        validate.validate(config, None, folders=trust.folders)
        raise uncounted
    assert size is not None
    return size, resolved


def adapted(kind: type | None) -> type[LauncherBase[Any]] | None:
    return None if kind is None else adapted_launcher(kind)


def runs_in_turn(kind: type | None) -> bool:
    launcher = adapted(kind)
    return launcher is not None and (launcher.foreground or launcher.in_turn)


def notes_of(launcher: type[LauncherBase[Any]] | None, config: DictConfig) -> list[str]:
    if launcher is None:
        return []
    where = OmegaConf.to_container(config, resolve=False)
    assert isinstance(where, dict)
    with blamed(launcher, "notes"):
        return [*launcher.notes(where["launcher"])]


def is_local(config: DictConfig) -> bool:
    target = OmegaConf.select(
        config, "launcher._target_", default=LOCAL, throw_on_resolution_failure=False
    )
    return str(target) == LOCAL


def root_of(config: DictConfig) -> Path:
    """The root of the user's code; the default root if `project.root` is not a string."""
    root = OmegaConf.select(config, "project.root", throw_on_resolution_failure=False)
    return provenance.project_root(root if isinstance(root, str) else None)


def allowed(config: DictConfig) -> tuple[str, ...]:
    """`project.allow`; empty if its value is broken, which the first stage reports."""
    with suppress(OmegaConfBaseException, TypeError, ValueError, AttributeError):
        return tuple(strings(OmegaConf.to_container(config.project.allow, resolve=True)))
    return ()


def launcher_class(config: DictConfig, trust: Trust) -> type | None:
    """The class that `launcher._target_` names; None if it must not or cannot be imported. The
    first stage of validation reports a forbidden name, the second a failing import."""
    try:
        target = str(config.launcher["_target_"])
    except (OmegaConfBaseException, TypeError, AttributeError, KeyError):  # a broken value
        return None
    if problem_of(target, trust, ("launcher",)):
        return None
    try:
        named = kinds.locate(target)
    except Exception as error:  # importing a module may raise anything
        log.debug("%s cannot be imported", target, exc_info=error)
        return None
    return named if is_launcher(named) else None

"""What a launcher and a job are: the members that each must have, and those that have a default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from distdl.job.spec import JobSpec, JobState, Resources
from distdl.util.errors import Problem


class Request(Protocol):
    def render(self) -> str:
        """The request as text, as `dry_run=true` prints it."""
        ...


R = TypeVar("R", bound=Request)


class Job(Protocol):
    """What every job must have; `JobBase` explains each member. A class that does not derive from
    it gets the defaults of all others by `adapted_job`."""

    @property
    def handle(self) -> str: ...

    @property
    def url(self) -> str | None: ...

    def state(self) -> JobState: ...

    def wait(self) -> JobState: ...

    def logs(self, follow: bool = False) -> Iterator[str]: ...

    def cancel(self) -> None: ...


class Launcher(Protocol[R]):
    """What every launcher must have; `LauncherBase` explains each member. A class that does not
    derive from it gets the defaults of all others by `adapted_launcher`."""

    def request(self, spec: JobSpec) -> R: ...

    def submit(self, request: R) -> Job | Sequence[Job]: ...

    def attach(self, handle: str) -> Job: ...


class JobBase:
    """A job as its platform knows it. The run's own report is in the attempt's status.json, and
    `distdl.launch.jobs` combines the two.

    A subclass has `handle`, `state`, `wait`, `logs` and `cancel`; everything else has a default.
    """

    why: str = ""
    """The reason, if the last `state` was UNKNOWN; or what the job waits for, if it was PENDING."""

    reached: bool = True
    """Whether the platform answered to the last `state`."""

    exit_code: int | None = None
    """Of a job that has ended, if one process represents it."""

    killed: str = ""
    """A sentence on what ended the job from outside; empty if nothing did."""

    ends_with_shell: bool = False
    """Whether SIGTERM to the command that started the job also asks the job to end (`preempt`)."""

    preempted_here: bool = False
    """Whether such a signal has come: then this command starts nothing more."""

    @property
    def handle(self) -> str:
        """Identifies the job in a later shell: `slurm://123`."""
        raise NotImplementedError

    @property
    def url(self) -> str | None:
        """Where to watch it in a browser."""
        return None

    @property
    def platform(self) -> str:
        """What is asked, in words (`SageMaker in eu-west-1`). Jobs with the same words are asked
        together, in a thread beside those of other platforms."""
        return type(self).__name__

    def state(self) -> JobState:
        """Queries once; UNKNOWN if the platform has forgotten the job or cannot be reached."""
        raise NotImplementedError

    def wait(self) -> JobState:
        """Blocks until it has ended."""
        raise NotImplementedError

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The lines so far; with `follow`, all lines until the job has ended."""
        raise NotImplementedError

    def node_of(self, line: str) -> tuple[int, str]:
        """The node that a line of `logs` is from, and the line without the label that says so."""
        return 0, line

    def cancel(self) -> None:
        """Asks the job to end, with time for a checkpoint; may be called again."""
        raise NotImplementedError

    def preempt(self) -> None:
        """The same, for the platform that ends this command, and not for the user."""
        self.cancel()

    @property
    def is_remote(self) -> bool:
        """Whether the run's store is not on this machine, so that `fetch` has something to copy."""
        return type(self).fetch is not JobBase.fetch

    def fetch(self, to: Path) -> None:
        """Copies a store that is not on this machine into the folder `to`."""

    def read_on(self, name: str, start: int) -> bytes | None:
        """What a file of the run has got behind byte `start`, or a part of it, if the platform
        keeps the run's files elsewhere while the job is under way. None if it has fewer bytes.

        Raises:
            UserError: It cannot be read now.
        """
        return b""

    def leave(self, name: str, content: bytes) -> None:
        """Puts a small file to where the ranks look for it, if that is not the run's folder here.

        Raises:
            UserError: It cannot be written now.
        """

    def first_end(self, logs: Path) -> tuple[int, int, str] | None:
        """If only the platform saw the ranks end: rank, exit code (-N for signal N) and host of the
        first rank that failed. `logs` is the attempt's folder of logs."""
        return None

    @classmethod
    def ask(cls, jobs: Sequence[Any]) -> None:
        """Queries the platform once about several jobs of this class. The next `state` of each job
        returns that answer. By default each job is queried on its own."""

    @classmethod
    def ask_each(cls, jobs: Sequence[Any]) -> Iterable[Any]:
        """The same, but yields each job as soon as it has its answer."""
        cls.ask(jobs)
        return jobs


class LauncherBase(Generic[R]):
    """A platform where jobs run. The arguments of its class are the keys of `launcher.*`.

    A subclass has `request`, `submit` and `attach`; everything else has a default. What belongs to
    the class is asked before there is a launcher: `node` is then the config's node `launcher`.
    """

    foreground: ClassVar[bool] = False
    """Whether the job runs in this process and ends with it (local)."""

    in_turn: ClassVar[bool] = False
    """Whether the members of `-m` run one by one, because the platform has no queue (mpi)."""

    instead: ClassVar[Mapping[str, str]] = {}
    """What to write instead of a key that the launcher does not have, by key."""

    @classmethod
    def about_settings(cls) -> Mapping[str, str]:
        """What each setting does, by its key: a sentence, and more of it after a line break."""
        return {}

    def changed_settings(self) -> Iterable[str]:
        """The keys of settings that differ from their defaults. A dry run shows what they do."""
        return ()

    @classmethod
    def check(cls, node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields all problems of the settings before anything is started.

        Args:
            node: The settings. Paths of problems are relative to it (`vm_size`).
            context: The size of the run: `num_nodes`, `devices` (per node), `accelerator`.
        """
        yield from ()

    @classmethod
    def knows_sizes(cls) -> bool:
        """Whether the launcher knows machines by name, so that a name without `devices` is a
        mistake that `check` reports."""
        return cls.devices is not LauncherBase.devices

    @staticmethod
    def devices(node: Mapping[str, Any]) -> tuple[int, str] | None:
        """Devices per node and accelerator of a machine that the launcher knows by its name, for
        `trainer.devices=auto`; None if it does not know it."""
        return None

    @staticmethod
    def network_gbps(node: Mapping[str, Any]) -> int | None:
        """Gbit/s of one node's fast network; None if it has none, or if that is not known."""
        return None

    @staticmethod
    def without_mpi(node: Mapping[str, Any]) -> str:
        """What to write instead, if no mpirun starts the ranks, so that a program cannot join them
        by MPI; "" if one does."""
        return "launcher=mpi"

    @staticmethod
    def loses_store(node: Mapping[str, Any]) -> str:
        """Why files that a rank writes into the run's folder are gone after its job; "" if they
        last, as on a shared file system."""
        return ""

    @staticmethod
    def splits_store(node: Mapping[str, Any]) -> str:
        """What to write instead, if each node writes the run's files to a disk of its own and they
        meet only in a copy, so that no checkpoint may have parts of several nodes; "" if the nodes
        share one folder."""
        return ""

    @staticmethod
    def keeps_files_elsewhere(node: Mapping[str, Any]) -> bool:
        """Whether what a job writes into the run's folder is not there for this machine until
        `fetch` copies it."""
        return False

    @classmethod
    def hides_trials(cls, node: Mapping[str, Any]) -> str:
        """What to write instead, if a search can neither follow a job while it is under way nor end
        it early (`JobBase.read_on` and `leave`); "" if it can."""
        return "launcher=slurm" if cls.keeps_files_elsewhere(node) else ""

    @staticmethod
    def hides_files(node: Mapping[str, Any]) -> str:
        """What to write instead, if `fetch` cannot copy what a job writes into the run's folder, as
        that is in a volume of the platform; "" if it can, or the folder is here."""
        return ""

    @staticmethod
    def notes(node: Mapping[str, Any]) -> Iterator[str]:
        """Yields notes for the user, on what could not be checked."""
        yield from ()

    def starts_to_know(self) -> Iterator[Problem]:
        """A problem for each program that a setting names and that `request` would have to start: a
        dry run starts none."""
        yield from ()

    def request(self, spec: JobSpec) -> R:
        """Builds the request, offline and without side effects, from the spec alone. If the
        launcher has a setting `files`, its requests have a method `files` (name -> text): a dry run
        writes these files and the bundle into the folder of that setting.

        Raises:
            UserError: The platform cannot run the job; nothing has been written yet.
        """
        raise NotImplementedError

    def request_sweep(self, specs: Sequence[JobSpec]) -> R | None:
        """One request for all members of `-m` (an array), for which `submit` returns a list of
        jobs, one per spec; None to send one job per member."""
        return None

    def reach(self, request: R) -> None:
        """Checks, before the run is created, that the platform is reachable and accepts the user.
        Changes nothing there.

        Raises:
            UserError: It is not, or does not.
        """

    def submit(self, request: R) -> Job | Sequence[Job]:
        """Submits the request. Only this method has side effects.

        Raises:
            UserError: The platform refuses it, or cannot be reached.
        """
        raise NotImplementedError

    def attach(self, handle: str) -> Job:
        """The job of this handle, from any later shell.

        Raises:
            UserError: The handle does not belong to this launcher.
        """
        raise NotImplementedError

    def without(self, hosts: Sequence[str], resources: Resources) -> Iterator[dict[str, Any]]:
        """Yields settings by path (`trainer.num_nodes`) with which a job of this size does without
        these hosts, those with the most hosts first."""
        yield from ()

    @classmethod
    def names_hosts(cls) -> bool:
        """Whether the settings name the job's hosts. Otherwise the platform chooses others in
        place of those that a job does without."""
        return cls.unreachable is not LauncherBase.unreachable

    def unreachable(self, resources: Resources) -> Collection[str]:
        """The hosts of a job of this size that do not answer now."""
        return ()

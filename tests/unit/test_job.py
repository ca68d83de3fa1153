"""A launcher and a job of somebody's own: with the base classes, or with what is needed alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest

from distdl.job import (
    JobBase,
    JobSpec,
    JobState,
    LauncherBase,
    Resources,
    adapted_job,
    adapted_launcher,
    blamed,
    is_launcher,
)
from distdl.launch import asking
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.external import ExternalLauncher
from distdl.launchers.local import LocalLauncher
from distdl.launchers.mpi import MpiLauncher
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.slurm import SlurmLauncher
from distdl.util.errors import UserError
from tests.conftest import ROOT

SPEC = JobSpec("e/r", "/runs/e/r/bundle", "/runs/e/r", 1, Resources())
SHIPPED = (AzureMLLauncher, SageMakerLauncher, SlurmLauncher, MpiLauncher, LocalLauncher)


class Meta(type):
    """Some metaclass that somebody's framework asks for."""


class OwnLauncher(metaclass=Meta):
    """Three methods, and nothing else."""

    __slots__ = ("queue",)

    def __init__(self, queue="main"):
        self.queue = queue

    def request(self, spec):
        return SimpleNamespace(render=lambda: f"{self.queue}: {spec.name}")

    def submit(self, request):
        return OwnJob("own://1")

    def attach(self, handle):
        return OwnJob(handle)


@dataclass(frozen=True, slots=True)
class OwnJob:
    handle: str
    url: None = None

    def state(self):
        return JobState.RUNNING

    def wait(self):
        return JobState.SUCCEEDED

    def logs(self, follow=False):
        return iter(["a line"])

    def cancel(self):
        raise RuntimeError("cancelled")


class FullerJob:
    """Optional members of its own, beside what each job must have."""

    asked: list[int] = []
    platform = "a lab"
    ends_with_shell = True
    preempted_here = False

    def __init__(self, number):
        self.handle = f"full://{number}"
        self.url = None
        self.why = ""
        self.reached = True
        self.number = number
        self.exit_code = None

    def state(self):
        self.why = "switched off"
        self.reached = False
        self.exit_code = 3
        return JobState.UNKNOWN

    def wait(self):
        return self.state()

    def logs(self, follow=False):
        return iter(())

    def cancel(self):
        raise RuntimeError("cancelled")

    def preempt(self):
        self.preempted_here = True

    def fetch(self, to):
        self.fetched = to

    def first_end(self, logs):
        return (1, -9, "node1")

    @staticmethod
    def ask(jobs):
        FullerJob.asked.append(len(jobs))
        assert all(type(job) is FullerJob for job in jobs)


class EachJob(FullerJob):
    platform = "a lab that answers one by one"

    @staticmethod
    def ask_each(jobs):
        yield from reversed(jobs)


def test_three_methods_are_a_launcher_and_get_the_defaults():
    kind = adapted_launcher(OwnLauncher)
    assert is_launcher(OwnLauncher)
    assert issubclass(kind, OwnLauncher)
    assert adapted_launcher(OwnLauncher) is kind
    assert (kind.__module__, kind.__qualname__) == (OwnLauncher.__module__, "OwnLauncher")
    assert kind.__doc__ == OwnLauncher.__doc__
    assert (kind.foreground, kind.in_turn, dict(kind.instead)) == (False, False, {})
    assert not kind.knows_sizes()
    assert not kind.names_hosts()
    assert [*kind.check({}, {}), *kind.notes({})] == []
    assert kind.devices({}) is None
    assert kind.network_gbps({}) is None
    launcher = kind(queue="night")
    request = launcher.request(SPEC)
    assert request.render() == "night: e/r"
    assert launcher.request_sweep([SPEC]) is None
    launcher.reach(request)
    assert not launcher.about_settings()
    assert not launcher.changed_settings()
    assert [*launcher.starts_to_know(), *launcher.without(["a"], SPEC.resources)] == []


def test_a_launcher_s_own_members_come_before_the_defaults():
    class Sized(OwnLauncher):
        in_turn = True
        instead = {"size": "kind"}

        @staticmethod
        def devices(node):
            return (8, "gpu") if node.get("kind") == "big" else None

        def unreachable(self, resources):
            return {"node1"}

    kind = adapted_launcher(Sized)
    assert kind.in_turn
    assert kind.instead == {"size": "kind"}
    assert kind.knows_sizes()
    assert kind.devices({"kind": "big"}) == (8, "gpu")
    assert kind.names_hosts()
    assert kind().unreachable(Resources()) == {"node1"}


class Failing(OwnLauncher):
    """As people write it who have not read that the class is asked."""

    def devices(self, node):
        return 8, "gpu"

    @staticmethod
    def notes(node):
        yield node["size"]

    about_settings = ()


def test_a_member_that_raises_is_refused_by_its_name():
    kind = adapted_launcher(Failing)
    written = "docs/own_launcher.md shows how {} is written"
    asked = {
        "devices": (partial(kind.devices, {}), "missing 1 required positional argument", written),
        "notes": (partial(next, kind.notes({})), "KeyError: 'size'", f"see {__file__}, line "),
        "about_settings": (kind.about_settings, "is not callable", written),
    }
    for name, (ask, what, remedy) in asked.items():
        with pytest.raises(UserError) as error, blamed(kind, name):
            ask()
        (problem,) = error.value.problems
        assert problem.path == "launcher"
        assert problem.what.startswith(f"Failing.{name} failed: ")
        assert what in problem.what
        assert problem.remedy.startswith(remedy.format(name)), problem.remedy
    with pytest.raises(KeyError), blamed(SlurmLauncher, "devices"):
        raise KeyError("a fault of distdl's own has a traceback")


@pytest.mark.parametrize("missing", ["request", "submit", "attach"])
def test_a_class_that_lacks_a_method_is_no_launcher(missing):
    members = dict.fromkeys((missing,))
    assert not is_launcher(type("Lacking", (OwnLauncher,), members))
    rest = {name: vars(OwnLauncher)[name] for name in ("request", "submit", "attach")}
    del rest[missing]
    assert not is_launcher(type("Lacking", (LauncherBase,), rest)), "the base's own only raises"
    assert not is_launcher(OwnLauncher())
    assert not is_launcher(LauncherBase)


def test_the_page_on_own_launchers_names_each_member():
    text = (ROOT / "docs/own_launcher.md").read_text(encoding="utf-8")
    public = {name for base in (LauncherBase, JobBase) for name in vars(base) if name[0] != "_"}
    # Those of this process alone, and those that follow from another.
    ours = {"foreground", "preempted_here", "is_remote", "knows_sizes", "names_hosts"}
    assert [name for name in sorted(public - ours) if not re.search(rf"\b{name}\b", text)] == []


def test_every_shipped_launcher_derives_from_the_base():
    for kind in (*SHIPPED, ExternalLauncher):
        assert adapted_launcher(kind) is kind
    assert [k.__name__ for k in SHIPPED if k.knows_sizes()] == [
        "AzureMLLauncher",
        "SageMakerLauncher",
    ]
    assert [k.__name__ for k in SHIPPED if k.names_hosts()] == ["MpiLauncher"]


def test_a_job_gets_the_defaults_for_what_it_lacks():
    job = adapted_job(OwnJob("own://1"))
    assert isinstance(job, JobBase)
    assert adapted_job(job) is job
    assert (job.handle, job.url, job.platform) == ("own://1", None, "OwnJob")
    assert (job.state(), job.wait()) == (JobState.RUNNING, JobState.SUCCEEDED)
    assert (job.why, job.reached, job.exit_code, job.killed) == ("", True, None, "")
    assert not job.is_remote
    assert not job.ends_with_shell
    assert not job.preempted_here
    assert job.first_end(None) is None
    assert [*job.logs()] == ["a line"]
    with pytest.raises(RuntimeError, match="cancelled"):
        job.preempt()


def test_a_job_s_own_members_come_before_the_defaults(tmp_path):
    own = FullerJob(1)
    job = adapted_job(own)
    assert job.state() is JobState.UNKNOWN
    assert (job.why, job.reached, job.exit_code) == ("switched off", False, 3)
    assert job.is_remote
    assert job.platform == "a lab"
    assert job.ends_with_shell
    assert job.first_end(tmp_path) == (1, -9, "node1")
    job.fetch(tmp_path)
    job.preempt()
    assert own.fetched == tmp_path
    assert job.preempted_here


@pytest.mark.parametrize("kind", [OwnJob, FullerJob, EachJob])
def test_jobs_of_a_class_are_asked_together(kind):
    FullerJob.asked.clear()
    reports = asking.ask_all([adapted_job(kind(number)) for number in range(3)])
    assert [report.error for report in reports] == [None] * 3
    assert FullerJob.asked == ([3] if kind is FullerJob else [])
    expected = "" if kind is OwnJob else "switched off"
    assert {report.why for report in reports} == {expected}


def test_a_job_that_derives_from_the_base_has_its_members():
    class Derived(JobBase):
        def state(self):
            self.why = "asleep"
            return JobState.UNKNOWN

        def fetch(self, to):
            pass

    job = Derived()
    (report,) = asking.ask_all([job])
    assert (report.why, report.reached, job.is_remote) == ("asleep", True, True)

"""What launchers share: settings and walltime, waiting, a run's remote files. And what a user
writes goes into scripts, commands and YAML byte for byte, or is refused."""

import os
import subprocess
from unittest.mock import Mock

import pytest
import yaml

from distdl.job import JobSpec, JobState, Resources, variables
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.azureml.request import to_yaml
from distdl.launchers.common import RemoteFile, fetch_files
from distdl.launchers.local import LocalLauncher
from distdl.launchers.mpi import MpiLauncher
from distdl.launchers.queried_job import QueriedJob
from distdl.launchers.sagemaker import SageMakerLauncher
from distdl.launchers.slurm import SlurmLauncher
from distdl.util import walltime
from distdl.util.errors import NoRight, UserError
from distdl.validation import rules
from distdl.validation.resolve import resolve
from tests.written import program

CONTEXT = {"num_nodes": 1, "devices": 1, "accelerator": "cpu"}


def test_settings_that_are_wrong_alone_and_together_are_named_at_once():
    node = {"mem": 4, "grace_seconds": 0, "walltime": "1:30", "requeue_at_time_limit": True}
    problems = SlurmLauncher.check({**node, "requeue": False}, CONTEXT)
    assert {problem.path for problem in problems} == set(node)


HOURS = {12: 12, " 0.5 ": 0.5, "1:30:00": 1.5, "0:00:01": 1 / 3600, "2-12": 60, "1-00:30": 24.5}
NO_TIMES = {
    "is not a time above 0": [0, "0:00:00", "0-00", -1],
    "minutes and seconds go from 00 to 59": ["1:90:00", "1:00:60", "1:3:00"],
    "hours go from 0 to 23": ["1-24"],
    "is minutes and seconds for Slurm, and hours and minutes for others": ["1:30"],
    "5400 would be 5400 hours; did YAML read 1:30:00": [5400],
    "is not a time": ["a day", "", "1_0", float("nan"), float("inf"), True, [12]],
}


@pytest.mark.parametrize("message", NO_TIMES)
def test_walltime_is_the_same_for_all_launchers(message):
    for text, hours in HOURS.items():
        assert walltime.seconds(text) == round(3600 * hours)
    for value in NO_TIMES[message]:
        for launcher in (SlurmLauncher, AzureMLLauncher, SageMakerLauncher):
            problems = launcher.check({"walltime": value}, CONTEXT)
            (problem,) = [p for p in problems if p.path == "walltime"]
            assert message in problem.what
            assert problem.what.startswith(repr(value))
            assert problem.remedy == walltime.FORMS


class Asked(QueriedJob):
    """A job that answers with the given states and errors, in turn."""

    poll_seconds = 0.0
    _query = None
    _query_all = None
    _state_from = staticmethod(JobState)

    def __init__(self, *answers):
        self._query = Mock(side_effect=answers)


def test_waiting_outlives_an_outage_but_not_any(monkeypatch):
    down = UserError("out of reach")
    assert Asked("RUNNING", down, down, "SUCCEEDED").wait() is JobState.SUCCEEDED
    with pytest.raises(NoRight, match="expired"):
        Asked("RUNNING", NoRight("expired"), "SUCCEEDED").wait()
    monkeypatch.setattr(Asked, "patience", -1.0)
    with pytest.raises(UserError, match="out of reach"):
        Asked(down).wait()


def test_files_are_fetched_manifests_last_and_newer_ones_stay(tmp_path):
    copied = []

    def download(name, path):
        copied.append(name)
        path.write_text("new")

    names = ("a.ckpt.manifest.json", "a.ckpt", "logs/x", "here", "../outside")
    (tmp_path / "here").write_text("old")
    files = {name: RemoteFile(3, 1000.0) for name in names}
    assert fetch_files(tmp_path, files, download) == 3
    assert copied == ["a.ckpt", "logs/x", "a.ckpt.manifest.json"]
    assert fetch_files(tmp_path, files, download) == 0
    os.utime(tmp_path / "a.ckpt", (999, 999))
    assert fetch_files(tmp_path, files, download) == 1


NASTY = [
    "a\n\n\n\nb\n",
    "\n#SBATCH --array=0-9\n",
    "$(touch /tmp/x) `id` \"'\\ \\n \\x0a %s %% !! ~ * @env@ ${HOME}",
    "\r\n\t\x01\x1b[2J\x7f\x85\u2028\u2029\ufeff",
    "\x85",
    "Grüße 日本語 🎉",
    "",
    " ",
    "=",
    "yes",
    "1e3",
    "null",
    "- a: b # c",
]
# What a script of Slurm calls on a node; here it only records what it was given.
NODE = {
    "srun": 'env -0 > "$SEEN/env"; printf "%s\\0" "$@" > "$SEEN/arguments"',
    "scontrol": "echo localhost",
    "getent": "true",
}


def spec(store="/shared/runs/e/first", **fields):
    chosen = {"name": "e/first", "bundle": f"{store}/attempts/001/bundle", "attempt": 1, **fields}
    return JobSpec(store=store, resources=Resources(1, 2, "cpu"), **chosen)


@pytest.mark.parametrize("array", [False, True])
def test_bash_gets_every_value_and_path_byte_for_byte(array, tmp_path):
    """Also through an array's cases, where lines are indented."""
    for name, script in NODE.items():
        program(tmp_path / name, script)
    env = {f"N{number}": text for number, text in enumerate([*NASTY, "\udce9"])}
    launcher = SlurmLauncher(env={"OF_LAUNCHER": "\n".join(NASTY)}, requeue=False)
    one = spec("/runs/a b'$(id)`id` 日本%@env@", env=env)
    other = spec("/runs/x", env={"N0": "x"})
    request = launcher.request_sweep([one, other]) if array else launcher.request(one)
    head, _, body = request.text.partition("\n\n")
    assert "\n#SBATCH" in head
    assert "\n#SBATCH" not in body
    (tmp_path / "job.sh").write_text(request.text)
    shell = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SEEN": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    subprocess.run(["bash", tmp_path / "job.sh"], env=shell, check=True, capture_output=True)
    texts = (os.fsdecode((tmp_path / name).read_bytes()) for name in ("env", "arguments"))
    seen, arguments = (text.split("\0")[:-1] for text in texts)
    expected = {**env, "OF_LAUNCHER": "\n".join(NASTY), "PYTHONPATH": f"{one.bundle}/code"}
    assert {f"{name}={value}" for name, value in expected.items()} <= set(seen)
    assert arguments[-len(one.worker()) :] == list(one.worker())


@pytest.mark.parametrize("value", [*NASTY, "".join(NASTY)])
def test_yaml_for_azure_reads_back_the_same(value):
    content = {"environment_variables": {"A": value}}
    assert yaml.safe_load(to_yaml(content)) == content


def test_a_dry_run_can_be_copied_into_a_shell():
    assert "A='b c; id'" in LocalLauncher().request(spec(env={"A": "b c; id"})).render()


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A=B", "A\nB", "É", "$(id)"])
def test_a_name_of_a_variable_is_checked_for_every_launcher(name):
    for section in ({"env": {name: "1"}}, {"forward_env": [name]}):
        (problem,) = rules.names(resolve({"launcher": section, "output_dir": "outputs"}))
        assert problem.path.startswith(("launcher.env.", "launcher.forward_env"))
        assert problem.path.isprintable()
        assert problem.what.isprintable()
    for build in (
        lambda: spec(env={name: "1"}),
        lambda: spec(forward_env=(name,)),
        lambda: MpiLauncher(env={name: "1"}, flavour="openmpi4").request(spec()),
        lambda: SlurmLauncher(env={name: "1"}).request(spec()),
    ):
        with pytest.raises(UserError, match="is not a valid variable name"):
            build()


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, "a\0b", "\ud800"])
def test_a_value_of_a_variable_is_checked(value):
    with pytest.raises(UserError, match=r"launcher\.env\.A: .* is not a valid variable value"):
        variables({"A": value})


@pytest.mark.parametrize("odd", ["\n", "\r", "\t", "\x1b", "\x85", "\u2028", "\udcff", "\0"])
def test_a_folder_or_a_name_of_several_lines_is_refused(odd):
    problems = [*rules.names(resolve({"output_dir": f"runs{odd}x"}))]
    for fields in ({"store": f"/runs/a{odd}b"}, {"name": f"e/a{odd}b"}):
        with pytest.raises(UserError) as error:
            spec(**fields)
        problems += error.value.problems
    assert {problem.path for problem in problems[:-1]} == {"output_dir"}
    assert problems[-1].path == "name"


MISREAD = [
    *((SlurmLauncher(), store) for store in ('/runs/"a"', "/runs/a\\b", "/runs/a:b")),
    (SlurmLauncher(container="a.sif"), "/runs/a,b"),
    (MpiLauncher(flavour="openmpi4"), "/runs/a b"),
    (MpiLauncher(flavour="mpich"), "/runs/a:b"),
]


@pytest.mark.parametrize(("launcher", "store"), MISREAD)
def test_a_folder_that_a_platform_would_misread_is_refused(launcher, store):
    with pytest.raises(UserError, match="choose another output_dir"):
        launcher.request(spec(store))


WORKSPACE = "azureml://subscriptions/s/resourceGroups/g/workspaces/w"
HANDLES = [f"sagemaker://eu-west-1{rest}" for rest in ("/a/../b", "@evil.example/a", "/a?b#c")]
HANDLES += [f"{WORKSPACE}{rest}" for rest in ("/jobs/..", "/jobs/a?x=1", "#/jobs/a")]
HANDLES += [WORKSPACE.replace("/g/", "/../") + "/jobs/a", "local://12"]
HANDLES += [f"slurm://{rest}" for rest in ("", "x", "1;ls")]


@pytest.mark.parametrize("handle", HANDLES)
def test_a_handle_does_not_lead_to_another_address(handle):
    for launcher in (AzureMLLauncher(), SageMakerLauncher(), SlurmLauncher()):
        with pytest.raises(UserError) as error:
            launcher.attach(handle)
        assert [problem.path for problem in error.value.problems] == [handle]

"""launcher=slurm without a cluster: scripts, refusals, what a job inherits.

The scripts run for real, on a cluster of two nodes, in tests/cluster/test_slurm.py.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.slurm import SlurmLauncher, commands, script
from distdl.launchers.slurm.slurm_job import STATES, SlurmJob
from distdl.util.errors import UserError
from tests.conftest import ROOT, check_golden

GOLDEN = ROOT / "tests/golden/launchers"
EVERYTHING: dict[str, Any] = {
    "walltime": "2-12",
    "partition": "gpu",
    "account": "vision",
    "qos": "long",
    "constraint": "a100&nvlink",
    "mem": "400G",
    "cpus_per_task": 12,
    "gpus": "gres",
    "gpu_type": "a100",
    "modules": ["cuda/12.4", "nccl"],
    "python": "/opt/env/bin/python",
    "env": {"NCCL_DEBUG": "INFO"},
    "sbatch": ["--exclusive", "--mail-type=END"],
    "before_srun": ["ulimit -n 65536"],
    "srun_args": ["--label"],
    "requeue_at_time_limit": True,
    "grace_seconds": 300,
    "max_parallel": 2,
}
PYXIS = {"container": "nvcr.io#nvidia/pytorch:25.01-py3", "inputs": {"imagenet": "/data/imagenet"}}
APPTAINER = {
    "container": "train.sif",
    "container_runtime": "apptainer",
    "container_mounts": ["/scratch:/tmp"],
    "inputs": {"a": {"path": "/data/a"}, "b": "https://example.org/b"},
    "requeue": False,
}
CPU = {"python": "python"}


def spec(member: str = "", size: Resources | None = None, root: str = "/shared/runs") -> JobSpec:
    name = f"resnet50_ddp/first{member}"
    store = f"{root}/{name}"
    return JobSpec(
        name,
        bundle=f"{store}/attempts/001/bundle",
        store=store,
        attempt=1,
        resources=size or Resources(2, 8, "gpu"),
        env={"OMP_NUM_THREADS": "12"} if not member else {},
        forward_env=("HF_TOKEN",),
    )


def rendered(case: str) -> str:
    if case == "cpu":
        return SlurmLauncher(**CPU).request(spec(size=Resources(1, 2, "cpu"))).render()
    if case == "array":
        members = [spec("/1a2b"), spec("/3c4d")]
        request = SlurmLauncher(**EVERYTHING).request_sweep(members)
        assert request is not None
        return request.render()
    node = {"everything": EVERYTHING, "pyxis": PYXIS, "apptainer": APPTAINER}[case]
    return SlurmLauncher(**node).request(spec()).render()


@pytest.mark.parametrize("case", ["cpu", "everything", "array", "pyxis", "apptainer"])
def test_script(case: str, pytestconfig: pytest.Config) -> None:
    file, text = GOLDEN / f"slurm_{case}.txt", rendered(case)
    check_golden(pytestconfig, file, text)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not script.PLACEHOLDER.search(text) and "\n\n\n" not in text


def test_every_setting_is_in_a_script() -> None:
    """No key that does nothing: each changes the rendering, or is about the submitting side."""
    given = {*EVERYTHING, *PYXIS, *APPTAINER}
    here = {"poll_seconds", "forward_env"}
    assert set(SlurmLauncher.model_fields) == given | here


def test_a_path_with_anything_in_it() -> None:
    strange = spec(size=Resources(1, 1, "cpu"), root="/shared/my $runs/50%a'b")
    text = SlurmLauncher().request(strange).text
    found = f"#SBATCH --output=\"/shared/my $runs/50%%a'b/{strange.name}/attempts/001/logs"
    assert f'{found}/slurm-%j.log"' in text
    lines = "\n".join(script.member(strange))
    shell = f'{lines}\nprintf "%s\\n" "$attempt" "$bundle" "${{worker[@]}}"'
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [str(strange.folder), strange.bundle, *strange.worker()]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"walltime": "0:02:00", "grace_seconds": 120}, "over before the signal"),
        ({"partition": "gpu long"}, "'gpu long' is not one word"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "is not one word"),
        ({"account": ""}, "'' is not one word"),
        ({"mem": -4}, '-4 is not an amount such as "64G"'),
        ({"mem": "64GB"}, "is not an amount"),
        ({"cpus_per_task": -1}, "-1 is not greater than or equal to 1"),
        ({"cpus_per_task": True}, "True is not an integer"),
        ({"gpus": "gpu"}, "'gpu' is not 'gpus-per-node', 'gres' or 'none'"),
        ({"container_runtime": "aptainer"}, "did you mean apptainer?"),
        ({"container_mounts": ["data"]}, "'data' is not a folder"),
        ({"container": "a.sif", "inputs": {"a": "/a,b"}}, "'/a,b' cannot be mounted"),
        ({"grace_seconds": 0}, "greater than or equal to 1"),
        ({"grace_seconds": 70000}, "less than or equal to 65535"),
        ({"max_parallel": 0}, "greater than"),
        ({"poll_seconds": 0}, "greater than 0"),
        ({"requeue": "yes"}, "'yes' is not true or false"),
        ({"requeue_at_time_limit": True, "requeue": False}, "launcher.requeue=true"),
        ({"modules": "cuda"}, "launcher.modules=[cuda]"),
        ({"modules": ["cuda; rm -rf ~"]}, "is not the name of a module"),
        ({"before_srun": ["a\nb"]}, "'a\\nb' is not one line"),
        ({"sbatch": ["exclusive"]}, "is not an option of sbatch"),
        ({"sbatch": ["--exclusive\nrm -rf ~"]}, "is not an option of sbatch"),
        ({"sbatch": ["--nodes=4"]}, "write trainer.num_nodes"),
        ({"sbatch": ["-t 10"]}, "write launcher.walltime"),
        ({"sbatch": ["-pgpu"]}, "write launcher.partition"),
        ({"srun_args": ["--export=NONE"]}, "write launcher.forward_env"),
        ({"inputs": ["/data"]}, "['/data'] is not a mapping"),
    ],
    ids=str,
)
def test_settings_that_are_refused(node: dict[str, Any], expected: str) -> None:
    (problem,) = SlurmLauncher.check({"_target_": "x", "mine": 1, **node}, {})
    assert problem.path.partition(".")[0] in node
    assert expected in f"{problem.what}\n{problem.remedy}"
    with pytest.raises(UserError, match=rf"^launcher\.{problem.path}"):
        SlurmLauncher(**node).request(spec())


def test_everything_that_is_wrong_is_said_at_once() -> None:
    node = {"mem": 1, "walltime": "2 h", "requeue": False, "requeue_at_time_limit": True}
    found = {problem.path for problem in SlurmLauncher.check(node, {})}
    assert found == {"mem", "walltime", "requeue_at_time_limit"}
    with pytest.raises(UserError, match=r"launcher.partion: no such(.|\n)*did you mean partition"):
        SlurmLauncher(partion="gpu")


@pytest.mark.parametrize("node", [{}, EVERYTHING, PYXIS, APPTAINER], ids=str)
def test_settings_that_are_fine(node: dict[str, Any]) -> None:
    assert list(SlurmLauncher.check(node, {})) == []


def test_members_of_different_sizes_are_jobs_of_their_own() -> None:
    members = [spec("/a"), spec("/b", Resources(1, 8, "gpu"))]
    assert SlurmLauncher().request_sweep(members) is None


def test_a_job_inherits_little(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_PARTITION": "debug",
        "SBATCH_ACCOUNT": "mine",
        "HF_TOKEN": "secret",
        "OTHER_TOKEN": "secret",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = commands.environment(["HF_TOKEN"], SlurmLauncher(partition="gpu"))
    kept = {"SLURM_CONF", "SBATCH_ACCOUNT", "HF_TOKEN"}
    assert set(found) & set(given) == kept and "PATH" in found


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    launcher = SlurmLauncher()
    with pytest.raises(UserError, match=r"no scontrol on this machine\n.*login node"):
        launcher.reach(launcher.request(spec(root=str(tmp_path))))
    with pytest.raises(UserError, match=r"no sbatch on this machine\n.*login node"):
        launcher.submit(launcher.request(spec(root=str(tmp_path))))
    job = launcher.attach("slurm://12_3")
    assert (job.handle, job.url, job.state()) == ("slurm://12_3", None, JobState.UNKNOWN)
    assert job.why == "no scontrol on this machine"
    for ask in (lambda: list(job.logs()), job.cancel):
        with pytest.raises(UserError, match="on this machine"):
            ask()


@pytest.mark.parametrize("handle", ["slurm://", "slurm://x", "local://12", "12", "slurm://1;ls"])
def test_no_handle_of_slurm(handle: str) -> None:
    with pytest.raises(UserError, match="not a job of Slurm's"):
        SlurmLauncher().attach(handle)


def test_what_the_accounting_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = "7|COMPLETED\n8_1|NODE_FAIL\n8_1|CANCELLED by 1000\n"
    known = {"squeue": "5|RUNNING|None\n6_0|PENDING|Resources\n", "sacct": kept}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        assert len(words[-1]) < 100_000, "a command line has room for so much"
        return subprocess.CompletedProcess(words, 0, known[words[0]], "")

    monkeypatch.setattr(commands, "run", run)
    numbers = ["5", "6_0", "7", "8_1", *map(str, range(100, 40_000))]
    many = [SlurmJob(number) for number in numbers]
    SlurmJob.ask(many)
    states = [job.state() for job in many[:5]]
    assert states == ["RUNNING", "PENDING", "SUCCEEDED", "CANCELLED", "UNKNOWN"]
    assert "has forgotten it" in many[4].why and many[0].why == ""


def test_states() -> None:
    """The long names of squeue's manual page, none left out."""
    names = """BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED LAUNCH_FAILED
        NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED RECONFIG_FAIL RUNNING RESV_DEL_HOLD REQUEUE_FED
        REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED
        TIMEOUT"""
    assert set(names.split()) == set(STATES)
    assert SlurmJob("1")._meaning(commands.Look("SOMETHING_NEW")) is JobState.UNKNOWN


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("50%\rsrun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Killed", (1, -9, "n2")),
        ("srun: error: n1: tasks 4-5,7: Segmentation fault (core dumped)", (4, -11, "n1")),
        ("srun: error: n1: task 0: Exited with exit code 3", (0, 3, "n1")),
        ("srun: error: n1: task 0: Out Of Memory\nsrun: error: n2: task 1: Killed", None),
        ("task 1: Killed\nsrun: Force Terminated StepId=1.0", None),
    ],
)
def test_the_rank_that_ended_first(
    lines: str, found: tuple[int, int, str] | None, tmp_path: Path
) -> None:
    """What srun says in a log that an earlier start of the job has written to as well."""
    earlier = "slurm job 7, start 1, on n[1-2]\nsrun: error: n9: task 9: Killed\n"
    (tmp_path / "slurm-7.log").write_text(f"{earlier}slurm job 7, start 2, on n[1-2]\n{lines}\n")
    job = SlurmLauncher().attach("slurm://7")
    assert job.first_end(tmp_path) is None  # nobody has seen yet that it failed
    job.failed = True
    assert job.first_end(tmp_path) == found
    assert job.first_end(tmp_path / "absent") is None


def test_the_template_is_a_script_to_read() -> None:
    text = script.TEMPLATE.read_text()
    assert text.startswith("#!/bin/bash\n@directives@\n")
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 100
    assert shlex.split(text, comments=True)  # its quotes are in pairs

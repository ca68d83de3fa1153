"""launcher=slurm without a cluster: scripts, refusals, what a job inherits. The scripts run for
real, on a cluster of two nodes, in tests/cluster/test_slurm.py."""

import os
import subprocess

import pytest

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.slurm import SlurmLauncher, commands, script
from distdl.launchers.slurm.slurm_job import STATES, SlurmJob
from distdl.util.errors import UserError
from tests.conftest import ROOT, check_golden

CPU, GPUS = Resources(1, 2, "cpu"), Resources(2, 8, "gpu")
EVERYTHING = {"walltime": "2-12", "partition": "gpu", "account": "vision", "qos": "long"}
EVERYTHING |= {"constraint": "a100&nvlink", "mem": "400G", "cpus_per_task": 12, "gpus": "gres"}
EVERYTHING |= {"gpu_type": "a100", "modules": ["cuda/12.4", "nccl"], "grace_seconds": 300}
EVERYTHING |= {"python": "/opt/env/bin/python", "env": {"NCCL_DEBUG": "INFO"}, "max_parallel": 2}
EVERYTHING |= {"sbatch": ["--exclusive", "--mail-type=END"], "before_srun": ["ulimit -n 65536"]}
EVERYTHING |= {"srun_args": ["--label"], "requeue_at_time_limit": True}
PYXIS = {"container": "nvcr.io#nvidia/pytorch:25.01-py3", "inputs": {"imagenet": "/data/imagenet"}}
APPTAINER = {"container": "train.sif", "container_runtime": "apptainer", "requeue": False}
APPTAINER |= {"container_mounts": ["/scratch:/tmp"]}
APPTAINER |= {"inputs": {"a": {"path": "/data/a"}, "b": "https://example.org/b"}}
SCRIPTS = {"cpu": {"python": "python"}, "everything": EVERYTHING, "array": EVERYTHING}
SCRIPTS |= {"pyxis": PYXIS, "apptainer": APPTAINER}


def spec(member="", size=GPUS, root="/shared/runs", **env):
    name = f"resnet50_ddp/first{member}"
    store, env = f"{root}/{name}", env if member or env else {"OMP_NUM_THREADS": "12"}
    return JobSpec(name, f"{store}/attempts/001/bundle", store, 1, size, env, ("HF_TOKEN",))


@pytest.mark.parametrize("case", SCRIPTS)
def test_script(case, pytestconfig):
    launcher = SlurmLauncher(**SCRIPTS[case])
    if case == "array":
        request = launcher.request_sweep([spec("/1a2b"), spec("/3c4d")])
    else:
        request = launcher.request(spec(size=CPU if case == "cpu" else GPUS))
    text = request.render()
    check_golden(pytestconfig, ROOT / f"tests/golden/launchers/slurm_{case}.txt", text)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not script.PLACEHOLDER.search(text) and "\n\n\n" not in text
    assert launcher.request_sweep([spec("/a"), spec("/b", CPU)]) is None  # jobs of their own
    assert list(SlurmLauncher.check(SCRIPTS[case], {})) == []
    # Every setting changes a script, or is about the submitting side.
    settings = {"poll_seconds", "forward_env"}.union(*SCRIPTS.values())
    assert set(SlurmLauncher.model_fields) == settings
    template = script.TEMPLATE.read_text()
    assert template.startswith("#!/bin/bash\n@directives@\n") and len(template.splitlines()) < 60


VALUES = {"NEWLINES": "a\n\n\n\nb\n", "DIRECTIVE": "\r\n#SBATCH --array=0-9\r\n", "EMPTY": ""}
VALUES |= {"SHELL": "$(exit 3) `exit 4` \"'\\ \\n %s %% $HOME ~ * @env@ a,b;c"}
VALUES |= {"UNICODE": "Grüße 日本\u2028\x85 🎉"}


def test_paths_and_values_with_special_characters_arrive_byte_for_byte():
    strange = spec(size=CPU, root="/shared/my $runs/50%a'b", **VALUES)
    text = SlurmLauncher().request(strange).text
    output = f"#SBATCH --output=\"/shared/my $runs/50%%a'b/{strange.name}/attempts/001/logs"
    assert f'{output}/slurm-%j.log"' in text and "\n#SBATCH --array" not in text
    lines = "\n".join(script.member(strange))
    shell = f'{lines}\nprintf "%s\\0" "$attempt" "$bundle" "${{worker[@]}}"; env -0'
    words = os.fsdecode(subprocess.check_output(["bash", "-c", shell])).split("\0")[:-1]
    paths = [str(strange.folder), strange.bundle, *strange.worker()]
    assert words[: len(paths)] == paths
    assert VALUES.items() <= dict(word.split("=", 1) for word in words[len(paths) :]).items()


REFUSED = [
    ({"walltime": "0:02:00", "grace_seconds": 120}, "are too short"),
    ({"partition": "gpu long"}, "'gpu long' is not one word"),
    ({"partition": "gpu\n#SBATCH --uid=0"}, ""),
    ({"mem": -4}, '-4 is not an amount such as "64G"'),
    ({"cpus_per_task": -1}, "-1 is not greater than or equal to 1"),
    ({"cpus_per_task": True}, "True is not an integer"),
    ({"gpus": "gpu"}, "'gpu' is not 'gpus-per-node', 'gres' or 'none'"),
    ({"container_runtime": "aptainer"}, "did you mean apptainer?"),
    ({"container_mounts": ["data"]}, "'data' is not a folder"),
    ({"container": "a.sif", "inputs": {"a": "/a,b"}}, "'/a,b' cannot be mounted"),
    ({"grace_seconds": 70000}, "less than or equal to 65535"),
    ({"poll_seconds": 0}, "greater than 0"),
    ({"requeue": "yes"}, "'yes' is not true or false"),
    ({"requeue_at_time_limit": True, "requeue": False}, "launcher.requeue=true"),
    ({"modules": "cuda"}, "launcher.modules=[cuda]"),
    ({"modules": ["cuda; rm -rf ~"]}, "is not the name of a module"),
    ({"before_srun": ["a\nb"]}, "'a\\nb' is not one line"),
    ({"sbatch": ["exclusive"]}, "is not an option of sbatch"),
    ({"sbatch": ["--exclusive\nrm -rf ~"]}, ""),
    ({"sbatch": ["--nodes=4"]}, "set trainer.num_nodes"),
    ({"sbatch": ["-t 10"]}, "set launcher.walltime"),
    ({"srun_args": ["--export=NONE"]}, "set launcher.forward_env"),
    ({"inputs": ["/data"]}, "['/data'] is not a mapping"),
]


@pytest.mark.parametrize("node, message", REFUSED, ids=str)
def test_refused_settings(node, message):
    (problem,) = SlurmLauncher.check({"_target_": "x", "mine": 1, **node}, {})
    assert problem.path.partition(".")[0] in node
    assert message in f"{problem.what}\n{problem.remedy}"
    with pytest.raises(UserError) as error:
        SlurmLauncher(**node).request(spec())
    assert error.value.problems[0].path == f"launcher.{problem.path}"
    with pytest.raises(UserError, match=r"launcher.partion: no such(.|\n)*did you mean partition"):
        SlurmLauncher(partion="gpu")


def test_a_job_inherits_little(monkeypatch):
    kept = {"SLURM_CONF": "/slurm.conf", "SBATCH_ACCOUNT": "mine", "HF_TOKEN": "secret"}
    dropped = {"SLURM_JOB_ID": "7", "SBATCH_EXPORT": "NONE", "SBATCH_PARTITION": "debug"}
    dropped["OTHER_TOKEN"] = "secret"
    for name, value in (kept | dropped).items():
        monkeypatch.setenv(name, value)
    env = commands.environment(["HF_TOKEN"], SlurmLauncher(partition="gpu"))
    assert kept.keys() <= env.keys() and not dropped.keys() & env.keys() and "PATH" in env


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    launcher = SlurmLauncher()
    request, job = launcher.request(spec(root=str(tmp_path))), launcher.attach("slurm://12_3")
    assert (job.handle, job.url, job.state()) == ("slurm://12_3", None, JobState.UNKNOWN)
    assert job.why == "scontrol is not installed on this machine"
    with pytest.raises(UserError, match="on a login node") as error:
        launcher.reach(request)
    assert error.value.problems[0].path == "launcher"
    for act in (lambda: launcher.submit(request), lambda: list(job.logs()), job.cancel):
        with pytest.raises(UserError, match="on this machine"):
            act()
    for handle in ("slurm://", "slurm://x", "local://12", "12", "slurm://1;ls"):
        with pytest.raises(UserError, match="is not a Slurm job"):
            launcher.attach(handle)


def test_what_the_accounting_remembers(monkeypatch):
    kept = "7|COMPLETED\n8_1|NODE_FAIL\n8_1|CANCELLED by 1000\n9|SOMETHING_NEW\n"
    known = {"squeue": "5|RUNNING|None\n6_0|PENDING|Resources\n", "sacct": kept}

    def run(*words):
        assert len(words[-1]) < 100_000, "a command line has room for so much"
        return subprocess.CompletedProcess(words, 0, known[words[0]], "")

    monkeypatch.setattr(commands, "run", run)
    numbers = ["5", "6_0", "7", "8_1", "9", *map(str, range(100, 40_000))]
    many = [SlurmJob(number) for number in numbers]
    SlurmJob.ask(many)
    states = [job.state() for job in many[:6]]
    assert states == ["RUNNING", "PENDING", "SUCCEEDED", "CANCELLED", "UNKNOWN", "UNKNOWN"]
    assert "has forgotten it" in many[5].why and many[0].why == ""
    # The long names of squeue's manual page, none left out.
    names = """BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED LAUNCH_FAILED
        NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED RECONFIG_FAIL RUNNING RESV_DEL_HOLD REQUEUE_FED
        REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED
        TIMEOUT"""
    assert set(names.split()) == set(STATES)


SRUN_LINES = [
    ("50%\rsrun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Killed", (1, -9, "n2")),
    ("srun: error: n1: tasks 4-5,7: Segmentation fault (core dumped)", (4, -11, "n1")),
    ("srun: error: n1: task 0: Exited with exit code 3", (0, 3, "n1")),
    ("srun: error: n1: task 0: Out Of Memory\nsrun: error: n2: task 1: Killed", None),
    ("task 1: Killed\nsrun: Force Terminated StepId=1.0", None),
]


@pytest.mark.parametrize("lines, first", SRUN_LINES)
def test_the_rank_that_ended_first(lines, first, tmp_path):
    """srun's lines in a log that an earlier start of the job has written to as well."""
    earlier = "slurm job 7, start 1, on n[1-2]\nsrun: error: n9: task 9: Killed\n"
    (tmp_path / "slurm-7.log").write_text(f"{earlier}slurm job 7, start 2, on n[1-2]\n{lines}\n")
    job = SlurmLauncher().attach("slurm://7")
    assert job.first_end(tmp_path) is None  # it has not failed as far as is known
    job.failed = True
    assert job.first_end(tmp_path) == first
    assert job.first_end(tmp_path / "absent") is None

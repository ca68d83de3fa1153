"""launcher=slurm without a cluster: scripts, refusals, what a job inherits. The scripts run for
real, on a cluster of two nodes, in tests/cluster/test_slurm.py."""

import re
import subprocess

import pytest

from distdl.job import JobSpec, JobState, Resources
from distdl.launchers.slurm import SlurmLauncher, commands, options
from distdl.launchers.slurm.slurm_job import SlurmJob
from distdl.util.errors import UserError
from tests import slurm_spellings
from tests.conftest import ROOT, check_golden

CPU, GPUS = Resources(1, 2, "cpu"), Resources(2, 8, "gpu")
EVERYTHING = {
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
    "grace_seconds": 300,
    "python": "/opt/env/bin/python",
    "env": {"NCCL_DEBUG": "INFO"},
    "max_parallel": 2,
    "sbatch": ["--exclusive", "--mail-type=END"],
    "before_srun": ["ulimit -n 65536"],
    "srun_args": ["--label"],
    "requeue_at_time_limit": True,
}
PYXIS = {"container": "nvcr.io#nvidia/pytorch:25.01-py3", "inputs": {"imagenet": "/data/imagenet"}}
APPTAINER = {
    "container": "train.sif",
    "container_runtime": "apptainer",
    "requeue": False,
    "container_mounts": ["/scratch:/tmp"],
    "inputs": {"a": {"path": "/data/a"}, "b": "https://example.org/b"},
}
SCRIPTS = {
    "cpu": {"python": "python"},
    "everything": EVERYTHING,
    "array": EVERYTHING,
    "pyxis": PYXIS,
    "apptainer": APPTAINER,
}


def spec(member="", size=GPUS, root="/shared/runs", **env):
    name = f"resnet50_ddp/first{member}"
    store = f"{root}/{name}"
    env = env if member or env else {"OMP_NUM_THREADS": "12"}
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
    assert launcher.request_sweep([spec("/a"), spec("/b", CPU)]) is None  # jobs of their own
    assert list(SlurmLauncher.check(SCRIPTS[case], {})) == []
    # Every setting changes a script, or is about the submitting side.
    settings = {"poll_seconds", "forward_env"}.union(*SCRIPTS.values())
    assert set(SlurmLauncher.model_fields) == settings
    # Other lines of a run in a folder with special characters: test_common.py.
    text = SlurmLauncher().request(spec(size=CPU, root="/shared/my $runs/50%a'b")).text
    log = "/shared/my $runs/50%%a'b/resnet50_ddp/first/attempts/001/logs/slurm-%j.log"
    assert f'#SBATCH --output="{log}"\n' in text


REFUSED = [
    ({"walltime": "0:02:00", "grace_seconds": 120}, "are too short"),
    ({"partition": "gpu long"}, "'gpu long' is not one word"),
    ({"mem": -4}, '-4 is not an amount such as "64G"'),
    ({"container_runtime": "aptainer"}, "did you mean apptainer?"),
    ({"container_mounts": ["data"]}, "'data' is not a folder"),
    ({"container": "a.sif", "inputs": {"a": "/a,b"}}, "'/a,b' cannot be mounted"),
    ({"requeue_at_time_limit": True, "requeue": False}, "launcher.requeue=true"),
    ({"modules": "cuda"}, "launcher.modules=[cuda]"),
    ({"modules": ["cuda; rm -rf ~"]}, "is not the name of a module"),
    ({"before_srun": ["a\nb"]}, "'a\\nb' is not one line"),
    ({"sbatch": ["exclusive"]}, "is not an option of sbatch"),
    ({"sbatch": ["--exclusive\nrm -rf ~"]}, ""),
    ({"sbatch": ["--nodes=4"]}, "set trainer.num_nodes"),
    ({"sbatch": ["-t 10"]}, "set launcher.walltime"),
    (
        {"sbatch": ["--arr=0-3"]},
        "--arr=0-3: --array is reserved for the launcher\nleave it out, and",
    ),
    ({"sbatch": ["--test-only"]}, "dry_run=true shows the script"),
    ({"sbatch": ["--exclu"]}, "write --exclude or --exclusive"),
    ({"sbatch": ["--comment=my job"]}, """'job' is not an option\na value with blanks is quoted"""),
    (
        {"sbatch": ["--mine a --theirs n1"]},
        "'a' is not an option\nif it is the value of --mine, write --mine=a",
    ),
    ({"sbatch": ["--comment=my'job"]}, "close the quotation mark"),
    ({"sbatch": ["--comment=#1"]}, "put the value in quotes"),
    ({"sbatch": ["-x"]}, "-x needs a value\n--exclude=..."),
    ({"srun_args": ["-K0"]}, "--kill-on-bad-exit is reserved"),
    ({"srun_args": ["--tasks=3"]}, "set trainer.devices"),
    ({"srun_args": ["-lW5"]}, "--wait is reserved"),
    ({"srun_args": ["--container-m=/a"]}, "set launcher.container_mounts"),
    ({"srun_args": ["--cpu-bind cores"]}, "write --cpu-bind=cores"),
    ({"srun_args": ["-w n1"]}, "write -wn1"),
    ({"srun_args": ["--gpu-bind"]}, "needs a value"),
    ({"env": {"SLURM_NTASKS": 1}}, "sets --ntasks of sbatch or srun"),
    ({"forward_env": ["SBATCH_ARRAY_INX"]}, "set launcher.max_parallel"),
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


def test_options_of_sbatch_in_any_spelling():
    """What sbatch itself makes of these: tests/cluster/test_slurm.py."""

    def refused(spellings):
        return {each for each in spellings if [*SlurmLauncher.check({"sbatch": [each]}, {})]}

    assert refused(slurm_spellings.RESERVED) == {*slurm_spellings.RESERVED}
    assert refused(slurm_spellings.OTHERS) == set()
    # A plugin's, or of a version to come.
    assert list(SlurmLauncher.check({"sbatch": ["--of-a-plugin=1", "-Iv"]}, {})) == []
    kept = ["-lu", "--cpu-bind=cores", "--mpi=pmix", "-wn1", "--lab", "--exclusive", "--hint=x"]
    assert list(SlurmLauncher.check({"srun_args": kept}, {})) == []
    assert list(SlurmLauncher.check({"env": {"SLURM_MPI_TYPE": "pmix", "NTASKS": 1}}, {})) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sbatch": ["--mail-tpye=END"]}, "sbatch: --mail-tpye is not an option of sbatch"),
        ({"sbatch": ["--exlusive"]}, "sbatch: --exlusive is not an option of sbatch"),
        ({"sbatch": ["--nodlist=n1"]}, "sbatch: --nodlist is not an option of sbatch"),
        ({"srun_args": ["--lable"]}, "srun_args: --lable is not an option of srun"),
    ],
)
def test_a_misspelt_option(settings, said, monkeypatch):
    (problem,) = SlurmLauncher.check(settings, {})
    assert f"{problem.path}: {problem.what}" == said
    assert re.fullmatch(r"did you mean --(mail-type|exclusive|nodelist|label)\?", problem.remedy)
    assert problem.code == "unknown-key"
    # A cluster's own sbatch knows better.
    shown = frozenset({"--mail-tpye", "--exlusives", "--nodlist", "--lable"})
    monkeypatch.setattr(options, "shown_by", lambda program: shown)
    assert [*SlurmLauncher.check(settings, {})] == []


def test_an_option_that_only_a_plugin_can_have_is_noted():
    node = {"sbatch": ["--image=a.sif", "--hold --exclus"], "srun_args": ["--gpu_cmode=shared"]}
    rest = "from a plugin, as it is no option of Slurm 22.05 to 26.05"
    assert [*SlurmLauncher.notes(node)] == [
        f"launcher.sbatch: sbatch must know --image {rest}",
        f"launcher.srun_args: srun must know --gpu_cmode {rest}",
    ]
    assert [*SlurmLauncher.notes({"sbatch": None, "srun_args": ["--label"]})] == []
    assert [*SlurmLauncher.notes({"sbatch": ["${oc.env:OPTION}"]})] == []


SAID = {
    "error: Batch job submission failed: Invalid account or account/partition combination specified"
    "": "launcher.account",
    "error: invalid partition specified: x\nsbatch: error: ...": "launcher.partition",
    "partition         : low\nsbatch: error: Requested node configuration is not available"
    "": "trainer.num_nodes",
    "error: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    "": "launcher.qos",
    "error: Requested time limit is invalid (missing or exceeds some limit)": "launcher.walltime",
    "error: Requested partition configuration not available now": "launcher.partition",
    "error: Memory specification can not be satisfied": "launcher.mem",
    "unrecognized option '--partitions=x'": "launcher.sbatch",
    "error: it is Friday": "launcher",
}


@pytest.mark.parametrize("said", SAID)
def test_the_key_that_sbatch_refuses(said):
    (problem,) = commands.refusal(f"sbatch: {said}\n").problems
    assert problem.path == SAID[said]


def test_a_job_inherits_the_users_defaults_that_no_setting_replaces(monkeypatch):
    """What it does not inherit: tests/cluster/test_slurm.py."""
    kept = {"SLURM_CONF": "/slurm.conf", "SBATCH_ACCOUNT": "mine", "HF_TOKEN": "secret"}
    for name, value in {**kept, "SBATCH_PARTITION": "debug", "OTHER_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    env = commands.environment(["HF_TOKEN"], SlurmLauncher(partition="gpu"))
    assert kept.items() <= env.items()
    assert not {"SBATCH_PARTITION", "OTHER_TOKEN"} & set(env)


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    launcher = SlurmLauncher()
    request = launcher.request(spec(root=str(tmp_path)))
    job = launcher.attach("slurm://12_3")
    assert (job.handle, job.state()) == ("slurm://12_3", JobState.UNKNOWN)
    assert job.why == "scontrol is not installed on this machine"
    for act in (lambda: launcher.reach(request), lambda: launcher.submit(request)):
        with pytest.raises(UserError, match=r"on this machine\s+start it on a login node") as error:
            act()
        assert error.value.problems[0].path == "launcher"
    for act in (lambda: list(job.logs()), job.cancel):
        with pytest.raises(UserError, match="on this machine"):
            act()


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
    assert "has forgotten it" in many[5].why
    assert many[0].why == ""


SRUN_LINES = {
    "50%\rsrun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Killed": (1, -9, "n2"),
    "srun: error: n1: tasks 4-5,7: Segmentation fault (core dumped)": (4, -11, "n1"),
    "srun: error: n1: task 0: Exited with exit code 3": (0, 3, "n1"),
    "srun: error: n1: task 0: Out Of Memory\nsrun: error: n2: task 1: Killed": None,
    "task 1: Killed\nsrun: Force Terminated StepId=1.0": None,
}


def test_the_rank_that_ended_first(tmp_path):
    """srun's lines in a log that an earlier start of the job has written to as well."""
    job = SlurmLauncher().attach("slurm://7")
    for lines, first in SRUN_LINES.items():
        text = (
            "slurm job 7, start 1, on n[1-2]\nsrun: error: n9: task 9: Killed\n"
            f"slurm job 7, start 2, on n[1-2]\n{lines}\n"
        )
        (tmp_path / "slurm-7.log").write_text(text)
        job.failed = False  # as far as is known
        assert job.first_end(tmp_path) is None
        job.failed = True
        assert job.first_end(tmp_path) == first, lines

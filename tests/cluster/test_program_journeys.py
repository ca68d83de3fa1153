"""Programs of each framework, by each launcher that can run here: on two ranks, two hosts with sshd
and mpirun, and two nodes of a real Slurm. Each is asked to end once, killed with -9 once, and
continues where it was. `make programs` makes the virtual environments of the frameworks.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from omegaconf import OmegaConf

from distdl.config import recipe
from tests import hostile_words
from tests.cli.test_programs import PAGE
from tests.cluster.hosts import Hosts, why_not
from tests.cluster.test_slurm import handle_of, on_cluster, slurm  # noqa: F401 - fixtures
from tests.conftest import environment, matrix_only, python_of, status
from tests.waiting import until

pytestmark = [matrix_only, pytest.mark.timeout(900), pytest.mark.xdist_group("programs")]
PROGRAMS = Path(__file__).parent / "programs"
STEPS = 100_000  # more than a test waits for


class Kind(NamedTuple):
    """A program: its file, the environment below .servers/ ("": this one), and its framework."""

    file: str
    environment: str = ""
    framework: str = ""


KINDS = {
    "torchrun": Kind("ddp.py"),
    "tensorflow": Kind("counting_tensorflow.py", "tensorflow", "tensorflow"),
    "jax": Kind("counting_jax.py", "jax", "jax"),
    "mpi4py": Kind("counting_mpi.py", "mpi", "mpi"),
    "hugging face": Kind("hf_trainer.py", "transformers"),
    "shell": Kind("counting.sh"),
    "compiled": Kind("counting"),
}
ROOT_MAY = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
COMMON = ("name=a", "tracking=none", "trainer.accelerator=cpu")
SECONDS = 240


@pytest.fixture
def project(tmp_path):
    for path in PROGRAMS.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "ddp.py").write_text(PAGE["ddp.py"])
    return tmp_path


def command(kind, project, steps=STEPS):
    """The words of a program, with the Python of its framework."""
    file = f"./{kind.file}"
    if kind.file == "counting":
        subprocess.run(["cc", "-o", "counting", "counting.c"], cwd=project, check=True)
    if not kind.environment:
        return [kind.file if file.endswith(".py") else file, str(steps)]
    return [python_of(kind.environment), kind.file, str(steps)]


def settings(kind):
    return [f"program.framework={kind.framework}"] if kind.framework else []


def logs_of(attempt):
    return "".join(path.read_text() for path in sorted((attempt / "logs").glob("rank_*.log")))


def begun(attempt, count=2):
    """From which step each rank of an attempt has begun, the last start of each; none before."""
    paths = [attempt / f"logs/rank_{rank}.log" for rank in range(count)]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    found = [re.findall(r"from step (\d+)", text) for text in texts]
    return [int(each[-1]) for each in found] if all(found) else []


def saved(run):
    """Whether it has saved, and a little more."""
    return any((run / "checkpoints").glob("**/*"))


def rank_1(run):
    """The program of rank 1 of a run, among all processes of this machine."""
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            rank = variables.get("DISTDL_RANK_PROCESS", "").partition(":")[0]
            mine = variables.get("DISTDL_RUN") == f"default/{run.name}" and variables["RANK"] == "1"
            here = Path(process.cwd()).is_relative_to(run.parents[2])
            if mine and here and rank == str(process.ppid()):
                return process
        except (psutil.Error, OSError, KeyError):
            continue
    return None


def kill_rank_1(run):
    until(lambda: rank_1(run), 20).kill()


def check_killed(run, attempt):
    report = json.loads((attempt / "incident.json").read_text())
    assert (report["rank"], report["cause"]) == (1, "killed"), report
    assert status(run, int(attempt.name))["exit_code"] == 137


def journey(run, start, resume, ask):
    """Asked to end, resumed, killed, resumed and asked again; each time from where it was.

    Args:
        start, resume: Start the command, and return something with `until` and `wait`.
        ask: Asks a command to end, as its platform would.
    """
    attempts = [run / f"attempts/{number:03d}" for number in (1, 2, 3)]
    first = start()
    first.until(lambda: begun(attempts[0]) and saved(run), SECONDS)
    assert begun(attempts[0]) == [0, 0]
    ask(first)
    assert first.wait(SECONDS) == 75, first.output()
    assert status(run)["state"] == "PREEMPTED", first.output()

    second = resume()
    second.until(lambda: begun(attempts[1]), SECONDS)
    before = begun(attempts[1])
    assert min(before) > 0, logs_of(attempts[1])
    kill_rank_1(run)
    assert second.wait(SECONDS) == 137, second.output()
    check_killed(run, attempts[1])

    third = resume()
    third.until(lambda: begun(attempts[2]), SECONDS)
    assert min(begun(attempts[2])) >= min(before)
    ask(third)
    assert third.wait(SECONDS) == 75, third.output()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "mpi4py"])
def test_on_two_ranks_of_this_machine(name, project, background):
    kind = KINDS[name]
    run = project / "outputs/default/a"
    words = ("run", *COMMON, *settings(kind), "trainer.devices=2", "--", *command(kind, project))
    journey(
        run,
        lambda: background(*words, cwd=project),
        lambda: background("resume", str(run), cwd=project),
        lambda each: each.process.terminate(),
    )


class OnHost:
    """A command on a host, with the methods of `Background`."""

    def __init__(self, hosts, project, words):
        self.log = project.parent / f"{project.name}-{len(list(project.parent.iterdir()))}.log"
        line = [sys.executable, "-m", "distdl", *words]
        pipes = {"stdout": self.log.open("w"), "stderr": subprocess.STDOUT}
        env = environment(**ROOT_MAY)
        self.process = hosts.popen("node1", line, cwd=project, env=env, **pipes)

    def output(self):
        return self.log.read_text()

    def until(self, condition, seconds):
        def held():
            assert self.process.poll() is None, self.output()
            return condition()

        until(held, seconds, self.output)

    def wait(self, seconds):
        return self.process.wait(seconds)


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with Hosts("node1", "node2") as both:
        yield both


def by_mpirun(hosts):
    """What starts one rank on each of two network hosts."""
    return (
        "launcher=mpi",
        "launcher.mpirun=mpirun.openmpi",
        "launcher.hosts=[node1,node2]",
        f"launcher.ssh={hosts.ssh}",
        "trainer.num_nodes=2",
        "trainer.devices=1",
    )


@pytest.mark.parametrize("name", KINDS)
def test_on_two_hosts_by_mpirun(name, project, hosts):
    kind = KINDS[name]
    run = project / "outputs/default/a"
    where = by_mpirun(hosts)
    words = ("run", *COMMON, *settings(kind), *where, "--", *command(kind, project))
    reached = where[1:2] + where[3:4]
    journey(
        run,
        lambda: OnHost(hosts, project, words),
        lambda: OnHost(hosts, project, ("resume", str(run), *reached)),
        lambda each: each.process.terminate(),
    )


def by_mpich(words, project):
    """Debian's Open MPI does not speak with Debian's Slurm. mpi4py looks for MPICH by the name that
    MPICH itself gives its library."""
    found = [*Path("/usr/lib").glob("*/libmpich.so.12")]
    if not found:
        pytest.skip("no MPICH: make servers")
    folder = project.parent / f"{project.name}-mpich"
    folder.mkdir()
    (folder / "libmpi.so.12").symlink_to(found[0])
    script = 'LD_LIBRARY_PATH="$0" MPI4PY_MPIABI=mpich exec "$@"'
    return ["sh", "-c", script, str(folder), *words]


@pytest.mark.parametrize("name", KINDS)
def test_on_two_nodes_of_slurm(name, project, slurm, on_cluster, monkeypatch):  # noqa: F811
    """Requeued by hand, killed, resumed and cancelled."""
    kind = KINDS[name]
    monkeypatch.chdir(project)
    for variable, value in ROOT_MAY.items():
        monkeypatch.setenv(variable, value)
    run = project / "outputs/default/a"
    where = (
        "launcher=slurm",
        "trainer.num_nodes=2",
        "trainer.devices=1",
        "launcher.poll_seconds=0.5",
        "follow=false",
    )
    program = command(kind, project)
    pmi = []
    if kind.framework == "mpi":
        pmi = ['launcher.srun_args=["--mpi=pmi2"]']  # a run's own files cannot ask for it
        program = by_mpich(program, project)
    on_cluster("run", *COMMON, *settings(kind), *where, *pmi, "--", *program)
    first = run / "attempts/001"

    def reached(attempt, condition):
        until(condition, SECONDS, lambda: logs_of(attempt) + slurm.logs())

    reached(first, lambda: begun(first) and saved(run))
    job = handle_of(run)
    slurm.run("scontrol", "requeue", job)
    slurm.start_again(job, "now+2")
    reached(first, lambda: min(begun(first)) > 0)
    assert status(run)["restarts"] == 1
    before = begun(first)
    kill_rank_1(run)
    on_cluster("jobs", "wait", str(run), code=137)
    on_cluster("jobs", "status", str(run))
    check_killed(run, first)

    second = run / "attempts/002"
    on_cluster("resume", str(run), "follow=false", *pmi)
    reached(second, lambda: begun(second))
    assert min(begun(second)) >= min(before)
    on_cluster("jobs", "cancel", str(run))
    on_cluster("jobs", "wait", str(run), code=130)
    assert status(run, 2)["state"] == "CANCELLED"


WORDS = hostile_words.words()
# A setting is refused if it looks like an interpolation, or like a value that is missing.
TAKEN = [word for word in WORDS if "${" not in word and word != "???"]
VALUES = {f"HOSTILE_{number}": word for number, word in enumerate(TAKEN)}


def given(project):
    """The overrides and the command of a program that writes down 200 words and 200 values."""
    env = recipe.to_yaml(OmegaConf.create({"launcher": {"env": VALUES}}))
    (project / "conf/experiment").mkdir(parents=True)
    (project / "conf/experiment/values.yaml").write_text(f"# @package _global_\n{env}")
    return "words.py", *WORDS


def check_given(run, values=True):
    for rank in (0, 1):
        written = json.loads((run / f"checkpoints/words-{rank}.json").read_text())
        assert written["words"] == WORDS
        assert not values or written["values"] == VALUES


def test_hostile_words_on_two_hosts_by_mpirun(project, hosts):
    words = given(project)
    where = by_mpirun(hosts)
    done = OnHost(hosts, project, ("run", *COMMON, *where, "+experiment=values", "--", *words))
    assert done.wait(SECONDS) == 0, done.output()
    check_given(project / "outputs/values/a")


def test_hostile_words_on_two_nodes_of_slurm(project, slurm, on_cluster, monkeypatch):  # noqa: F811
    monkeypatch.chdir(project)
    words = given(project)
    where = (
        "launcher=slurm",
        "trainer.num_nodes=2",
        "trainer.devices=1",
        "launcher.poll_seconds=0.5",
    )
    on_cluster("run", *COMMON, *where, "+experiment=values", "--", *words)
    check_given(project / "outputs/values/a")


def test_hostile_words_on_this_machine(project, background):
    words = given(project)
    done = background("run", *COMMON, "trainer.devices=2", "--", *words, cwd=project)
    assert done.wait(SECONDS) == 0, done.output()
    check_given(project / "outputs/default/a", values=False)

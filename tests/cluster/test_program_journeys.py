"""Programs on two ranks of this machine, and on two hosts by mpirun: each is asked to end, killed
with -9, asked again, and continues where it was. `make programs` makes the environments of the
frameworks.
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

from tests import hostile_words
from tests.cli.test_programs import PAGE
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import ROOT, environment, matrix_only, status
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
    "jax": Kind("counting_jax.py", "jax", "jax"),
    "shell": Kind("counting.sh"),
    "compiled": Kind("counting"),
}
BY_MPIRUN = ("shell", "compiled")
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
    python = ROOT / ".servers" / kind.environment / "bin/python"
    if not python.exists():
        pytest.skip("make programs")
    return [str(python), kind.file, str(steps)]


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


@pytest.mark.parametrize("name", KINDS)
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


@pytest.mark.parametrize("name", BY_MPIRUN)
def test_on_two_hosts_by_mpirun(name, project, hosts):
    kind = KINDS[name]
    run = project / "outputs/default/a"
    where = (
        "launcher=mpi",
        "launcher.mpirun=mpirun.openmpi",
        "launcher.hosts=[node1,node2]",
        f"launcher.ssh={hosts.ssh}",
        "trainer.num_nodes=2",
        "trainer.devices=1",
    )
    words = ("run", *COMMON, *settings(kind), *where, "--", *command(kind, project))
    reached = where[1:2] + where[3:4]
    journey(
        run,
        lambda: OnHost(hosts, project, words),
        lambda: OnHost(hosts, project, ("resume", str(run), *reached)),
        lambda each: each.process.terminate(),
    )


WORDS = hostile_words.words()


def test_hostile_words_arrive_as_typed(project, background):
    words = ("name=a", "tracking=none", "trainer.accelerator=cpu", "trainer.devices=2")
    done = background("run", *words, "--", "words.py", *WORDS, cwd=project)
    assert done.wait(SECONDS) == 0, done.output()
    for rank in (0, 1):
        written = project / f"outputs/default/a/checkpoints/words-{rank}.json"
        assert json.loads(written.read_text())["words"] == WORDS

"""launcher=mpi for real: apt's Open MPI and MPICH, two hosts with sshd (tests/cluster/hosts.py).

Whole trainings go by the command line. How a job ends when a rank or a host is lost is tried on
every MPI with a worker that does nothing but wait, since torch takes most of a real run's time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.conftest import DISTDL, ROOT, TINY, UNCHECKED, distdl, environment, losses, status

MPIRUN = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
MISSING = [name for name in MPIRUN.values() if shutil.which(name) is None]
pytestmark = [
    pytest.mark.xdist_group("mpi"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(bool(MISSING), reason="apt-get install openmpi-bin mpich"),
]
SECRET = "canary-5e3f0b"
SEEN = hashlib.sha256(SECRET.encode()).hexdigest()

# The user's own project: what every rank was given, and a bad end for the second one.
MODEL = """
import hashlib, os, signal
from distdl.models import ImageClassifier
class Mine(ImageClassifier):
    def on_fit_start(self):
        print("saw", hashlib.sha256(os.environ["CANARY"].encode()).hexdigest(), flush=True)
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1 and os.environ.get("END") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)
"""
RECIPE = (
    *TINY,
    "model._target_=mine.Mine",
    "trainer.max_epochs=1",
    "data.train_samples=48",
    "data.val_samples=16",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts("node1", "node2") as both:
        yield both


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(MODEL)
    (folder / ".gitignore").write_text("outputs\n")  # each run in a folder of its own below it
    return folder


@pytest.fixture(scope="module")
def here(project: Path) -> Path:
    """The same training as two processes of this machine."""
    where = ("trainer.devices=2", "name=one", "output_dir=outputs/here")
    done = distdl(*RECIPE, *where, cwd=project, env={"CANARY": SECRET}, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "outputs/here/default/one"


def submit(
    hosts: Hosts, project: Path, mpi: str, folder: str, *more: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """A run of the project on two hosts, from the first one's command line, to its end.

    It is validated for real where it is to succeed.
    """
    where = [
        "launcher=mpi",
        f"launcher.mpirun={MPIRUN[mpi]}",
        "launcher.hosts=[node1,node2]",
        "trainer.num_nodes=2",
        "trainer.devices=1",
        f"launcher.ssh={hosts.ssh}",
        f"launcher.forward_env=[{','.join(['CANARY', *env])}]",
    ]
    command = [
        sys.executable,
        *(UNCHECKED if env else DISTDL),
        *RECIPE,
        *where,
        "name=one",
        *more,
        f"output_dir=outputs/{folder}",
    ]
    variables = environment(CANARY=SECRET, **env)
    return hosts.run("node1", command, cwd=project, env=variables, timeout=240)


def holding(folder: Path, text: str) -> list[Path]:
    """Files below a folder that contain a text."""
    return [f for f in folder.rglob("*") if f.is_file() and text.encode() in f.read_bytes()]


def test_open_mpi_trains_as_one_machine_does(hosts: Hosts, project: Path, here: Path) -> None:
    done = submit(hosts, project, "openmpi", "openmpi")
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "outputs/openmpi/default/one"
    assert (run / "config.yaml").read_bytes() == (here / "config.yaml").read_bytes()
    assert losses(run) == losses(here) and len(losses(run)) == 3
    assert status(run)["state"] == "SUCCEEDED"
    for place in ("0     0     0      node1", "1     1     0      node2"):  # the table of ranks
        assert place in done.stdout
    assert done.stdout.count(f"saw {SEEN}") == 2
    assert holding(project, SEEN) and not holding(project, SECRET)
    # From a later shell, on the same machine.
    words = [sys.executable, "-m", "distdl", "jobs", "status", str(run)]
    later = hosts.run("node1", words, cwd=project, env=environment())
    assert later.returncode == 0 and "SUCCEEDED" in later.stdout, later.stdout + later.stderr
    assert "mpi://node1/" in later.stdout


def test_mpich_trains_on_hosts_that_share_nothing(hosts: Hosts, project: Path, here: Path) -> None:
    outputs = project / "outputs/mpich"
    hosts.hide("node2", project)
    try:
        done = submit(hosts, project, "mpich", "mpich", "launcher.copy_bundle=true")
        there = hosts.run("node2", ["find", str(outputs), "-type", "f"]).stdout
    finally:
        hosts.unmount("node2", project)
    assert done.returncode == 0, done.stdout + done.stderr
    run = outputs / "default/one"
    assert losses(run) == losses(here)
    assert (run / "config.yaml").read_bytes() == (here / "config.yaml").read_bytes()
    assert done.stdout.count(f"saw {SEEN}") == 2 and not holding(project, SECRET)
    assert "attempts/001/bundle/code/project/mine.py" in there
    assert "attempts/001/logs/rank_1.log" in there and "rank_0.log" not in there


def test_a_killed_rank_ends_the_run_and_is_named(hosts: Hosts, project: Path) -> None:
    done = submit(hosts, project, "openmpi", "kill", END="kill")
    assert done.returncode == 137, done.stdout + done.stderr
    assert "rank 1 failed first: killed by SIGKILL on node2" in done.stderr
    told = status(project / "outputs/kill/default/one")
    assert (told["state"], told["exit_code"]) == ("FAILED", 137)
    assert told["error"].startswith("rank 1: ")


# ---- how a job ends, with a worker that only waits ---------------------------------------------

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Open MPI 4 sends it to the survivors of a failure
names = ("MASTER_ADDR", "MASTER_PORT", "DISTDL_LAUNCHER", "LAST")
print("born", rank, *(os.environ.get(n, "lacks") for n in names), flush=True)
assert os.environ["CANARY"] == os.environ["CANARY"].strip() != ""
end, since = os.environ["END"], time.monotonic()
while time.monotonic() - since < 120:
    if asked:
        time.sleep(1.5)  # a checkpoint
        print("saved", rank, flush=True)
        sys.exit(0)
    if rank == 2 and end in ("exit", "kill") and Path(sys.argv[2], "go").exists():
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        errors = Path(sys.argv[2], "attempts/001/errors")
        errors.mkdir(exist_ok=True)
        said = {"time": time.time(), "rank": 2, "type": "Oops", "message": "no", "exit_code": 7}
        (errors / "rank_2.json").write_text(json.dumps(said))
        os._exit(7)
    time.sleep(0.05)
"""
# On node1: submits, and says so; then it does what it is told.
DRIVER = """
import json, sys
from distdl.job import JobSpec, Resources
from distdl.launchers.mpi import MpiLauncher
node, store, end = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
spec = JobSpec("x", f"{store}/attempts/001/bundle", store, 1, Resources(2, 2),
               {"END": end, "LAST": "set"}, ("CANARY",))
launcher = MpiLauncher(**node)
job = launcher.submit(launcher.request(spec))
print(job.handle, flush=True)
sys.stdin.readline()
if end == "cancel":
    MpiLauncher().attach(job.handle).cancel()
print(job.wait(), flush=True)
"""


class Waiting:
    """A job of four ranks on two hosts; whatever becomes of it, it ends with the block."""

    def __init__(self, hosts: Hosts, folder: Path, mpi: str, end: str) -> None:
        self.hosts, self.store = hosts, folder / f"{mpi}-{end}"
        self.attempt = self.store / "attempts/001"
        code = self.attempt / "bundle/code/distdl"
        shutil.copytree(ROOT / "launchers/mpi", code / "launchers/mpi")
        if end == "cut":  # the same in less time than 20 + 3 x 5 + 15 seconds
            rank = code / "launchers/mpi/rank.py"
            text = rank.read_text().replace('"TCP_KEEPIDLE": 20', '"TCP_KEEPIDLE": 2')
            rank.write_text(text.replace("END_SECONDS = 15.0", "END_SECONDS = 1.0"))
        (code / "worker.py").write_text(WORKER)
        (self.attempt / "bundle/config.yaml").touch()
        node = {
            "mpirun": MPIRUN[mpi],
            "hosts": ["node1", "node2"],
            "ssh": hosts.ssh,
            "python": "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable,
        }
        self.driver = hosts.popen(
            "node1",
            [sys.executable, "-c", DRIVER, json.dumps(node), str(self.store), end],
            cwd=folder,
            env=environment(CANARY=SECRET, PYTHONPATH=str(ROOT / "src")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.driver.stdout is not None
        self.handle = self.driver.stdout.readline().strip()
        until(lambda: self.log().count("born") == 4, self.log)

    def log(self) -> str:
        file = self.attempt / "logs/mpirun.log"
        return file.read_text() if file.exists() else ""

    def ended(self) -> tuple[str, float]:
        """The job's state, and the seconds that it took to get there from now."""
        began = time.monotonic()
        return self.driver.communicate("go\n", timeout=240)[0].strip(), time.monotonic() - began

    def errors(self) -> dict[str, Any]:
        files = (self.attempt / "errors").glob("*.json")
        return {f.stem: json.loads(f.read_text()) for f in files}

    def ranks(self, host: str) -> list[str]:
        """Command lines of what is left of this job on a host."""
        found = []
        for pid in self.hosts.pids(host):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            except OSError:
                continue
            found += [line] if str(self.store) in line else []
        return found

    def gone(self) -> bool:
        """Whether nothing of this job is left; the supervisor ends just after its last record."""
        return not any(self.ranks(host) for host in self.hosts.names)


def until(condition: Any, what: Any, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.fixture(params=MPIRUN)
def mpi(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_failed_rank_ends_the_others(hosts: Hosts, tmp_path: Path, mpi: str, end: str) -> None:
    job = Waiting(hosts, tmp_path, mpi, end)
    lines = [line for host in hosts.names for line in job.ranks(host)]
    assert lines and not any(SECRET in line for line in lines)  # on no command line
    assert job.log().count(" mpi set") == 4 and "lacks" not in job.log()  # with all variables
    (job.store / "go").touch()
    assert job.ended()[0] == "FAILED"
    errors = job.errors()
    assert "rank_2" in errors, (errors, job.log())
    said = errors["rank_2"]
    assert said["exit_code"] == (7 if end == "exit" else 137)
    assert end == "exit" or "killed by SIGKILL on node2" in said["message"]
    record = json.loads((job.attempt / "mpirun.json").read_text())
    assert record["exit_code"] == said["exit_code"]  # also of mpirun itself
    until(job.gone, job.log)


def test_cancel_leaves_time_for_a_checkpoint(hosts: Hosts, tmp_path: Path, mpi: str) -> None:
    job = Waiting(hosts, tmp_path, mpi, "cancel")
    state, seconds = job.ended()
    assert state == "CANCELLED" and seconds > 1
    assert job.log().count("saved") == 4 and not job.errors()
    until(job.gone, job.log)


def test_a_host_that_vanishes_ends_the_job(hosts: Hosts, tmp_path: Path) -> None:
    """On both at once: what takes time is to notice. The host itself lives on, and ends its ranks:
    hydra's proxy there waits for a connection that says nothing, as long as TCP does."""
    jobs = [Waiting(hosts, tmp_path, mpi, "cut") for mpi in MPIRUN]
    hosts.cut("node2")
    try:
        for job in jobs:
            assert job.ended()[0] == "FAILED"
            said = job.errors()["rank_2"]  # the first one there
            assert said["type"] == "HostLost" and "node2 does not answer" in said["message"]
            until(lambda job=job: not job.ranks("node1"), job.log)
            until(lambda job=job: not job.ranks("node2"), job.log, seconds=45)
    finally:
        hosts.mend("node2")


def test_a_host_that_cannot_take_part_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/config.yaml").touch()
    program = (
        "import sys; from distdl.launchers.mpi.hosts import Reach\n"
        f"reach = Reach({hosts.ssh!r}, {str(tmp_path / 'bundle')!r}, sys.argv[1], False)\n"
        "print(*[reach.problem(host) for host in sys.argv[2:]], sep='\\n')"
    )

    def asked(python: str, *names: str) -> str:
        words = [sys.executable, "-c", program, python, *names]
        return hosts.run("node1", words, env=environment(PYTHONPATH=str(ROOT / "src"))).stdout

    assert asked("sh", "node2").strip() == "None"
    assert "node3 cannot be reached" in asked("sh", "node3")
    assert "node2 has no /absent" in asked("/absent", "node2")
    hosts.hide("node2", tmp_path)
    try:
        assert "the hosts share no file system there" in asked("sh", "node2")
    finally:
        hosts.unmount("node2", tmp_path)

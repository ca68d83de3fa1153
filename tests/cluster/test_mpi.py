"""launcher=mpi for real: apt's Open MPI and MPICH, two hosts with sshd (tests/cluster/hosts.py).

Trainings go by the command line. How a job ends when a rank or a host is lost is tried on every MPI
with a worker that does nothing but wait, since torch takes most of a real run's time.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.conftest import DISTDL, ROOT, TINY, UNCHECKED, distdl, environment, losses, status
from tests.waiting import until

MPIRUN = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
MISSING = [name for name in MPIRUN.values() if shutil.which(name) is None]
pytestmark = [
    pytest.mark.xdist_group("mpi"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(bool(MISSING), reason="apt-get install openmpi-bin mpich"),
]
SECRET = "canary-5e3f0b"
SEEN = hashlib.sha256(SECRET.encode()).hexdigest()
# The user's own project: every rank shows that it got the secret.
MODEL = """
import hashlib, os
from distdl.models import ImageClassifier
class Mine(ImageClassifier):
    def on_fit_start(self):
        print("saw", hashlib.sha256(os.environ["CANARY"].encode()).hexdigest(), flush=True)
"""
RECIPE = (*TINY, "model._target_=mine.Mine", "trainer.max_epochs=1", "name=one")
RECIPE += ("data.train_samples=48", "data.val_samples=16")


@pytest.fixture(scope="module")
def hosts():
    with Hosts("node1", "node2") as both:
        yield both


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(MODEL)
    (folder / ".gitignore").write_text("outputs\n")  # each run in a folder of its own below it
    return folder


@pytest.fixture(scope="module")
def reference(project):
    """The same training as two processes of this machine."""
    where = ("trainer.devices=2", "output_dir=outputs/here")
    done = distdl(*RECIPE, *where, cwd=project, env={"CANARY": SECRET}, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "outputs/here/default/one"


def submit(hosts, project, mpi, output, *more):
    """A run of the project on two hosts, from the first one's command line, to its end."""
    where = ("launcher=mpi", f"launcher.mpirun={MPIRUN[mpi]}", "launcher.hosts=[node1,node2]")
    where += ("trainer.num_nodes=2", "trainer.devices=1", f"launcher.ssh={hosts.ssh}")
    where += ("launcher.forward_env=[CANARY]", f"output_dir={output}")
    command = [sys.executable, *DISTDL, *RECIPE, *where, *more]
    return hosts.run("node1", command, project, environment(CANARY=SECRET), timeout=240)


def check_equal(done, run, reference):
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "config.yaml").read_bytes() == (reference / "config.yaml").read_bytes()
    assert losses(run) == losses(reference) and len(losses(run)) == 3
    assert done.stdout.count(f"saw {SEEN}") == 2
    files = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert any(SEEN.encode() in text for text in files)
    assert not any(SECRET.encode() in text for text in files)


def test_open_mpi_trains_as_one_machine_does(hosts, project, reference):
    done = submit(hosts, project, "openmpi", "outputs/openmpi")
    run = project / "outputs/openmpi/default/one"
    check_equal(done, run, reference)
    assert status(run)["state"] == "SUCCEEDED"
    for row in ("0     0     0      node1", "1     1     0      node2"):  # the table of ranks
        assert row in done.stdout
    words = [sys.executable, "-m", "distdl", "jobs", "status", str(run)]  # from a later shell
    later = hosts.run("node1", words, cwd=project, env=environment())
    assert later.returncode == 0 and "SUCCEEDED" in later.stdout, later.stdout + later.stderr
    assert "mpi://node1/" in later.stdout


def test_mpich_trains_on_hosts_that_share_nothing(hosts, project, reference):
    hosts.hide("node2", project)
    try:
        done = submit(hosts, project, "mpich", "outputs/mpich", "launcher.copy_bundle=true")
        files = hosts.run("node2", ["find", str(project / "outputs/mpich"), "-type", "f"]).stdout
    finally:
        hosts.unmount("node2", project)
    check_equal(done, project / "outputs/mpich/default/one", reference)
    assert "attempts/001/bundle/code/project/mine.py" in files
    assert "attempts/001/logs/rank_1.log" in files and "rank_0.log" not in files


# How a job ends, with a worker that only waits

# Each rank must have them byte for byte.
VALUES = {"NEWLINES": "a\n\n\n\nb\n", "UNICODE": "Grüße 日本\u2028\x85 🎉", "EMPTY": ""}
VALUES |= {"SHELL": "$(exit 3) `exit 4` \"'\\ \\n %s %% $HOME ~ * @env@ a,b;c"}
WORKER = (
    f"VALUES = {VALUES!a}"
    + """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Open MPI 4 sends it to the survivors of a failure
names = ("MASTER_ADDR", "MASTER_PORT", "DISTDL_LAUNCHER", "LAST")
print("born", rank, *(os.environ.get(n, "lacks") for n in names), flush=True)
assert os.environ["CANARY"] == os.environ["CANARY"].strip() != ""
assert {name: os.environ[name] for name in VALUES} == VALUES
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
        error = {"time": time.time(), "rank": 2, "type": "Oops", "message": "no", "exit_code": 7}
        (errors / "rank_2.json").write_text(json.dumps(error))
        os._exit(7)
    time.sleep(0.05)
"""
)
# On node1: submits, and prints the handle; after a line of input it cancels or only waits.
DRIVER = (
    f"VALUES = {VALUES!a}"
    + """
import json, sys
from distdl.job import JobSpec, Resources
from distdl.launchers.mpi import MpiLauncher
node, store, end = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
spec = JobSpec("x", f"{store}/attempts/001/bundle", store, 1, Resources(2, 2),
               {"END": end, **VALUES, "LAST": "set"}, ("CANARY",))
launcher = MpiLauncher(**node)
job = launcher.submit(launcher.request(spec))
print(job.handle, flush=True)
sys.stdin.readline()
if end == "cancel":
    MpiLauncher().attach(job.handle).cancel()
print(job.wait(), flush=True)
"""
)
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable


class Waiting:
    """A job of four ranks on two hosts that wait for how they are to end."""

    def __init__(self, hosts, folder, mpi, end):
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
        node = {"mpirun": MPIRUN[mpi], "hosts": hosts.names, "ssh": hosts.ssh, "python": PYTHON}
        command = [sys.executable, "-c", DRIVER, json.dumps(node), str(self.store), end]
        env = environment(CANARY=SECRET, PYTHONPATH=str(ROOT / "src"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.driver = hosts.popen("node1", command, cwd=folder, env=env, **pipes)
        self.handle = self.driver.stdout.readline().strip()
        until(lambda: self.log().count("born") == 4, 240, self.log)

    def log(self):
        file = self.attempt / "logs/mpirun.log"
        return file.read_text() if file.exists() else ""

    def end(self):
        """Lets it end, and returns its state."""
        (self.store / "go").touch()
        return self.driver.communicate("go\n", timeout=240)[0].strip()

    def error(self):
        """Of the first rank on node2."""
        return json.loads((self.attempt / "errors/rank_2.json").read_text())

    def processes(self, *names):
        """Command lines of what is left of this job on hosts."""
        lines = []
        for pid in (pid for name in names or self.hosts.names for pid in self.hosts.pids(name)):
            file = Path(f"/proc/{pid}/cmdline")
            lines += [file.read_bytes().decode().replace("\0", " ")] if file.exists() else []
        return [line for line in lines if str(self.store) in line]

    def until_gone(self, *names, seconds=240):
        until(lambda: not self.processes(*names), seconds, self.log)


@pytest.mark.parametrize("mpi", MPIRUN)
@pytest.mark.parametrize("end, code", [("exit", 7), ("kill", 137)])
def test_a_failed_rank_ends_the_others(hosts, tmp_path, mpi, end, code):
    job = Waiting(hosts, tmp_path, mpi, end)
    lines = job.processes()
    assert lines and not any(SECRET in line for line in lines)  # on no command line
    assert job.log().count(" mpi set") == 4 and "lacks" not in job.log()  # with all variables
    assert job.end() == "FAILED"
    error, record = job.error(), json.loads((job.attempt / "mpirun.json").read_text())
    assert error["exit_code"] == record["exit_code"] == code  # also of mpirun itself
    assert end == "exit" or "killed by SIGKILL on node2" in error["message"]
    job.until_gone()


@pytest.mark.parametrize("mpi", MPIRUN)
def test_cancel_leaves_time_for_a_checkpoint(hosts, tmp_path, mpi):
    job, began = Waiting(hosts, tmp_path, mpi, "cancel"), time.monotonic()
    assert job.end() == "CANCELLED" and time.monotonic() - began > 1
    assert job.log().count("saved") == 4 and not list(job.attempt.glob("errors/*"))
    job.until_gone()


def test_a_host_that_vanishes_ends_the_job(hosts, tmp_path):
    """On both at once: what takes time is to notice. The host itself lives on, and ends its ranks:
    hydra's proxy there waits for a connection that says nothing, as long as TCP does."""
    jobs = [Waiting(hosts, tmp_path, mpi, "cut") for mpi in MPIRUN]
    hosts.cut("node2")
    try:
        for job in jobs:
            assert job.end() == "FAILED"
            assert job.error()["type"] == "HostLost"
            job.until_gone("node1")
            job.until_gone("node2", seconds=45)
    finally:
        hosts.mend("node2")

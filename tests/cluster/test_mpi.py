"""launcher=mpi for real: apt's Open MPI and MPICH, two hosts with sshd (tests/cluster/hosts.py).

Trainings go by the command line. How a job ends when a rank or a host is lost is tried with a
worker that does nothing but wait, since torch takes most of a real run's time.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from distdl.runs.directory import RunDirectory
from distdl.worker import main
from tests.cluster import witness
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import KERNELS, ROOT, TINY, UNCHECKED, distdl, environment, losses, matrix_only
from tests.miniature import everything
from tests.waiting import until

MPIRUN = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}
MISSING = [name for name in MPIRUN.values() if shutil.which(name) is None]
pytestmark = [
    pytest.mark.xdist_group("mpi"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(bool(MISSING), reason="apt-get install openmpi-bin mpich"),
]
SECRET = "canary-5e3f0b"
RECIPE = (
    *TINY,
    "+callbacks.witness._target_=witness.Witness",
    "trainer.max_epochs=1",
    "name=one",
    "data.train_samples=48",
    "data.val_samples=16",
)


@pytest.fixture(scope="module")
def hosts():
    with Hosts("node1", "node2") as both:
        yield both


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_two_hosts_train_as_one_machine_does(hosts, tmp_path, tmp_path_factory, capsys):
    """With Open MPI on a shared file system, with MPICH on hosts that share nothing."""
    shutil.copy(witness.__file__, tmp_path)
    (tmp_path / ".gitignore").write_text("outputs\n")  # each run in a folder of its own below it
    here = ("trainer.devices=2", "output_dir=outputs/here")
    done = distdl(*RECIPE, *here, cwd=tmp_path, env={"CANARY": SECRET}, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = tmp_path / "outputs/here/default/one"

    def on_node1(*words):
        command = [sys.executable, *UNCHECKED, *words]
        env = environment(CANARY=SECRET)
        done = hosts.run("node1", command, tmp_path, env, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def train(mpi, *more):
        where = (
            "launcher=mpi",
            f"launcher.mpirun={MPIRUN[mpi]}",
            "launcher.hosts=[node1,node2]",
            "trainer.num_nodes=2",
            "trainer.devices=1",
            f"launcher.ssh={hosts.ssh}",
            f"launcher.forward_env=[{','.join(['CANARY', *KERNELS])}]",
            f"output_dir=outputs/{mpi}",
            *more,
        )
        output = on_node1(*RECIPE, *where)
        run = tmp_path / f"outputs/{mpi}/default/one"
        assert (run / "config.yaml").read_bytes() == (reference / "config.yaml").read_bytes()
        assert losses(run) == losses(reference)
        assert len(losses(run)) == 3
        secrets = [rank["secret"] for rank in witness.seen(output).values()]
        assert secrets == [witness.digest(SECRET)] * 2
        files = everything(run).values()
        assert any(secrets[0].encode() in text for text in files)
        assert not any(SECRET.encode() in text for text in files)
        return run, output

    run, output = train("openmpi")
    for row in ("0     0     0      node1", "1     1     0      node2"):  # the table of ranks
        assert row in output
    shown = on_node1("jobs", "status", str(run))  # from a later shell
    assert "SUCCEEDED" in shown
    assert "mpi://node1/" in shown

    other = tmp_path_factory.mktemp("node2")  # what node2 has in the place of the folder
    hosts.bind("node2", other, tmp_path)
    try:
        run, _ = train("mpich", "launcher.copy_bundle=true")
        programs = (f"launcher.mpirun={MPIRUN['mpich']}", f"launcher.ssh={hosts.ssh}")
        output = on_node1("resume", str(run), "trainer.max_epochs=2", *programs)
    finally:
        hosts.unmount("node2", tmp_path)
    there = other / run.relative_to(tmp_path)
    assert (there / "attempts/001/bundle/code/project/witness.py").exists()
    assert [path.name for path in there.glob("attempts/001/logs/rank_*")] == ["rank_1.log"]
    assert "share no file system" in output
    assert sorted(losses(run)) == list(range(1, 7))
    (sent,) = there.glob("checkpoints/*.ckpt")  # to resume from: only rank 0 writes them
    assert sent.read_bytes() == (run / "checkpoints" / sent.name).read_bytes()

    RunDirectory(tmp_path / "taken").create("seed: 1\n", {})
    assert main.main([str(run / "attempts/001/bundle"), str(tmp_path / "taken")]) == 2
    assert "belongs to another run" in capsys.readouterr().err
    assert (tmp_path / "taken/config.yaml").read_text() == "seed: 1\n"


# How a job ends, with a worker that only waits

# Each rank must have them byte for byte.
VALUES = {
    "NEWLINES": "a\n\n\n\nb\n",
    "UNICODE": "Grüße 日本\u2028\x85 🎉",
    "EMPTY": "",
    "SHELL": "$(exit 3) `exit 4` \"'\\ \\n %s %% $HOME ~ * @env@ a,b;c",
}
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Open MPI 4 sends it to the survivors of a failure
values = json.loads(os.environ["VALUES"])
assert {name: os.environ[name] for name in values} == values
print("born", rank, os.uname().nodename, os.environ["MASTER_ADDR"], flush=True)
since = time.monotonic()
while time.monotonic() - since < 120:
    if asked:
        time.sleep(1.5)  # a checkpoint
        print("saved", rank, flush=True)
        sys.exit(0)
    if rank == 2 and Path(sys.argv[2], "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2 and Path(sys.argv[2], "exit").exists():
        os._exit(7)
    time.sleep(0.05)
"""
# On node1: submits, and prints the handle; after a line of input it cancels or only waits.
DRIVER = """
import json, sys
from distdl.job import JobSpec, Resources
from distdl.launchers.mpi import MpiLauncher
node, store, values = json.loads(sys.argv[1]), *sys.argv[2:]
env = {**json.loads(values), "VALUES": values}
spec = JobSpec("x", f"{store}/attempts/001/bundle", store, 1, Resources(2, 2), env, ("CANARY",))
launcher = MpiLauncher(**node)
job = launcher.submit(launcher.request(spec))
print(job.handle, flush=True)
if sys.stdin.readline().strip() == "cancel":
    MpiLauncher().attach(job.handle).cancel()
print(job.wait(), flush=True)
"""


class Waiting:
    """A job of four ranks on two hosts that wait for how they are to end."""

    def __init__(self, hosts, folder, mpi, impatient=False, names=()):
        self.hosts = hosts
        self.store = folder / mpi
        self.attempt = self.store / "attempts/001"
        code = self.attempt / "bundle/code/distdl"
        shutil.copytree(ROOT / "launchers/mpi", code / "launchers/mpi")
        if impatient:  # the same in less time than 20 + 3 x 5 + 15 seconds
            rank = code / "launchers/mpi/rank.py"
            text = rank.read_text().replace('"TCP_KEEPIDLE": 20', '"TCP_KEEPIDLE": 2')
            rank.write_text(text.replace("END_SECONDS = 15.0", "END_SECONDS = 1.0"))
        (code / "worker.py").write_text(WORKER)
        (self.attempt / "bundle/config.yaml").touch()
        node = {"mpirun": MPIRUN[mpi], "hosts": names or hosts.names, "ssh": hosts.ssh}
        node["python"] = sys.executable
        words = (json.dumps(node), str(self.store), json.dumps(VALUES))
        env = environment(CANARY=SECRET, PYTHONPATH=str(ROOT / "src"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.driver = hosts.popen("node1", [sys.executable, "-c", DRIVER, *words], env=env, **pipes)
        self.driver.stdout.readline()
        until(lambda: self.log().count("born") == 4, 240, self.log)

    def log(self):
        file = self.attempt / "logs/mpirun.log"
        return file.read_text() if file.exists() else ""

    def end(self, how=""):
        """Lets it end, and returns its state."""
        (self.store / how).touch()
        return self.driver.communicate(f"{how}\n", timeout=240)[0].strip()

    def error(self):
        """Of the first rank on node2."""
        return json.loads((self.attempt / "errors/rank_2.json").read_text())

    def processes(self):
        """Command lines of what is left of this job."""
        lines = []
        for pid in (pid for name in self.hosts.names for pid in self.hosts.pids(name)):
            with suppress(OSError):
                lines.append(
                    Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
                )
        return [line for line in lines if str(self.store) in line]


@pytest.mark.parametrize("mpi, how, code", [("openmpi", "kill", 137), ("mpich", "exit", 7)])
def test_a_failed_rank_ends_the_others(hosts, tmp_path, mpi, how, code):
    job = Waiting(hosts, tmp_path, mpi)
    lines = job.processes()
    assert lines
    assert not any(SECRET in line for line in lines)
    assert job.end(how) == "FAILED"
    error = job.error()
    record = json.loads((job.attempt / "mpirun.json").read_text())
    assert error["exit_code"] == record["exit_code"] == code  # also of mpirun itself
    assert how == "exit" or "killed by SIGKILL on node2" in error["message"]
    until(lambda: not job.processes(), 240, job.log)


@pytest.mark.parametrize("mpi", MPIRUN if "DISTDL_MATRIX" in os.environ else ["openmpi"])
def test_cancel_leaves_time_for_a_checkpoint(hosts, tmp_path, mpi):
    """Also on hosts that are named by a user and an address of IPv6, here and there."""
    names = [f"[{hosts.ipv6('node1')}]", f"root@[{hosts.ipv6('node2')}]"]
    job = Waiting(hosts, tmp_path, mpi, names=names)
    lines = job.log().splitlines()
    assert sorted(line for line in lines if line.startswith("born")) == [
        "born 0 node1 fd77::1",
        "born 1 node1 fd77::1",
        "born 2 node2 fd77::1",
        "born 3 node2 fd77::1",
    ]
    assert job.end("cancel") == "CANCELLED"
    assert job.log().count("saved") == 4
    assert not list(job.attempt.glob("errors/*"))
    until(lambda: not job.processes(), 240, job.log)


@matrix_only
def test_a_host_that_vanishes_ends_the_job(hosts, tmp_path):
    """On both at once: what takes time is to notice. The host itself lives on, and ends its ranks:
    hydra's proxy there waits for a connection that says nothing, as long as TCP does."""
    jobs = [Waiting(hosts, tmp_path, mpi, impatient=True) for mpi in MPIRUN]
    hosts.cut("node2")
    try:
        for job in jobs:
            assert job.end() == "FAILED"
            assert job.error()["type"] == "HostLost"
            until(lambda job=job: not job.processes(), 45, job.log)
    finally:
        hosts.mend("node2")

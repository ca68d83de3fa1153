"""launcher=mpi without a network: requests, refusals, and what stays with mpirun and with a rank.

The supervisor and the parent of a rank run for real here, around commands of the shell. Real
mpiruns on two hosts: tests/cluster/test_mpi.py.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl.job import Job, JobSpec, JobState, Resources
from distdl.launch import jobs
from distdl.launchers.mpi import MpiLauncher, flavours, hosts, mpi_launcher, rank, supervisor
from distdl.launchers.mpi.flavours import FLAVOURS, Host
from distdl.launchers.mpi.mpi_job import MpiJob
from distdl.runs.directory import Attempt
from distdl.util.errors import UserError
from tests.conftest import ROOT, check_golden

GOLDEN = ROOT / "tests/golden/launchers"
TWO: dict[str, Any] = {"hosts": ["node1:4", "node2"], "python": "/opt/env/bin/python"}
EVERYTHING: dict[str, Any] = {
    **TWO,
    "copy_bundle": True,
    "ssh": "ssh -p 2222 -i '/home/me/my key'",
    "interface": "ib0",
    "infiniband": False,
    "port": 29500,
    "grace_seconds": 120,
    "env": {"NCCL_DEBUG": "INFO", "LEVEL": 3},
    "extra_args": ["-v"],
}
KNOWN = "'auto', 'openmpi4', 'openmpi5', 'mpich' or 'intel'"
CASES: dict[str, tuple[dict[str, Any], Resources]] = {
    **{f"mpi_{f}": ({**TWO, "flavour": f}, Resources(2, 4, "gpu")) for f in FLAVOURS},
    **{
        f"mpi_{f}_everything": ({**EVERYTHING, "flavour": f}, Resources(2, 4, "gpu"))
        for f in FLAVOURS
    },
    "mpi_agent": ({**TWO, "flavour": "openmpi5", "agent": True}, Resources(2, 4, "gpu")),
    "mpi_here": ({"flavour": "mpich", "python": "python3"}, Resources(1, 2, "cpu")),
}


def spec(size: Resources, store: Path | str = "/shared/runs/first") -> JobSpec:
    return JobSpec(
        "resnet50_ddp/first",
        bundle=f"{store}/attempts/001/bundle",
        store=str(store),
        attempt=1,
        resources=size,
        forward_env=("HF_TOKEN",),
    )


# ---- the request ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_request(
    case: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))  # no mpirun: a flavour that is named needs none
    monkeypatch.setenv("HF_TOKEN", "canary-7c1")
    node, size = CASES[case]
    file, text = GOLDEN / f"{case}.txt", MpiLauncher(**node).request(spec(size)).render() + "\n"
    check_golden(pytestconfig, file, text)
    assert "canary" not in text
    subprocess.run(["/bin/sh", "-n"], input=text, text=True, check=True)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("mpi*.txt")} == set(CASES)


def test_what_a_request_adds_or_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for flavour in FLAVOURS:  # root needs an option of Open MPI's
        node, size = CASES[f"mpi_{flavour}"]
        words = MpiLauncher(**node).request(spec(size)).command
        assert ("--allow-run-as-root" in words) == flavour.startswith("openmpi")
    forwarded = JobSpec("x", "b", "s", 1, Resources(), forward_env=("OMP_NUM_THREADS",))
    request = MpiLauncher(flavour="mpich").request(forwarded)
    assert "OMP_NUM_THREADS" not in request.env
    assert request.start.variables.count("OMP_NUM_THREADS") == 1


def test_two_runs_do_not_meet_on_one_port() -> None:
    launcher, size = MpiLauncher(flavour="mpich"), Resources()
    ports = [launcher.request(spec(size, f"/runs/{i}")).env["MASTER_PORT"] for i in (1, 1, 2, 3)]
    assert ports[0] == ports[1] and len(set(ports)) == 3
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert mpi_launcher.free_port(port) > port


# ---- flavours -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "flavour"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "openmpi5"),
        ("mpirun (Open MPI) 4.1.5rc2", "openmpi4"),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "openmpi4"),
        ("HYDRA build details:\n    Version:  4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 2026", "intel"),
        ("mpirun (Open MPI) 3.1.0", None),
        ("prun (PRRTE) 3", None),
    ],
)
def test_mpirun_says_what_it_is(said: str, flavour: str | None, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho {shlex.quote(said)}\n")
    mpirun.chmod(0o755)
    if flavour:
        assert flavours.ask(str(mpirun)) == flavour
    else:
        with pytest.raises(UserError, match=r"which is none of openmpi4, openmpi5, mpich, intel"):
            flavours.ask(str(mpirun))


def test_intels_shell_wrapper_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mpiexec.hydra").touch()
    mpirun = str(tmp_path / "mpirun")
    assert flavours.program(mpirun, "intel") == str(tmp_path / "mpiexec.hydra")
    assert flavours.program(mpirun, "mpich") == mpirun


# ---- hosts ----------------------------------------------------------------------------------


def test_hosts_and_hostfiles_of_both_kinds(tmp_path: Path) -> None:
    assert hosts.parse(["node1:2", "node2"], 4) == (Host("node1", 2), Host("node2", 4))
    assert hosts.parse(["a", "b", "a"], 1) == (Host("a", 2), Host("b", 1))
    for bad in ("-oProxyCommand=x", "node1:0", "a b", "node1:2:3", ""):
        with pytest.raises(UserError, match="is not a host"):
            hosts.parse([bad], 1)
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode1 slots=2 max_slots=4\n\nnode2:2  # MPICH\nnode3\n")
    expected = (Host("node1", 2), Host("node2", 2), Host("node3", 8))
    assert hosts.read_hostfile(str(file), 8) == expected
    refused = {
        "# nothing\n": "names no host",
        "node1 slots=x\nnode2\nnode 2 3\n": r"line 1: 'node1 slots=x'(.|\n)*line 3: 'node 2 3'",
    }
    for text, message in refused.items():
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            hosts.read_hostfile(str(file), 1)


def test_this_machine_is_known() -> None:
    assert hosts.is_here("localhost") and hosts.is_here(socket.gethostname())
    assert hosts.is_here("127.0.0.1") and not hosts.is_here("192.0.2.1")


@pytest.mark.parametrize(
    ("node", "size", "expected"),
    [
        ({}, (1, 2), []),
        ({"hosts": ["a", "b:2"]}, (2, 2), []),
        ({"flavour": "lam"}, (1, 1), [f"flavour: 'lam' is not {KNOWN}"]),
        ({"flavour": "auto", "mpirun": "absent"}, (1, 1), ["mpirun: there is no absent here"]),
        ({}, (2, 1), ["hosts: trainer.num_nodes=2, and no hosts are named"]),
        ({"hosts": ["a"]}, (2, 1), ["hosts: names 1 hosts, and trainer.num_nodes is 2"]),
        ({"hosts": ["a:4", "b:2"]}, (2, 4), ["hosts: b:2, and trainer.devices is 4"]),
        ({"hosts": ["a"], "hostfile": "f"}, (1, 1), ["hostfile: launcher.hosts is set too"]),
        ({"hostfile": "absent"}, (1, 1), ["hostfile: absent: No such file or directory"]),
        ({"hosts": ["a b"]}, (1, 1), ["hosts: 'a b' is not a host"]),
        ({"port": 99999}, (1, 1), ["port: 99999 is not less than or equal to 65535"]),
        ({"max_attempts": -1}, (1, 1), ["max_attempts: -1 is not greater than or equal to 0"]),
        ({"interface": "eth99"}, (1, 1), ["interface: this machine has no eth99"]),
        ({"hosts": ["a"], "ssh": "nossh -v"}, (1, 1), ["ssh: there is no nossh here"]),
    ],
)
def test_what_is_refused_at_once(node, size, expected) -> None:
    nodes, devices = size
    context = {"num_nodes": nodes, "devices": devices, "world_size": nodes * devices}
    node = {"flavour": "mpich", **node}
    found = [f"{p.path}: {p.what}" for p in MpiLauncher.check(node, context)]
    assert found == expected


def test_a_refusal_at_submission_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submitted(**node: Any) -> Any:
        launcher = MpiLauncher(**{"flavour": "mpich", "mpirun": "sh", **node})
        request = launcher.request(spec(Resources(), tmp_path))
        if "mpirun" in node:  # asked before anything is laid down
            launcher.reach(request)
        return launcher.submit(request)

    monkeypatch.setenv("HF_TOKEN", "x")
    with pytest.raises(UserError, match="there is no absent here"):
        submitted(mpirun="absent")
    with pytest.raises(UserError, match="there is no /absent here"):
        submitted(python="/absent")
    with pytest.raises(UserError, match="node9 cannot be reached: no route"):
        submitted(hosts=["node9"], ssh="sh -c 'echo no route >&2; exit 255'")
    with pytest.raises(UserError, match=r"(?s)node9 does not see .*launcher.copy_bundle=true"):
        submitted(hosts=["node9"], ssh="sh -c 'echo no code'")
    assert not (tmp_path / "attempts/001" / supervisor.RECORD).exists()


# ---- the parent of a rank -------------------------------------------------------------------


def parent(folder: Path, script: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, rank.__file__, str(folder), "sh", "-c", script],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_failed_rank_is_logged_and_then_reported_to_hydra(tmp_path: Path) -> None:
    """Not before hydra has read what was printed: at an abort it drops the rest."""
    error = {"type": "ValueError", "message": "bad weather\nand more", "exit_code": 7}
    (tmp_path / "rank_3.json").write_text(json.dumps(error))
    ours, theirs = socket.socketpair()
    ours.settimeout(0.3)
    variables = {**os.environ, "PMI_RANK": "3", "PMI_FD": str(theirs.fileno())}
    process = parent(tmp_path, "echo end; exit 7", env=variables, pass_fds=[theirs.fileno()])
    assert process.stderr is not None and process.stdout is not None
    line = f"distdl: rank 3 on {socket.gethostname()} ended with exit code 7: ValueError: bad"
    assert process.stderr.readline() == f"{line} weather\n"
    with pytest.raises(TimeoutError):  # what was printed is still in the other pipe
        ours.recv(100)
    assert process.stdout.readline() == "end\n"
    assert ours.recv(100) == b"cmd=abort exitcode=7\n"
    assert process.wait(30) == 7


def test_a_rank_that_is_killed_and_one_that_ends_well(tmp_path: Path) -> None:
    killed = parent(tmp_path, "kill -9 $$", env={**os.environ, "OMPI_COMM_WORLD_RANK": "1"})
    assert killed.communicate(timeout=30)[1].endswith("ended with signal 9\n")
    assert killed.returncode == 137
    well = parent(tmp_path, "exit 0")
    assert (well.communicate(timeout=30)[1], well.returncode) == ("", 0)


def test_a_rank_gets_its_signals_and_ends_with_its_parent(tmp_path: Path) -> None:
    script = "trap 'echo got; exit 0' USR1; echo $$; while :; do sleep 0.05; done"
    process = parent(tmp_path, script)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=30)[0] == "got\n" and process.returncode == 0

    process = parent(tmp_path, script)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    until(lambda: supervisor.start_time(child) == "")


# ---- the supervisor, with a command of the shell for an mpirun ----------------------------------


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MpiJob]:
    """Submits a job whose mpirun is a shell script."""
    monkeypatch.setenv("HF_TOKEN", "canary-7c1")
    monkeypatch.setenv("SOMETHING", "else")

    def start(script: str, size: Resources = Resources(), **node: Any) -> MpiJob:  # noqa: B008
        mpirun = tmp_path / "mpirun"
        mpirun.write_text(f"#!/bin/sh\n{script}\n")
        mpirun.chmod(0o755)
        launcher = MpiLauncher(mpirun=str(mpirun), flavour="mpich", **node)
        return launcher.submit(launcher.request(spec(size, tmp_path)))

    return start


def errors(job: MpiJob) -> dict[str, Any]:
    return {f.name: json.loads(f.read_text()) for f in (job.folder / "errors").glob("*.json")}


def test_a_job_from_its_start_to_a_later_shell(start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = start(f"echo hello; while [ ! -e {go} ]; do sleep 0.05; done; env | cut -d= -f1")
    assert isinstance(job, Job) and job.state() is JobState.RUNNING
    assert job.handle == f"mpi://{socket.gethostname()}{tmp_path}/attempts/001"
    assert MpiJob.attach(job.handle).folder == job.folder
    with pytest.raises(UserError, match=f"is of {socket.gethostname()}"):
        MpiJob.attach(f"mpi://elsewhere{job.folder}")
    later = MpiLauncher().attach(job.handle)
    until(lambda: list(later.logs()) == ["hello"])
    go.touch()
    names = list(later.logs(follow=True))[1:]  # ends with the job
    assert later.wait() is job.state() is JobState.SUCCEEDED
    assert {"HF_TOKEN", "MASTER_ADDR", "PYTHONPATH", "PATH"} <= set(names)
    assert "SOMETHING" not in names  # a rank sees what is forwarded, and no more
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert not [f for f in files if b"canary" in f.read_bytes()]
    later.cancel()  # may come too late


def test_the_failing_rank_is_recorded_before_its_consequences(start, tmp_path: Path) -> None:
    folder = tmp_path / "attempts/001/errors"
    folder.mkdir(parents=True)
    other = {"time": 5.0, "rank": 0, "type": "RuntimeError", "message": "connection closed"}
    (folder / "rank_0.json").write_text(json.dumps(other))
    job = start(
        "echo 'distdl: rank 2 on node2 ended with exit code 3: Oops: no';"
        "echo 'distdl: rank 1 on node2 ended with signal 9'; exit 3"
    )
    assert job.wait() is JobState.FAILED
    found = errors(job)
    assert set(found) == {"rank_0.json", "rank_2.json"} and found["rank_0.json"] == other
    first = found["rank_2.json"]
    assert first["time"] < 5.0 and (first["message"], first["exit_code"]) == ("no", 3)


@pytest.mark.parametrize("code", [1, 137])
def test_an_agent_ends_as_its_rank_did(start, tmp_path: Path, code: int) -> None:
    """A rank that could speak has spoken; one that was killed is the host's, whichever it was."""
    folder = tmp_path / "attempts/001/errors"
    folder.mkdir(parents=True)
    own = {"time": 5.0, "rank": 3, "host": "node2", "type": "Oops", "message": "", "exit_code": 1}
    (folder / "rank_3.json").write_text(json.dumps(own))
    node = {"hosts": ["node8", "node2"], "ssh": "sh -c true", "agent": True}
    script = f"echo 'distdl: rank 1 on node2 ended with exit code {code}'; exit {code}"
    job = start(script, Resources(2, 2), **node)
    job.wait()
    assert set(errors(job)) == {"rank_3.json"} | ({"rank_2.json"} if code == 137 else set())
    if code == 137:
        first = errors(job)["rank_2.json"]
        assert first["time"] < 5.0 and "killed by SIGKILL on node2" not in first["message"]
        assert "ended with exit code 137 on node2" in first["message"]


@pytest.mark.parametrize(("reaction", "logged"), [("exit 0", "saved"), (":", "no")])
def test_cancel_asks_for_a_checkpoint_and_kills_after_the_grace(start, reaction, logged) -> None:
    script = f"trap 'echo {logged}; {reaction}' USR1; echo up; while :; do sleep 0.05; done"
    job = start(script, grace_seconds=1)
    until(lambda: list(job.logs()) == ["up"])
    began = time.monotonic()
    job.cancel()
    job.cancel()
    assert job.wait() is JobState.CANCELLED and list(job.logs()) == ["up", logged]
    assert reaction == "exit 0" or time.monotonic() - began > 0.9


def test_what_mpirun_leaves_behind_is_removed(start) -> None:
    job = start("setsid sleep 600 & echo $!; exit 1")
    assert job.wait() is JobState.FAILED
    orphan = int(next(iter(job.logs())))
    assert supervisor.start_time(orphan) == ""


def test_a_lost_host_ends_an_mpirun_that_does_not_notice(start, monkeypatch) -> None:
    node = {"hosts": ["node8", "node9"], "ssh": "sh -c true"}
    size = Resources(2, 4)
    job = start("echo up; exec sleep 600", size, **node)
    until(lambda: list(job.logs())[:1] == ["up"])
    # What mpirun does: it calls the script as ssh, which ends with 255 once the connection is lost.
    script = job.folder / "mpirun-ssh"
    text = script.read_text().replace("sh -c true", "sh -c 'exit 255'")
    assert subprocess.run(["sh", "-c", text, "sh", "-x", "node9", "proxy"]).returncode == 255
    assert job.wait() is JobState.FAILED
    said = errors(job)["rank_4.json"]
    assert said["type"] == "HostLost" and "node9 does not answer" in said["message"]


def test_a_supervisor_that_is_gone(start) -> None:
    job = start("exec sleep 600")
    os.kill(job.record()["pid"], signal.SIGKILL)
    assert job.wait() is JobState.FAILED and "mpirun's supervisor" in job.killed
    record = {**job.record(), "host": "elsewhere"}
    supervisor.write_json(job.folder / supervisor.RECORD, record)
    assert job.state() is JobState.UNKNOWN
    with pytest.raises(UserError, match=r"mpirun runs on elsewhere, and this is .*"):
        job.cancel()


def test_an_mpirun_that_is_killed_is_named_and_no_preemption(start) -> None:
    """Its ranks get a signal by that: what they say then is not why the job ended."""
    job = start("echo 'distdl: rank 1 on node2 ended with signal 15'; kill -9 $$")
    assert job.wait() is JobState.FAILED and errors(job) == {}
    attempt = Attempt(job.folder)
    attempt.update(state="PREEMPTED")
    jobs.record(attempt, job)
    assert jobs.state(attempt, job) is JobState.FAILED
    status = attempt.status()
    assert status["error"] == f"mpirun was killed by SIGKILL on {socket.gethostname()}"
    assert status["exit_code"] == 137


@pytest.mark.parametrize("handle", ["slurm://7", "mpi://host", "mpi://host/nowhere"])
def test_handles_that_are_none(handle: str) -> None:
    with pytest.raises(UserError):
        MpiLauncher().attach(handle)

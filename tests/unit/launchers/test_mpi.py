"""launcher=mpi without a network: requests, refused settings, and the parent of a rank and the
supervisor, around commands of the shell. Real mpiruns: tests/cluster/test_mpi.py."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from distdl.job import JobBase, JobSpec, JobState, Resources
from distdl.launch import jobs
from distdl.launchers.mpi import MpiLauncher, extra_args, host_names, mpi_launcher, rank, supervisor
from distdl.launchers.mpi.flavours import FLAVOURS
from distdl.launchers.mpi.host_names import Host
from distdl.runs.directory import Attempt
from distdl.util.errors import UserError
from distdl.util.hosts import short
from tests.conftest import ROOT, check_golden
from tests.waiting import until
from tests.written import program

GOLDEN = ROOT / "tests/golden/launchers"
HERE = socket.gethostname()
ONE = Resources()
EIGHT = Resources(2, 4, "gpu")
TWO_HOSTS = {"hosts": ["node1:4", "node2"], "python": "/opt/env/bin/python"}
EVERYTHING = {
    **TWO_HOSTS,
    "copy_bundle": True,
    "ssh": "ssh -p 2222 -i '/home/me/my key'",
    "interface": "ib0",
    "infiniband": False,
    "port": 29500,
    "extra_args": ["-v"],
    "grace_seconds": 120,
    "env": {"NCCL_DEBUG": "INFO", "LEVEL": 3},
}
REQUESTS = {f"mpi_{f}": ({**TWO_HOSTS, "flavour": f}, EIGHT) for f in FLAVOURS}
REQUESTS |= {f"mpi_{f}_everything": ({**EVERYTHING, "flavour": f}, EIGHT) for f in FLAVOURS}
REQUESTS["mpi_agent"] = ({**TWO_HOSTS, "flavour": "openmpi5", "agent": True}, EIGHT)
NAMED = {"hosts": ["me@node1:4", "[2001:db8::2]:4"], "python": "python3"}
REQUESTS |= {f"mpi_{f}_named": ({**NAMED, "flavour": f}, EIGHT) for f in ("openmpi4", "openmpi5")}
REQUESTS["mpi_here"] = ({"flavour": "mpich", "python": "python3"}, Resources(1, 2, "cpu"))


def spec(size=ONE, store="/shared/runs/first", forward=("HF_TOKEN",)):
    bundle = f"{store}/attempts/001/bundle"
    return JobSpec("resnet50_ddp/first", bundle, str(store), 1, size, forward_env=forward)


@pytest.mark.parametrize("case", REQUESTS)
def test_request(case, pytestconfig, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))  # a flavour that is named needs no mpirun
    monkeypatch.setenv("HF_TOKEN", "canary-7c1")
    node, size = REQUESTS[case]
    text = MpiLauncher(**node).request(spec(size)).render() + "\n"
    check_golden(pytestconfig, GOLDEN / f"{case}.txt", text)
    assert "canary" not in text
    subprocess.run(["/bin/sh", "-n"], input=text, text=True, check=True)
    assert {path.stem for path in GOLDEN.glob("mpi*.txt")} == set(REQUESTS)


def test_ports_differ_between_runs_and_are_free():
    launcher = MpiLauncher(flavour="mpich")
    ports = [launcher.request(spec(store=f"/runs/{i}")).env["MASTER_PORT"] for i in (1, 1, 2, 3)]
    assert ports[0] == ports[1]
    assert len(set(ports)) == 3
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert mpi_launcher.free_port(port) > port


VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to ...": "openmpi5",
    "mpirun.openmpi (OpenRTE) 4.1.4": "openmpi4",
    "HYDRA build details:\n    Version:  4.0.2\n": "mpich",
    "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 2026": "intel",
}


def test_flavour_of_an_mpirun(tmp_path):
    def request(version):
        mpirun = program(tmp_path / "mpirun", f"echo {shlex.quote(version)}")
        return MpiLauncher(mpirun=mpirun).request(spec())

    (tmp_path / "mpiexec.hydra").touch()
    for version, flavour in VERSIONS.items():
        # Intel's mpirun is a shell script that forwards no signals.
        name = "mpiexec.hydra" if flavour == "intel" else "mpirun"
        found = request(version)
        assert (found.flavour, found.command[0]) == (flavour, str(tmp_path / name))
    with pytest.raises(UserError, match="which is none of openmpi4, openmpi5, mpich, intel"):
        request("mpirun (Open MPI) 3.1.0")


# As a user writes a host; what is in a hostfile alone is behind |.
HOSTS = {
    "node1:2": [Host("node1", 2)],
    "node2": [Host("node2", 8)],
    "me@node1": [Host("node1", 8, "me")],
    "me@node1:2": [Host("node1", 2, "me")],
    "10.0.0.1:4": [Host("10.0.0.1", 4)],
    "fd00::1": [Host("fd00::1", 8)],
    "[FD00:0::1]:4": [Host("fd00::1", 4)],
    "me@[fd00::1]:4": [Host("fd00::1", 4, "me")],
    "node[1-3]": [Host(f"node{n}", 8) for n in (1, 2, 3)],
    "r[1-2]n[08-10]-ib:4": [Host(f"r{r}n{n}-ib", 4) for r in "12" for n in ("08", "09", "10")],
    "10.0.0.[1,3]": [Host("10.0.0.1", 8), Host("10.0.0.3", 8)],
    "node1 | slots = 4": [Host("node1", 4)],
    "node1 | slots=2 max-slots= 4": [Host("node1", 2)],
    "node1 | cpu=2 username=me": [Host("node1", 2, "me")],
    "node[1-2] | slots=4  # ours": [Host("node1", 4), Host("node2", 4)],
}


@pytest.mark.parametrize("text", HOSTS)
def test_a_host_in_a_list_and_in_a_hostfile(text, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"# ours\n{text.replace('|', '')}\n\n")
    assert host_names.read_hostfile(str(file), 8) == tuple(HOSTS[text])
    if "|" not in text:
        found = host_names.parse_hosts([text], 8)
        again = host_names.parse_hosts([host.entry for host in found], 1)
        assert found == again == tuple(HOSTS[text])


def test_a_host_that_is_named_twice_has_the_slots_of_both():
    twice = host_names.parse_hosts(["node1:2", "node2", "node1:2"], 4)
    assert twice == (Host("node1", 4), Host("node2", 4))


NO_HOSTS = ("a b", "node1:0", "node1:2:3", "-v", "@a", "me@", "a[", "a]1", "a,b", "ssh://a")
WRONG_HOSTS = {
    "fd00::1::2": "'fd00::1::2' is not an address",
    "fe80::1%eth0": "fe80::1%eth0 is an address of one link",
    "a[4-1]": "'a[4-1]': '4-1' is not a range such as 1-4",
    "a[1-]": "'a[1-]': '1-' is not a range such as 1-4",
    "a[1-99999999]": "'a[1-99999999]' is more than 4096 hosts",
    "a[1-99]b[1-99]": "'a[1-99]b[1-99]' is more than 4096 hosts",
}
REFUSED = [
    ({}, (1, 2), []),
    ({"hosts": ["a", "b:2"]}, (2, 2), []),
    ({"flavour": "lam"}, (1, 1), ["flavour: 'lam' is not 'auto', 'openmpi4', 'openmpi5'"]),
    ({"flavour": "auto", "mpirun": "absent"}, (1, 1), ["mpirun: there is no absent here"]),
    ({}, (2, 1), ["hosts: missing, but trainer.num_nodes is 2"]),
    ({"hosts": ["a"]}, (2, 1), ["hosts: names 1 hosts, but trainer.num_nodes is 2"]),
    ({"hosts": ["a:4", "b:2"]}, (2, 4), ["hosts: b:2, but trainer.devices is 4"]),
    ({"hosts": ["a"], "hostfile": "f"}, (1, 1), ["hostfile: launcher.hosts is set too"]),
    ({"hostfile": "absent"}, (1, 1), ["hostfile: absent: No such file or directory"]),
    ({"hostfile": "empty"}, (1, 1), ["hostfile: empty names no host"]),
    ({"hostfile": "bad"}, (1, 1), ["hostfile: bad, line 1: 'a slots=x'", "hostfile: bad, line 3"]),
    *(({"hosts": [h]}, (1, 1), [f"hosts: {h!r} is not a host"]) for h in NO_HOSTS),
    *(({"hosts": [h]}, (1, 1), [f"hosts: {why}"]) for h, why in WRONG_HOSTS.items()),
    ({"hosts": ["me@a", "you@a"]}, (1, 1), ["hosts: me@a and you@a are one host with two users"]),
    ({"hosts": ["localhost", "b"]}, (2, 1), ["hosts: the first is localhost"]),
    ({"hosts": "node[1-2]"}, (2, 1), ["hosts: 'node[1-2]' is not a list", "hosts: missing"][:1]),
    ({"port": 99999}, (1, 1), ["port: 99999 is not less than or equal to 65535"]),
    ({"interface": "eth99"}, (1, 1), ["interface: this machine has no interface eth99"]),
    ({"hosts": ["a"], "ssh": "nossh -v"}, (1, 1), ["ssh: this machine has no nossh"]),
    ({"extra_args": ["-np", "1"]}, (1, 2), ["extra_args: -np is reserved for the launcher"]),
    ({"extra_args": ["--hostfile=f"]}, (1, 2), ["extra_args: --hostfile=f is reserved"]),
    # Open MPI 5 takes abbreviations.
    ({"extra_args": ["--hostf", "f"]}, (1, 2), ["extra_args: --hostf is reserved"]),
    ({"extra_args": ["--map", "node"]}, (1, 2), ["extra_args: --map is reserved"]),
    ({"extra_args": ["--npern=2"]}, (1, 2), ["extra_args: --npern=2 is reserved"]),
    (
        {"extra_args": ["--mpa-by", "x"]},
        (1, 2),
        ["extra_args: --mpa-by is not an option"],
    ),
    ({"extra_args": ["--tag", "-x", "A", "--app-of-a-patch", "--displ=map"]}, (1, 2), []),
    ({"extra_args": ["--mca", "n", "1", "-v"]}, (1, 2), []),
    ({"hosts": ["a"], "ssh": "'"}, (1, 1), ['ssh: "\'": No closing quotation']),
]


@pytest.mark.parametrize("node, size, expected", REFUSED)
def test_refused_settings(node, size, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "bad").write_text("a slots=x\nb\na 2 3\n")
    context = {"num_nodes": size[0], "devices": size[1]}
    problems = MpiLauncher.check({"flavour": "mpich", **node}, context)
    for text, start in zip((f"{p.path}: {p.what}" for p in problems), expected, strict=True):
        assert text.startswith(start)


def test_a_misspelt_argument_of_mpirun():
    words = ["-report-bindigs", "--oversubscribed=1"]
    problems = extra_args.problems(words)
    assert [(p.remedy, p.code) for p in problems] == [
        ("did you mean -report-bindings?", "unknown-key"),
        ("did you mean --oversubscribe?", "unknown-key"),
    ]


# Called as ssh is: one that fails, and one that runs its command on this machine.
NO_ROUTE = "sh -c 'echo no route >&2; exit 255'"
RUNS = "sh -c 'for last; do :; done; eval \"$last\"'"
HERE_IS_0 = {"MASTER_ADDR": "127.0.0.1"}
UNREADY = [
    ({"mpirun": "absent"}, "launcher.mpirun", ""),
    ({"python": "/absent"}, "launcher.python", "this machine has no /absent"),
    ({"hosts": ["n"], "ssh": NO_ROUTE}, "launcher.hosts", "n cannot be reached: no route"),
    ({"hosts": ["n"], "ssh": RUNS, "python": "/absent"}, "launcher.python", "n has no /absent"),
    ({"hosts": ["me@n"], "ssh": RUNS}, "launcher.hosts", "me@n finds no address of n"),
    ({"hosts": ["n"], "ssh": RUNS, "env": HERE_IS_0}, "launcher.copy_bundle", "n does not see "),
    ({"hosts": ["nobody@localhost"]}, "launcher.hosts", "nobody@localhost is this machine"),
]


@pytest.mark.parametrize("node, path, what", UNREADY)
def test_refused_at_submission(node, path, what, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "x")
    launcher = MpiLauncher(**{"flavour": "mpich", "mpirun": "sh", **node})
    with pytest.raises(UserError) as error:
        request = launcher.request(spec(store=tmp_path))
        launcher.reach(request)
        launcher.submit(request)
    (problem,) = error.value.problems
    assert problem.path == path
    assert problem.what.startswith(what)
    assert not (tmp_path / "attempts/001" / supervisor.RECORD).exists()


def test_lost_hosts_are_left_out_by_name_or_address():
    launcher = MpiLauncher(hosts=["me@node1.site", "node2", "10.0.0.1", "10.0.0.2", "fd00::1"])
    left = next(launcher.without(["node1", "10.0.0.1"], Resources(5, 4)))
    assert left["launcher.hosts"] == ["node2:4", "10.0.0.2:4", "[fd00::1]:4"]
    assert next(launcher.without(["10"], Resources(5, 4)), None) is None
    assert short("node1.site") == "node1"
    assert short("10.0.0.1") == "10.0.0.1"


def test_a_rank_that_fails_says_why(tmp_path):
    """Also one whose store is on another host than the supervisor's."""
    error = {"type": "ValueError", "message": "bad weather\nand more", "exit_code": 7}
    (tmp_path / "rank_3.json").write_text(json.dumps(error))
    command = [sys.executable, rank.__file__, str(tmp_path), "sh", "-c", "exit 7"]
    env = {**os.environ, "PMI_RANK": "3"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    line = f"distdl: rank 3 on {HERE} ended with exit code 7: ValueError: bad weather\n"
    assert (done.returncode, done.stderr) == (7, line)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-7c1")
    monkeypatch.setenv("SOMETHING", "else")

    def start(script, size=ONE, **node):
        mpirun = program(tmp_path / "mpirun", script)
        launcher = MpiLauncher(mpirun=mpirun, flavour="mpich", **node)
        return launcher.submit(launcher.request(spec(size, tmp_path)))

    return start


def errors(job):
    return {f.stem: json.loads(f.read_text()) for f in (job.folder / "errors").glob("*.json")}


def test_a_job_from_its_start_to_a_later_shell(start, tmp_path):
    go = tmp_path / "go"
    job = start(f"echo hello; while [ ! -e {go} ]; do sleep 0.05; done; env | cut -d= -f1")
    assert isinstance(job, JobBase)
    assert job.state() is JobState.RUNNING
    assert job.handle == f"mpi://{HERE}{tmp_path}/attempts/001"
    for handle in (f"mpi://elsewhere{job.folder}", "slurm://7", "mpi://h", "mpi://h/nowhere"):
        with pytest.raises(UserError):
            MpiLauncher().attach(handle)
    later = MpiLauncher().attach(job.handle)
    until(lambda: list(later.logs()) == ["hello"])
    go.touch()
    names = list(later.logs(follow=True))[1:]  # ends with the job
    assert later.wait() is job.state() is JobState.SUCCEEDED
    assert {"HF_TOKEN", "MASTER_ADDR", "PYTHONPATH", "PATH"} <= set(names)
    assert "SOMETHING" not in names  # it is not forwarded
    later.cancel()  # too late, and allowed


AGENT = {"hosts": ["node8", "node2"], "ssh": "sh -c true", "agent": True}
CAUSES = [
    ({}, "2 on node2 ended with exit code 3: Oops: no", 3, "no"),
    (AGENT, "1 on node2 ended with exit code 1", 1, ""),  # a rank of its host has recorded it
    (AGENT, "1 on node2 ended with exit code 137", 137, "ended with exit code 137 on node2"),
]


@pytest.mark.parametrize("node, line, code, message", CAUSES)
def test_the_cause_is_recorded_before_its_consequences(start, tmp_path, node, line, code, message):
    """An agent ends as its rank did; for a rank that was killed the host's first rank stands."""
    consequence = {"time": 5.0, "rank": 3, "type": "Oops", "host": "node2", "exit_code": 1}
    (tmp_path / "attempts/001/errors").mkdir(parents=True)
    (tmp_path / "attempts/001/errors/rank_3.json").write_text(json.dumps(consequence))
    later = "distdl: rank 1 on node2 ended with signal 9"
    job = start(f"echo 'distdl: rank {line}'; echo '{later}'; exit {code}", Resources(2, 2), **node)
    assert job.wait() is JobState.FAILED
    first = {"time": 9.9, "message": "", "exit_code": code} | errors(job).get("rank_2", {})
    assert errors(job)["rank_3"] == consequence
    assert len(errors(job)) == 1 + bool(message)
    assert first["exit_code"] == code
    assert message in first["message"]
    assert first["time"] < 5.0 or not message


def test_a_cancelled_mpirun_and_what_one_leaves_are_killed(start):
    """After the signal for a checkpoint and the grace; tests/cluster has the checkpoint."""
    job = start("trap 'echo no' USR1; echo up; while :; do sleep 0.05; done", grace_seconds=1)
    until(lambda: list(job.logs()) == ["up"])
    began = time.monotonic()
    job.cancel()
    job.cancel()
    assert job.wait() is JobState.CANCELLED
    assert list(job.logs()) == ["up", "no"]
    assert time.monotonic() - began > 0.9
    (job.folder / "logs/mpirun.log").unlink()
    job = start("setsid sleep 600 & echo $!; exit 1")
    assert job.wait() is JobState.FAILED
    assert supervisor.start_time(int(next(iter(job.logs())))) == ""


def test_a_killed_supervisor_or_mpirun_is_the_cause(start):
    job = start("exec sleep 600")
    os.kill(job.record()["pid"], signal.SIGKILL)
    assert job.wait() is JobState.FAILED
    assert "mpirun's supervisor" in job.killed
    supervisor.write_json(job.folder / supervisor.RECORD, {**job.record(), "host": "elsewhere"})
    assert job.state() is JobState.UNKNOWN
    with pytest.raises(UserError, match="mpirun runs on elsewhere, not on"):
        job.cancel()
    # The ranks of an mpirun that is killed get a signal by that, and record a preemption.
    job = start("echo 'distdl: rank 1 on node2 ended with signal 15'; kill -9 $$")
    assert job.wait() is JobState.FAILED
    assert errors(job) == {}
    attempt = Attempt(job.folder)
    attempt.update(state="PREEMPTED")
    jobs.record(attempt, job)
    assert jobs.state(attempt, job) is JobState.FAILED
    assert attempt.status()["exit_code"] == 137
    assert attempt.status()["error"] == f"mpirun was killed by SIGKILL on {HERE}"

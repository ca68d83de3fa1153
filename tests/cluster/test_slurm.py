"""Runs on a real Slurm cluster of two nodes: the same losses, requeues, cancels, arrays."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from distdl.launch import jobs
from distdl.launchers.slurm import commands
from distdl.launchers.slurm.slurm_job import SlurmJob
from distdl.runs.directory import RunDirectory
from tests.cluster.slurm_cluster import SlurmCluster, free_ports, slurm, until
from tests.conftest import (
    TINY,
    UNCHECKED,
    Background,
    Said,
    distdl,
    last_step,
    losses,
    samples,
    status,
)

__all__ = ["slurm"]

pytestmark = pytest.mark.xdist_group("slurm")

SLURM = (
    "launcher=slurm",
    "trainer.devices=1",
    "launcher.poll_seconds=0.5",
    "launcher.forward_env=[GLOO_SOCKET_IFNAME,OMP_NUM_THREADS]",
    "follow=false",
)
JOB = "attempts/001/job.json"
SHORT = ("data.train_samples=80", "trainer.max_epochs=2")
# Reads a forwarded variable where a rank runs, and leaves a proof that is not its value.
PROBE = """
import hashlib, os, pathlib
from lightning.pytorch import Callback

class Probe(Callback):
    def __init__(self, file):
        self.file = pathlib.Path(file)

    def on_train_start(self, trainer, module):
        self.file.write_text(hashlib.sha256(os.environ["CANARY"].encode()).hexdigest())
        print("SLURM_JOB_ID", os.environ.get("SLURM_JOB_ID"), "STALE" in os.environ)
"""
# kill -9 to rank 1, as somebody does it by hand, or the kernel where Slurm has no cgroups.
KILLER = """
import os
from lightning.pytorch import Callback

class Killer(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.global_rank == 1 and os.kill(os.getpid(), 9)
"""
KEY = "Bz7Gq0Vn3Yt5Kx8Wm1Rd4Jc6Ph9Sf2Lu" * 2
SECRET = "kept-a4b5c6d7-by-the-canary"
# What a shell inside an allocation may hold; none of it may reach sbatch or the job.
STALE = {
    "SLURM_JOB_ID": "99999",
    "SLURM_NTASKS": "7",
    "SLURM_NTASKS_PER_NODE": "7",
    "SLURM_EXPORT_ENV": "NONE",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_OUTPUT": "elsewhere.log",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_TIMELIMIT": "1",
    "STALE": "1",
}


def env(cluster: SlurmCluster, **more: str) -> dict[str, str]:
    return {name: cluster.env[name] for name in ("PATH", "SLURM_CONF")} | more


def started(cluster: SlurmCluster, cwd: Path, *arguments: str, **more: str) -> str:
    """Submits a run and returns the number of its job."""
    given = (*TINY, *SLURM, *arguments)
    done = distdl(*given, cwd=cwd, env=env(cluster, **more), module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("submitted"))
    return line.split("slurm://")[1].split()[0]


@pytest.fixture
def verb(
    slurm: SlurmCluster, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """`python -m distdl jobs ...` on the cluster, in this process."""

    def run(*arguments: str) -> tuple[int, str]:
        for name, value in env(slurm).items():
            monkeypatch.setenv(name, value)
        said = command("jobs", *arguments)
        return said.code, said.out + said.err

    return run


def whole_log(run: Path) -> str:
    return "\n".join(p.read_text() for p in (run / "attempts/001/logs").glob("slurm-*.log"))


def test_two_nodes_train_as_two_processes_here(
    slurm: SlurmCluster, tmp_path: Path, background: Callable[..., Background]
) -> None:
    """From inside an allocation, with a secret by name, in a folder with a space in its name."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "deploy").write_text(f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----")
    proof = tmp_path / "proof"
    same = (*SHORT, "name=a", "+callbacks.probe._target_=probe.Probe")
    same += (f"+callbacks.probe.file={proof}", "tracking=csv")
    here = background(
        *(*TINY, *same, "trainer.devices=2", "output_dir=here"),
        cwd=folder,
        env={"CANARY": SECRET},
        module=UNCHECKED,
    )
    done = distdl(
        *(*TINY, *SLURM, *same, "follow=true", "trainer.num_nodes=2", "launcher.walltime=0:10:00"),
        "launcher.forward_env=[GLOO_SOCKET_IFNAME,OMP_NUM_THREADS,CANARY]",
        cwd=folder,
        env=env(slurm, CANARY=SECRET, **STALE),
        module=UNCHECKED,
    )
    assert done.returncode == 0, done.stdout + done.stderr + slurm.logs()
    assert here.wait() == 0, here.output()

    run, other = folder / "outputs/default/a", folder / "here/default/a"
    assert losses(run) == losses(other) and len(losses(run)) == 10
    assert (run / "config.yaml").read_bytes() == (other / "config.yaml").read_bytes()
    assert status(run)["state"] == "SUCCEEDED"
    assert "COMPLETED" in done.stdout and "launcher slurm, rank 0 at 127.0.0.1" in done.stdout
    shown = slurm.show(json.loads((run / JOB).read_text())["handle"][8:])
    assert (shown["NumNodes"], shown["Requeue"]) == ("2", "1")
    assert shown["TimeLimit"] == "00:10:00"
    assert f"SLURM_JOB_ID {shown['JobId']} False" in whole_log(run)

    assert "left out   deploy: line 1 holds a private key\n" in done.stderr
    assert (run / "attempts/001/bundle/code/project/probe.py").exists()
    assert not (run / "attempts/001/bundle/code/project/deploy").exists()

    assert len(proof.read_text()) == 64
    told = [done.stdout, done.stderr, slurm.run("scontrol", "show", "job", shown["JobId"])]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [text for text in told if SECRET in text]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_goes_on_where_it_was_taken_away(slurm: SlurmCluster, tmp_path: Path, verb) -> None:
    """Requeued by hand, preempted by a more important job, and cancelled in the end."""
    arguments = ("name=b", "trainer.num_nodes=2", "trainer.max_epochs=200", "tracking=mlflow")
    job = started(slurm, tmp_path, *arguments)
    run = tmp_path / "outputs/default/b"

    def reach(step: int) -> None:
        try:
            until(lambda: "yes" if last_step(run) >= step else "", 120)
        except AssertionError:
            pytest.fail(f"{whole_log(run)}\n{slurm.run('squeue')}\n{slurm.logs()}")

    def mlflow_runs() -> str:
        address = f"file:{tmp_path}/outputs/mlflow.db?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as database:
            rows = database.execute("select run_uuid from runs").fetchall()
            return " ".join(row[0] for row in rows)
        return ""  # it is being made

    reach(3)
    before = until(mlflow_runs, 60)
    slurm.requeue(job)
    first = last_step(run)
    reach(first + 2)
    assert status(run)["restarts"] == 1
    # The ranks end within the grace time, which Slurm by itself takes for the end of the job.
    slurm.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    slurm.until_state(job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    second = last_step(run)
    reach(second + 2)
    assert status(run)["restarts"] == 2
    code, said = verb("status", "outputs/default/b")
    assert (code, "RUNNING, restarted 2 times" in said) == (0, True), said

    assert verb("cancel", "outputs/default/b")[0] == 0
    code, said = verb("wait", "outputs/default/b")
    assert (code, said.split()) == (130, ["CANCELLED", f"slurm://{job}"])
    log = whole_log(run)
    assert f"slurm job {job}, start 3, on n[1-2]" in log
    assert log.count("goes back to the queue") == 1
    # Every step was trained once: each start went on exactly where the one before had ended.
    steps = [step for _, step in samples(run)[1]]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > second
    assert len(list((run / "checkpoints").glob("*.manifest.json"))) > 0
    assert mlflow_runs() == before and len(before.split()) == 1


def test_a_killed_rank_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    done = distdl(
        *(*TINY, *SLURM, *SHORT, "name=k", "trainer.num_nodes=2", "follow=true"),
        "+callbacks.killer._target_=killer.Killer",
        cwd=tmp_path,
        env=env(slurm),
        module=UNCHECKED,
    )
    run = tmp_path / "outputs/default/k"
    assert done.returncode == 137, done.stdout + done.stderr
    assert "rank 1 failed first: killed by SIGKILL on n2" in done.stderr
    told = status(run)
    assert (told["state"], told["exit_code"]) == ("FAILED", 137)
    assert told["first_error"] == {"rank": 1, "host": "n2", "signal": "SIGKILL", "exit_code": 137}
    assert told["error"].startswith("rank 1: killed by SIGKILL on n2")


def test_what_slurm_refuses(
    slurm: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Said],
    without_stage_2: None,
) -> None:
    """Its own words, the key they are about, exit code 2, and no job."""
    for name, value in env(slurm, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo").items():
        monkeypatch.setenv(name, value)
    gpu = "trainer.accelerator=gpu"
    cases = {
        ("launcher.partition=nosuch",): "launcher.partition: sbatch refuses it: invalid partition",
        ("launcher.constraint=nosuch",): "launcher.constraint: sbatch refuses it: Batch job submi",
        (gpu,): "launcher.gpus: sbatch refuses it: Invalid generic resource (gres) specification",
        ('launcher.sbatch=["--reservation=none"]',): "launcher: sbatch refuses it",
    }
    for number, (arguments, words) in enumerate(cases.items()):
        said = command(*TINY, *SLURM, f"name=r{number}", *arguments)
        assert (said.code, words in said.err) == (2, True), said
        assert "Traceback" not in said.err
        assert status(tmp_path / f"outputs/default/r{number}")["state"] == "FAILED"
    assert slurm.run("squeue", "-h") == ""

    # The controller is down: nobody listens on this port.
    config = tmp_path / "down.conf"
    text = (slurm.folder / "slurm.conf").read_text()
    config.write_text(re.sub("SlurmctldPort=.*", f"SlurmctldPort={free_ports(1)[0]}", text))
    monkeypatch.setenv("SLURM_CONF", str(config))
    said = command(*TINY, *SLURM, "name=down")
    assert said.code == 2 and "Slurmctld(primary) at " in said.err
    assert " is DOWN\n" in said.err and not Path("outputs/default/down").exists()


def test_a_sweep_is_one_array(slurm: SlurmCluster, tmp_path: Path, verb) -> None:
    done = distdl(
        *(*TINY, *SLURM, "-m", "name=s", "seed=1,2", "launcher.max_parallel=2"),
        *("data.train_samples=24", "trainer.max_epochs=1"),
        cwd=tmp_path,
        env=env(slurm),
        module=UNCHECKED,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((tmp_path / "outputs/default/s").iterdir())
    handles = {json.loads((run / JOB).read_text())["handle"] for run in runs}
    number = min(handles)[8:].partition("_")[0]
    assert handles == {f"slurm://{number}_0", f"slurm://{number}_1"}
    code, said = verb("wait", "outputs/default/s")
    assert (code, said.count("SUCCEEDED")) == (0, 2), said
    for run in runs:
        assert status(run)["state"] == "SUCCEEDED" and len(losses(run)) == 3
        assert f"run     {run.relative_to(tmp_path)}" in whole_log(run)
    assert slurm.show(f"{number}_1")["ArrayTaskThrottle"] == "2"
    code, said = verb("logs", f"slurm://{number}_1")
    second = next(run for run in runs if f"{number}_1" in (run / JOB).read_text())
    assert code == 0 and said.strip() == whole_log(second).strip()


def test_the_list_asks_slurm_once(
    slurm: SlurmCluster, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    job = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=true")
    held, ended = slurm.run(*job, "--hold"), slurm.run(*job)
    array = slurm.run(*job, "--hold", "--array=0-1")
    slurm.until_state(ended, "COMPLETED")
    numbers = {"held": held, "task": f"{array}_1", "ended": ended, "forgotten": "99999", "cut": "1"}
    for name, number in numbers.items():
        run = RunDirectory(tmp_path / "outputs/e" / name)
        run.create("seed: 1\n", {})
        where = {"launcher": {"_target_": "distdl.launchers.slurm.SlurmLauncher"}}
        attempt = run.begin_attempt({"run_id": f"e/{name}", "where": where})
        jobs.record(attempt, SlurmJob(number))
    (attempt.path / "launch.yaml").write_text("where")
    asked: list[str] = []
    really = commands.run

    def run_it(*words: str, **more: Any) -> Any:
        asked.append(words[0])
        return really(*words, **more)

    def listed() -> dict[str, str]:
        asked.clear()
        rows = [line.split("\t") for line in command("jobs", "list").out.splitlines()]
        return {row[0].rpartition("/")[2]: row[2] for row in rows}

    monkeypatch.setattr(commands, "run", run_it)
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.env[name])
    states = {"held": "PENDING", "task": "PENDING", "forgotten": "UNKNOWN", "cut": "DAMAGED"}
    states |= {"ended": "SUCCEEDED"}
    assert listed() == states and asked == ["squeue", "sacct"]
    assert listed() == states and asked == ["squeue", "sacct"]
    assert command("jobs", "status", "outputs/e/held").out.count("PENDING") == 1
    slurm.run("scancel", held, array)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    monkeypatch.setattr(commands, "TIMEOUT", 1)  # squeue asks DNS for another one, for minutes
    gone = {"held": "UNKNOWN", "task": "UNKNOWN"}
    assert listed() == states | gone and asked == ["squeue"], "not for each of them"

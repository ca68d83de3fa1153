"""Nothing hangs in silence: one rank of two does something wrong (faults.py), and the report names
it, its step, the cause and the user's line, soon enough, and nothing is left running."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from distdl.job import EXIT_HUNG
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import UNCHECKED, Background, environment, free_port, status
from tests.limits import little_memory, small_disk
from tests.multiprocess import faults
from tests.waiting import until

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
TIMEOUT_S, SOON_S = 3, 5  # of the watchdog; then the report has to be there
TWO = (
    *("model=net", "~data", "~optimizer", "~schedule", "trainer.accelerator=cpu"),
    *("trainer.max_epochs=2", "checkpoint.monitor=null", "tracking=none", "name=r"),
    f"watchdog.timeout={TIMEOUT_S}",
)


class Expected(NamedTuple):
    """What the report has; `function` is where the user's line is."""

    cause: str
    function: str = ""
    rank: int = 1
    code: int = EXIT_HUNG
    steps: tuple[int, ...] = (faults.AT,)
    overrides: tuple[str, ...] = ()
    timeout: int = TIMEOUT_S


CASES = {
    "loop": Expected("endless loop", "loop"),
    "stop": Expected("stopped"),
    "raise": Expected(
        *("exception", "on_train_batch_start", 1, 1),
        overrides=("+callbacks.watcher._target_=mine.Watcher",),
    ),
    "worker": Expected("data worker blocked", "__getitem__"),
    "lock": Expected("lock", "deadlock"),
    "slow": Expected("slow rank", "misbehave", overrides=("trainer.accumulate_grad_batches=5",)),
    "asleep": Expected("blocked", "misbehave"),
    # gloo aborts one of the ranks: which one, nobody can tell.
    "skip": Expected("skipped collective", code=134),
    "shape": Expected("mismatched collective", "misbehave", code=134),
    "uneven": Expected("uneven batches", code=134),
    "memory": Expected("out of memory (killed)", code=137),
    # The training goes on until rank 0 has tried to write its checkpoint.
    "disk": Expected(
        *("disk is full", "", 0, 1),
        steps=tuple(range(faults.AT, faults.EPOCH)),
        overrides=("model.width=65536", f"checkpoint.every_n_steps={faults.AT}"),
    ),
}
CHOSEN = list(CASES) if MATRIX else [*CASES][:4]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(faults.__file__, tmp_path / "mine.py")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/net.yaml").write_text("_target_: mine.Net\nwidth: 2\n")
    return tmp_path


def running(project: Path) -> list[psutil.Process]:
    """The processes that were started in a project's folder: ranks, monitors, loaders' workers."""
    return [
        each
        for each in psutil.process_iter(["cwd", "status"])
        if each.info["cwd"] == str(project) and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


def first_report(project: Path, cause: str, output: Callable[[], str]) -> float:
    """Seconds from the fault until the report has the cause."""
    report = project / "outputs/default/r/attempts/001/incident.json"
    until(lambda: f'"cause": "{cause}"' in text_of(report), 60, lambda: output() + text_of(report))
    return time.time() - min(float(path.read_text()) for path in project.glob("began-*"))


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def line_of(fault: str, function: str) -> set[str]:
    """The user's lines that may be named."""
    lines = enumerate(Path(faults.__file__).read_text().splitlines(), 1)
    return {f"mine.py, line {n}, in {function}" for n, line in lines if line.endswith(f"# {fault}")}


def check(project: Path, fault: str, expected: Expected, seconds: float) -> dict[str, Any]:
    """The report at the end of the command, `seconds` after the fault."""
    report = json.loads((project / "outputs/default/r/attempts/001/incident.json").read_text())
    place = f"{report['rank']} | {report['step']} | {report['cause']} | {report['where']}"
    print(f"| {fault} | {place} | {seconds:.1f} s |")
    assert (report["rank"], report["cause"]) == (expected.rank, expected.cause), report
    assert report["step"] in expected.steps, report
    if expected.function:
        assert report["where"] in line_of(fault, expected.function), report
    assert seconds < expected.timeout + SOON_S
    until(lambda: not running(project), 10, lambda: str(running(project)))
    return report


@pytest.fixture
def resources(project: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What a fault needs on this machine; returns variables."""
    if request.getfixturevalue("fault") == "disk":
        with small_disk(project / "outputs"):
            yield {}
    elif request.getfixturevalue("fault") == "memory":
        with little_memory() as group:
            yield {"GROUP": str(group)}
    else:
        yield {}


@pytest.mark.parametrize("fault", CHOSEN)
def test_the_report_names_the_rank_and_the_cause(fault, project, resources, background) -> None:
    expected = CASES[fault]
    job: Background = background(
        *(*TWO, "trainer.devices=2", *expected.overrides),
        cwd=project,
        env={"FAULT": fault, **resources},
        module=UNCHECKED,
    )
    seconds = first_report(project, expected.cause, job.output)
    assert job.wait() == expected.code, job.output()
    report = check(project, fault, expected, seconds)
    record = status(project / "outputs/default/r")
    assert (record["state"], record["exit_code"]) == ("FAILED", expected.code)
    assert f"  cause   {expected.cause}: " in job.output()
    if fault == "skip":  # the call that the other rank made
        assert any(line in str(report["ranks"]) for line in line_of(fault, "misbehave"))


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_host_that_does_not_answer_any_more(project) -> None:
    """torchrun on each of two hosts, which share the run's folder. The second one's cable is
    pulled: neither end hears of it."""
    with Hosts("node1", "node2") as hosts:
        port, jobs, logs = free_port(), [], [project / f"log{number}" for number in range(2)]
        for number, name in enumerate(hosts.names):
            torchrun = (
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                "--nproc-per-node=1",
                f"--node-rank={number}",
            )
            where = (f"--master-addr={hosts.address('node1')}", f"--master-port={port}")
            command = [
                sys.executable,
                *torchrun,
                *where,
                "-m",
                "distdl",
                *TWO,
                "watchdog.timeout=6",
            ]
            env = environment(FAULT="host", GLOO_SOCKET_IFNAME="eth0")
            with logs[number].open("w") as log:
                options: dict[str, Any] = {"stdout": log, "stderr": log}
                jobs.append(hosts.popen(name, command, project, env, **options))
        until(lambda: [*project.glob("began-*")], 120, lambda: text_of(logs[0])[-3000:])
        hosts.cut("node2")
        steps = tuple(range(faults.AT, faults.EPOCH))
        expected = Expected("lost host", steps=steps, timeout=6)
        seconds = first_report(project, expected.cause, lambda: text_of(logs[0])[-3000:])
        codes = [job.wait(60) for job in jobs]
        report = check(project, "host", expected, seconds)
    assert report["host"] == "node2" and 0 not in codes
    record = status(project / "outputs/default/r")
    assert (record["state"], record["exit_code"]) == ("FAILED", EXIT_HUNG)


# What takes longer than the timeout and is no hang -> overrides.
EXCUSES = {
    "debugger": (),
    "terminal": (),
    "prepare": (),
    "validation": ("trainer.num_sanity_val_steps=0",),
    "checkpoint": (f"checkpoint.every_n_steps={faults.AT}",),
    "compile": (),
    "asleep": ("watchdog.enabled=false",),
}


@pytest.mark.parametrize("excuse", [*EXCUSES][: None if MATRIX else 1])
def test_what_only_takes_long_is_no_hang(excuse: str, project: Path, background) -> None:
    ours, terminal = os.openpty()
    job: Background = background(
        *(*TWO, "trainer.max_epochs=1", "trainer.devices=2", *EXCUSES[excuse]),
        cwd=project,
        env={"FAULT": excuse},
        module=UNCHECKED,
        stdin=terminal,
    )
    job.until(lambda: [*project.glob("began-*")])
    if excuse == "debugger":
        job.until(lambda: "(Pdb)" in job.output())
    if excuse in ("debugger", "terminal"):
        end = time.monotonic() + faults.PAUSE_S
        job.until(lambda: time.monotonic() > end)
    if excuse == "terminal":
        stopped = [each for each in running(project) if each.status() == psutil.STATUS_STOPPED]
        assert len(stopped) == 2
        for each in stopped:
            each.resume()
    os.write(ours, b"c\n")
    assert job.wait() == 0, job.output()
    attempt = project / "outputs/default/r/attempts/001"
    assert status(attempt.parents[1])["state"] == "SUCCEEDED"
    assert not {"incident.json", "health"} & {path.name for path in attempt.iterdir()}
    assert not [*attempt.glob("errors/*")]
    for number in (ours, terminal):
        os.close(number)

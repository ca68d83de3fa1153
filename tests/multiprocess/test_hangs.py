"""Nothing hangs in silence: one rank of two does something wrong (faults.py), and the report names
it, its step, the cause and the user's line, soon enough, and nothing is left running."""

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from distdl.util.exit_codes import EXIT_HUNG
from tests.cluster.hosts import Hosts, why_not
from tests.conftest import UNCHECKED, distdl, environment, free_port, status
from tests.limits import hanging_store, little_memory, small_disk
from tests.multiprocess import faults
from tests.waiting import until

MATRIX = bool(os.environ.get("DISTDL_MATRIX"))
TIMEOUT_S = 3  # of the watchdog
WAIT_S = 60  # for the report, in a test: an idle machine takes TIMEOUT_S and 3 to 6 s more
ONE = (
    "model=net",
    "~data",
    "~optimizer",
    "~schedule",
    "trainer.accelerator=cpu",
    "tracking=none",
    "trainer.max_epochs=2",
    "checkpoint.monitor=null",
    "name=r",
)
TWO = (*ONE, "trainer.devices=2", f"watchdog.timeout={TIMEOUT_S}")
RUN = "outputs/default/r"
SAVED = f"checkpoint.every_n_steps={faults.AT}"
UNSHARED = "trainer.use_distributed_sampler=false"
AFTER = tuple(range(faults.AT, faults.EPOCH))


class Expected(NamedTuple):
    """What the report has; `function` is where the user's line is."""

    cause: str
    function: str = ""
    rank: int = 1
    code: int = EXIT_HUNG
    steps: tuple[int, ...] = (faults.AT,)
    overrides: tuple[str, ...] = ()


WATCHER = ("+callbacks.watcher._target_=mine.Watcher",)
CASES = {
    "loop": Expected("endless loop", "loop"),
    "stop": Expected("stopped"),
    "worker": Expected("data worker blocked", "__getitem__"),
    # The training goes on until rank 0 has tried to write its checkpoint.
    "disk": Expected("disk is full", "", 0, 1, AFTER, ("model.width=65536", SAVED)),
    "raise": Expected("exception", "on_train_batch_start", code=1, overrides=WATCHER),
    "lock": Expected("lock", "deadlock"),
    "slow": Expected("slow rank", "misbehave", overrides=("trainer.accumulate_grad_batches=5",)),
    "asleep": Expected("blocked", "misbehave"),
    # gloo aborts one of the ranks: which one, nobody can tell.
    "skip": Expected("skipped collective", code=134),
    "shape": Expected("mismatched collective", "misbehave", code=134),
    "log": Expected("skipped collective", "misbehave"),
    "lone-checkpoint": Expected("skipped collective", "misbehave"),
    # Its worker had two more batches ready.
    "stopped-worker": Expected("stopped", steps=AFTER),
    "uneven": Expected("uneven batches", code=134),
    "memory": Expected("out of memory (killed)", code=137),
}
LIMITS = {"disk": lambda project: small_disk(project / "outputs")}
LIMITS["memory"] = lambda project: little_memory()


@pytest.fixture
def project(tmp_path):
    shutil.copy(faults.__file__, tmp_path / "mine.py")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/net.yaml").write_text("_target_: mine.Net\nwidth: 2\n")
    return tmp_path


def running(project):
    """The processes that were started in a project's folder: ranks, monitors, loaders' workers."""
    return [
        each
        for each in psutil.process_iter(["cwd", "status"])
        if each.info["cwd"] == str(project) and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


def first_report(project, cause, output):
    """Seconds from the fault until the report has the cause."""
    report = project / RUN / "attempts/001/incident.json"
    until(
        lambda: f'"cause": "{cause}"' in text_of(report), WAIT_S, lambda: output() + text_of(report)
    )
    return time.time() - min(float(path.read_text()) for path in project.glob("began-*"))


def text_of(path):
    return path.read_text() if path.exists() else ""


def line_of(fault, function):
    """The user's lines that may be named."""
    lines = enumerate(Path(faults.__file__).read_text(encoding="utf-8").splitlines(), 1)
    return {f"mine.py, line {n}, in {function}" for n, line in lines if line.endswith(f"# {fault}")}


def check(project, fault, expected, seconds):
    """The report at the end of the command, `seconds` after the fault."""
    report = json.loads((project / RUN / "attempts/001/incident.json").read_text())
    place = f"{report['rank']} | {report['step']} | {report['cause']} | {report['where']}"
    print(f"| {fault} | {place} | {seconds:.1f} s |")
    assert (report["rank"], report["cause"]) == (expected.rank, expected.cause), report
    assert report["step"] in expected.steps, report
    if expected.function:
        assert report["where"] in line_of(fault, expected.function), report
    until(lambda: not running(project), 10, lambda: str(running(project)))
    record = status(project / RUN)
    assert (record["state"], record["exit_code"]) == ("FAILED", expected.code)
    assert record["first_error"]["rank"] == expected.rank, "as the report has it"
    return report


@pytest.mark.parametrize("fault", CASES if MATRIX else ["stop", "disk"])
def test_the_report_names_the_rank_and_the_cause(fault, project, background):
    expected = CASES[fault]
    words = (*TWO, *expected.overrides)
    with LIMITS.get(fault, lambda _: contextlib.nullcontext())(project) as group:
        env = {"FAULT": fault, "GROUP": str(group)}
        job = background(*words, cwd=project, env=env, module=UNCHECKED)
        seconds = first_report(project, expected.cause, job.output)
        assert job.wait() == expected.code, job.output()
        report = check(project, fault, expected, seconds)
    assert f"  cause   {expected.cause}: " in job.output()
    if fault == "skip":  # the call that the other rank made
        assert any(line in str(report["ranks"]) for line in line_of(fault, "misbehave"))


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_host_that_does_not_answer_any_more(project):
    """torchrun on each of two hosts, which share the run's folder. The second one's cable is
    pulled: neither end hears of it."""
    with Hosts("node1", "node2") as hosts:
        port = free_port()
        jobs = []
        logs = [project / f"log{number}" for number in range(2)]
        for number, name in enumerate(hosts.names):
            where = (
                f"--nnodes=2 --nproc-per-node=1 --node-rank={number} --master-port={port}"
                f" --master-addr={hosts.address('node1')} -m distdl"
            )
            torchrun = [sys.executable, "-m", "torch.distributed.run", *where.split()]
            env = environment(FAULT="host", GLOO_SOCKET_IFNAME="eth0")
            with logs[number].open("w") as log:
                command = [*torchrun, *ONE, "watchdog.timeout=6"]
                jobs.append(hosts.popen(name, command, project, env, stdout=log, stderr=log))
        until(lambda: [*project.glob("began-*")], 120, lambda: text_of(logs[0])[-3000:])
        hosts.cut("node2")
        expected = Expected("lost host", steps=AFTER)
        seconds = first_report(project, expected.cause, lambda: text_of(logs[0])[-3000:])
        codes = [job.wait(60) for job in jobs]
        report = check(project, "host", expected, seconds)
    assert report["host"] == "node2"
    assert 0 not in codes


def test_ranks_of_which_one_has_fewer_batches_do_not_begin(project):
    env = {"FAULT": "refused"}
    done = distdl(*TWO, UNSHARED, cwd=project, env=env, module=UNCHECKED)
    assert done.returncode == 2
    assert "3 batches on rank 0 and 2 on rank 1" in done.stderr
    assert "trainer.limit_train_batches=2" in done.stderr


# What takes longer than the timeout and is no hang -> overrides. Where there is a validation, the
# ranks have different numbers of batches for it.
EXCUSES = {
    "debugger": (),
    "debugger of one device": ("trainer.devices=1",),
    "prepare first validation checkpoint compile": (),
    "terminal": (),
    "asleep": ("watchdog.enabled=false",),
}


@pytest.mark.parametrize("excuse", EXCUSES if MATRIX else [*EXCUSES][:1])
def test_what_only_takes_long_is_no_hang(excuse, project, background):
    ours, terminal = os.openpty()
    words = (*TWO, "trainer.max_epochs=1", SAVED, "trainer.num_sanity_val_steps=0", UNSHARED)
    streams = {"module": UNCHECKED, "stdin": terminal}
    job = background(*words, *EXCUSES[excuse], cwd=project, env={"FAULT": excuse}, **streams)
    job.until(lambda: [*project.glob("began-*")])
    if "debugger" in excuse:
        job.until(lambda: "(Pdb)" in job.output())
    if "debugger" in excuse or excuse == "terminal":
        end = time.monotonic() + faults.PAUSE_S
        job.until(lambda: time.monotonic() > end)
    if excuse == "terminal":
        stopped = [each for each in running(project) if each.status() == psutil.STATUS_STOPPED]
        assert len(stopped) == 2
        for each in stopped:
            each.resume()
    os.write(ours, b"c\n")
    assert job.wait() == 0, job.output()
    attempt = project / RUN / "attempts/001"
    assert status(project / RUN)["state"] == "SUCCEEDED"
    assert not {"incident.json", "health"} & {path.name for path in attempt.iterdir()}
    assert not [*attempt.glob("errors/*")]
    for number in (ours, terminal):
        os.close(number)


@pytest.mark.skipif(not MATRIX, reason="make matrix")
def test_a_run_is_not_done_while_a_rank_is_in_its_last_hook(project, background):
    job = background(
        *TWO, "trainer.max_epochs=1", cwd=project, env={"FAULT": "end"}, module=UNCHECKED
    )
    job.until(lambda: [*project.glob("began-*")])
    end = time.monotonic() + faults.PAUSE_S / 2  # in which rank 0 has ended its own
    job.until(lambda: time.monotonic() > end)
    assert status(project / RUN)["state"] == "RUNNING"
    assert job.wait() == 0, job.output()
    assert status(project / RUN)["state"] == "SUCCEEDED"


@pytest.mark.skipif(not MATRIX, reason="make matrix")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_store_that_hangs_is_waited_for(devices, project, background):
    """The user is told, nobody is ended for that time, and the run goes on."""
    with hanging_store(project) as store:
        words = (
            *TWO,
            f"trainer.devices={devices}",
            f"output_dir={store.path}",
            SAVED,
            "trainer.log_every_n_steps=1",
            "trainer.max_epochs=1",
        )
        job = background(*words, cwd=project, env={"FAULT": "steady"}, module=UNCHECKED)
        job.until(lambda: [*store.behind.glob("default/r/checkpoints/*.manifest.json")])
        begin = time.monotonic()
        store.hang()
        job.until(lambda: "has not answered" in job.output())
        assert time.monotonic() - begin < TIMEOUT_S + 10
        refused = distdl("jobs", "list", str(store.path), cwd=project)
        assert refused.returncode == 2
        assert "its store has not answered" in refused.stderr
        end = begin + 20
        job.until(lambda: time.monotonic() > end)
        store.answer()
        assert job.wait() == 0, job.output()
        assert "answers again" in job.output()
        assert status(store.path / "default/r")["state"] == "SUCCEEDED"
        assert not [*store.behind.glob("default/r/attempts/001/errors/*")]

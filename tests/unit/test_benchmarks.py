"""`make bench`: its tables and goals, a part that fails, and its parts with tiny counts."""

from __future__ import annotations

import http.server
import importlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from lightning.pytorch.profilers import Profiler

from benchmarks import (
    gpu,
    held_out,
    listing,
    overhead,
    pair,
    predict,
    run,
    runs,
    startup,
    straggler,
    table,
    tracking,
    traffic,
    turns,
    watchdog,
)
from benchmarks.table import Goal, Result
from distdl.worker import main
from tests.unit import stepper


def result(**more: object) -> Result:
    rows = [table.row("one", [3.0, 1.0, 2.0], "s")]
    return Result("A (s)", "B", "at most 0.5", 0.25, rows, "python -m x", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("goal", "measured", "same", "state"),
    [
        ("at most 0.25", 0.25, None, "reached"),
        ("at most 0.25", 0.26, None, "not reached"),
        ("at least 1.3", 1.31, None, "reached"),
        ("at least 1.3", 1.29, (0.5, 0.55), "not reached"),
        ("at least 0.99", 0.97, None, "not reached"),
        ("at least 0.99", 0.97, (0.96, 1.03), "reached"),
        ("at least 0.99", 0.95, (0.96, 1.03), "not reached"),
        ("at most 1.01", 1.02, (0.97, 1.03), "reached"),
        ("at most 1.01", 1.02, (0.7, 1.3), "undecided"),
        # Further than 2 % from 1: what the competitor does by chance does not count.
        ("at least 0.97", 0.965, (0.96, 1.04), "not reached"),
        ("at least 0.97", None, None, "not run"),
    ],
)
def test_when_a_goal_is_reached(goal, measured, same, state) -> None:
    assert Goal("x", goal, measured, same).state == state


def test_goals_and_results_as_text() -> None:
    row = Goal("a to b", "at most 1.01", 1.004, (0.99, 1.015)).row()
    assert row == "| CPU | a to b | <= 1.01 | 1.004 (A/A 0.990 to 1.015) | reached |"
    assert "**not reached**" in Goal("a", "at least 2", 1.0).row()
    with pytest.raises(ValueError, match="begins with"):
        Goal("a", "as fast as possible", 1.0).row()
    made = result(more=[Goal("c to d", "at least 2", 1.5)])
    text = made.markdown()
    assert "**0.250** (goal: at most 0.5: reached)" in text
    assert "c to d: **1.500** (goal: at least 2: not reached)." in text
    assert "| one | 2 | 1 | 3 | s | 3 |" in text
    assert [goal.what for goal in made.goals] == ["A (s)", "c to d"]


def test_the_spread_of_the_competitor_against_itself() -> None:
    low, high = table.against_itself([100, 101, 99, 100, 102], [101, 99, 100, 102, 100])
    assert 0.96 < low < 1 < high < 1.04
    wide = table.against_itself([100, 150, 60, 100, 120], [60, 100, 130, 90, 110])
    assert wide[0] < low and high < wide[1]
    assert table.against_itself([5.0] * 5, [5.0] * 5) == (1, 1)
    # What slows a whole round is in neither.
    assert table.paired([2, 40, 6], [1, 20, 3]) == 2
    assert table.against_itself([1, 20, 3], [1, 20, 3]) == (1, 1)
    assert table.added([12, 43, 9], [10, 40, 8]) == (2, 1, 3)
    middle, low, high = table.added([5.0, 6.0, 7.0, 5.5, 6.5] * 8, [5.0] * 40)
    assert 0.5 <= low <= middle == 1 <= high <= 1.5


def test_a_part_that_fails_leaves_the_others_alone(monkeypatch, tmp_path, capsys) -> None:
    def broken() -> Result:
        raise RuntimeError("no room on the disk")

    monkeypatch.setattr(run, "ALL", ("startup", "overhead", "traffic"))
    monkeypatch.setattr(run, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(startup, "main", result)
    monkeypatch.setattr(overhead, "main", broken)
    monkeypatch.setattr(traffic, "main", lambda: traffic.Table(["| ddp | 1 | 2 | 3 | 4 |"]))
    assert run.main([]) == 1
    page = run.PAGE.read_text()
    assert "## A (s)" in page and "| ddp | 1 | 2" in page
    assert "## overhead: failed\n\n```\nRuntimeError: no room on the disk\n```" in page
    assert page.index("| where | ratio |") < page.index("## A (s)")
    out = capsys.readouterr().out
    assert "startup: done in" in out and "failed: overhead" in out
    # Some of them: nothing is written.
    run.PAGE.unlink()
    assert run.main(["startup"]) == 0 and not run.PAGE.exists()
    assert "| CPU | A (s) | <= 0.5 | 0.250 | reached |" in capsys.readouterr().out
    assert run.main(["startups"]) == 2
    assert run.main(["--help"]) == 0 and "parts: startup, overhead" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_goals_are_listed_as_not_run(capsys) -> None:
    assert run.main(["gpu"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out
    page = run.page([], gpu.not_run(), 60.0)
    assert page.count("| GPU | ") == page.count("| not run |") == 4
    assert "`python -m benchmarks.run gpu`" in page
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        gpu.main()


def test_every_part_can_be_imported_and_has_a_main() -> None:
    for name in run.ALL:
        assert callable(importlib.import_module(f"benchmarks.{name}").main), name
        assert Path(run.__file__).with_name(f"{name}.py").is_file()


def test_the_parts_of_a_step_exclude_each_other() -> None:
    parts = overhead.Parts()
    inner = parts.timed("inner", lambda: time.sleep(0.02))

    def both() -> None:
        time.sleep(0.01)
        inner(), inner()

    parts.timed("outer", both)()
    times = parts.per_step(steps=1)
    assert times["inner"] == pytest.approx(40_000, rel=0.5) and times["inner"] >= 40_000
    assert 10_000 <= times["outer"] < 30_000, "the outer part holds the inner one"


def test_what_distdl_adds_is_taken_apart(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(overhead, "PARTS_STEPS", 60)
    parts = overhead.parts_of(overhead.distdl, tmp_path)
    assert {"StepMetrics", "Checkpointer", "Progress", overhead.DISPATCH} <= set(parts)
    assert parts[overhead.LOGGERS] > 0, "the journal was given nothing"
    assert all(value > -5 for value in parts.values()), parts
    bare = overhead.parts_of(overhead.barebones, tmp_path)
    assert set(bare) == {overhead.DISPATCH}, "Trainer(barebones=True) has callbacks"
    shares = [float(r.split("|")[2]) for r in overhead.part_rows([parts], [bare], whole=1e6)]
    assert sum(shares) == pytest.approx(1e6, rel=1e-3), "the parts do not sum to the whole"


TINY = ("model=tiny", "data=tiny", "data.steps=2", "optimizer=none", "schedule=none")
TINY += ("tracking=none", "trainer.accelerator=cpu", "trainer.max_epochs=1")


def test_a_worker_that_fails_is_reported(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"the worker ended with 1: (.|\n)*TypeError"):
        runs.work(runs.create_run(tmp_path, *TINY, "data.steps=none"))


def test_the_end_of_a_benchmark_names_no_training_to_resume(tmp_path, capsys) -> None:
    task = ("task=benchmark", "task.warmup=1", "task.windows=1", "task.steps=2")
    for overrides, resumes in (((), True), (task, False)):
        path = str(runs.create_run(tmp_path, *TINY, *overrides).path)
        assert main.main([path, path]) == 0
        out = capsys.readouterr().out
        assert "python -m distdl report" in out and ("resume" in out) == resumes


def test_only_a_profiler_that_is_asked_for_is_entered(tmp_path, monkeypatch) -> None:
    entered: list[str] = []
    profile = Profiler.profile
    monkeypatch.setattr(Profiler, "profile", lambda s, n: entered.append(n) or profile(s, n))
    runs.work(runs.create_run(tmp_path, *TINY))
    assert not entered
    profiled = runs.create_run(tmp_path, *TINY, "trainer.profiler=simple")
    runs.work(profiled)
    assert any(name.endswith("training_step") for name in entered)
    assert "FIT Profiler Report" in (profiled.path / "attempts/001/logs/rank_0.log").read_text()


def test_a_rank_that_fails_ends_the_pair() -> None:
    code = (
        "import json, os, sys, time; rank = os.environ['RANK'];"
        "print(rank, json.load(open(sys.argv[1]))['plan']);"
        "rank == '1' and sys.exit('broken'); time.sleep(3600)"
    )
    with pytest.raises(RuntimeError, match=r"a rank ended with 1: (.|\n)*broken"):
        pair.start(code, {"plan": "a plan"})
    assert len(set(pair.free_ports(5))) == 5


class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.end_headers()
        self.wfile.write(self.path.encode() + body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_proxy_delays_a_request_and_forwards_it() -> None:
    behind = http.server.HTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{behind.server_port}"
    command = [sys.executable, "-m", "benchmarks.delay", address, "0.1"]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout
        uri = proxy.stdout.readline().strip()
        started = time.monotonic()
        with urllib.request.urlopen(f"{uri}/a?b=c", data=b" and a body") as answer:
            assert (answer.status, answer.read()) == (201, b"/a?b=c and a body")
        assert time.monotonic() - started >= 0.1 and tracking.requests(uri) == 1
    finally:
        proxy.kill()
        proxy.wait()
        behind.shutdown()
        behind.server_close()


def test_arms_take_turns(tmp_path) -> None:
    file, logs = tmp_path / "steps", tmp_path / "logs"
    logs.mkdir()

    def arm(name: str, seconds: float = 0.0, every: int = 1, dies: int = -1) -> turns.Arm:
        steps = turns.steps_in_all(2, 3, 4, every)
        arguments = [name, str(seconds), str(steps), str(file), str(dies)]
        return turns.Arm(stepper.main, arguments, every=every)

    settled: list[str] = []
    arms = {"a": arm("a"), "b": arm("b", 0.02), "c": arm("c", every=2)}
    blocks, ends = turns.take(arms, 4, logs, lambda: settled.extend(file.read_text().splitlines()))
    assert {name: len(times) for name, times in blocks.items()} == {"a": 4, "b": 4, "c": 2}
    assert min(blocks["b"]) >= 0.06 > min(blocks["a"]) and ends.keys() == arms.keys()
    # The first block of each does not count; then everyone is first in his turn.
    assert len(settled) == 3 * (2 + 3)
    names = [line.split()[0] for line in file.read_text().splitlines()[len(settled) :]]
    order = "abc" + "ba" + "cab" + "ab"
    assert "".join(names) == "".join(3 * name for name in order) + "abc"
    with pytest.raises(RuntimeError, match="broken in step 6"):
        turns.take({"a": arm("a"), "d": arm("d", dies=6)}, 4, logs)


def test_both_arms_of_the_tracking_benchmark_stop_before_each_block(monkeypatch, tmp_path) -> None:
    """Their last block is followed by one step, and the step that is logged lies in a block."""
    small = {"WARM_UP": 1, "STEPS": 2, "EVERY": 2, "BATCH": 2, "WIDTH": 8, "DEPTH": 1}
    for name, value in small.items():
        monkeypatch.setattr(tracking, name, value)
    stops: list[int] = []
    stop = lambda step, first, steps: stops.append((step - first) % steps)  # noqa: E731
    monkeypatch.setattr(turns, "stop_before", stop)
    total = turns.steps_in_all(1, 2, 3)
    assert total == 1 + 2 * 4 + 1
    runs.rank_main(str(tracking.create_run(tmp_path, total, "tracking=none")))
    assert len(stops) == total and stops[-1] == 0
    tracking.lightning(str(tmp_path), f"sqlite:///{tmp_path}/mlflow.db", str(total))
    assert stops[total:] == stops[:total]


SLOW, LINK = "rank 1 (a) is slow: the forward takes 49 ms longer", "the link between the ranks is "


@pytest.mark.parametrize(
    ("part", "status", "log", "right"),
    [
        ("forward", SLOW, f"12:00 WARNING {SLOW}", True),
        ("forward", SLOW, f"{SLOW}\nrank 0 (a) is slow: fetching data takes 9 ms longer", False),
        ("data", SLOW, SLOW, False),
        ("forward", None, "", False),
        ("link", LINK + "slow: 42 ms of a step of 71 ms", "", True),
        ("", None, "", True),
        ("", None, SLOW, False),
    ],
)
def test_a_verdict_is_right_if_nothing_else_is_said(part, status, log, right, tmp_path) -> None:
    slow = straggler.create(tmp_path, part, 1, batch_norm=True)
    (slow.path / "attempts/001/status.json").write_text(json.dumps({"straggler": status}))
    (slow.path / "attempts/001/logs").mkdir(exist_ok=True)
    (slow.path / "attempts/001/logs/rank_0.log").write_text(log)
    straggler.read(slow)
    assert slow.right == right
    page = straggler.Verdicts([slow, slow]).markdown()
    assert f"| {part or 'none (undisturbed)'} | {2 * right} of 2" in page and "not run" in page


def test_small_parts(monkeypatch) -> None:
    size = gpu.Size(batch=2, pixels=32, classes=3, warm_up=1, steps=2, model="resnet18")
    loop = gpu.Loop(torch.device("cpu"), size)
    before = next(loop.model.parameters()).clone()
    assert loop.rate() > 0
    assert not torch.equal(before, next(loop.model.parameters())), "nothing was trained"
    predicted = predict.main(images=20, repeats=1)
    assert "task=predict" in predicted.what and predicted.ratio > 0
    monkeypatch.setattr(watchdog, "SIZES", {1: "one process"})
    for name, value in {"WARM_UP": 2, "STEPS": 4, "ROUNDS": 2}.items():
        monkeypatch.setattr(watchdog, name, value)
    watched = watchdog.main(groups=1)
    assert "one process, with it: a step" in watched.markdown() and len(watched.goals) == 1
    listed = listing.main(classes=3, files=4, repeats=1)
    assert "listing 12 images" in listed.what and listed.ratio > 0
    text = held_out.main().markdown()
    assert "docs/scaling.md" in text and "mean error of no model" in text

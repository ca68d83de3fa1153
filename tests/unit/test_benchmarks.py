"""`make bench`: its tables and goals, a part that fails, and its parts with tiny counts."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from benchmarks import (
    gpu,
    held_out,
    listing,
    overhead,
    pair,
    run,
    runs,
    startup,
    table,
    tracking,
    traffic,
    turns,
)
from benchmarks.table import Goal, Result
from tests.unit import stepper


def result(**more: object) -> Result:
    rows = [table.row("one", [3.0, 1.0, 2.0], "s")]
    return Result("A (s)", "B", "at most 0.5", 0.25, rows, "python -m x", **more)  # type: ignore[arg-type]


# --- what is written ---


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
def test_when_a_goal_is_reached(
    goal: str, measured: float | None, same: tuple[float, float] | None, state: str
) -> None:
    assert Goal("x", goal, measured, same).state == state


def test_a_goal_is_a_row_of_the_first_table() -> None:
    said = Goal("a to b", "at most 1.01", 1.004, (0.99, 1.015)).row()
    assert said == "| CPU | a to b | <= 1.01 | 1.004 (A/A 0.990 to 1.015) | reached |"
    assert "**not reached**" in Goal("a", "at least 2", 1.0).row()
    with pytest.raises(ValueError, match="begins with"):
        Goal("a", "as fast as possible", 1.0).row()


def test_a_result_says_its_goals_with_median_and_spread() -> None:
    said = result(more=[Goal("c to d", "at least 2", 1.5)])
    text = said.markdown()
    assert "**0.250** (goal: at most 0.5: reached)" in text
    assert "c to d: **1.500** (goal: at least 2: not reached)." in text
    assert "| one | 2 | 1 | 3 | s | 3 |" in text
    assert [goal.what for goal in said.goals] == ["A (s)", "c to d"]


def test_the_spread_of_the_competitor_against_itself() -> None:
    low, high = table.against_itself([100, 101, 99, 100, 102], [101, 99, 100, 102, 100])
    assert 0.96 < low < 1 < high < 1.04
    wide = table.against_itself([100, 150, 60, 100, 120], [60, 100, 130, 90, 110])
    assert wide[0] < low and high < wide[1]
    assert table.against_itself([5.0] * 5, [5.0] * 5) == (1, 1)
    # What slows a whole round is in neither.
    assert table.paired([2, 40, 6], [1, 20, 3]) == 2
    assert table.against_itself([1, 20, 3], [1, 20, 3]) == (1, 1)


# --- the whole ---


def test_a_part_that_fails_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ALL", ("startup", "overhead", "traffic"))
    monkeypatch.setattr(run, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(startup, "main", lambda: result())

    def broken() -> Result:
        raise RuntimeError("no room on the disk")

    monkeypatch.setattr(overhead, "main", broken)
    monkeypatch.setattr(traffic, "main", lambda: traffic.Table(["| ddp | 1 | 2 | 3 | 4 |"]))
    assert run.main([]) == 1
    page = run.PAGE.read_text()
    assert "## A (s)" in page and "| ddp | 1 | 2" in page
    assert "## overhead: failed\n\n```\nRuntimeError: no room on the disk\n```" in page
    assert page.index("| where | ratio |") < page.index("## A (s)")
    said = capsys.readouterr().out
    assert "startup: done in" in said and "failed: overhead" in said
    # Some of them: nothing is written.
    run.PAGE.unlink()
    assert run.main(["startup"]) == 0
    assert not run.PAGE.exists() and "| CPU | A (s) | <= 0.5 | 0.250 | reached |" in (
        capsys.readouterr().out
    )
    assert run.main(["startups"]) == 2
    assert run.main(["--help"]) == 0 and "parts: startup, overhead" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_goals_are_listed_as_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["gpu"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out
    page = run.page([], gpu.not_run(), 60.0)
    assert page.count("| GPU | ") == page.count("| not run |") == 4
    assert "`python -m benchmarks.run gpu`" in page
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        gpu.main()


def test_every_part_can_be_imported_and_has_a_main() -> None:
    import importlib

    for name in run.ALL:
        assert callable(importlib.import_module(f"benchmarks.{name}").main), name
        assert Path(run.__file__).with_name(f"{name}.py").is_file()


# --- the parts ---


def test_the_parts_of_a_step_exclude_each_other() -> None:
    parts = overhead.Parts()
    inner = parts.timed("inner", lambda: time.sleep(0.02))

    def both() -> None:
        time.sleep(0.01)
        inner()
        inner()

    parts.timed("outer", both)()
    found = parts.per_step(steps=1)
    assert found["inner"] == pytest.approx(40_000, rel=0.5) and found["inner"] >= 40_000
    assert 10_000 <= found["outer"] < 30_000, "the outer part holds the inner one"


def test_what_distdl_adds_is_taken_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(overhead, "APART", 60)
    found = overhead.apart(overhead.distdl, tmp_path)
    assert {"StepMetrics", "Checkpointer", "Progress", overhead.DISPATCH} <= set(found)
    assert found[overhead.LOGGERS] > 0, "the journal was given nothing"
    assert all(value > -5 for value in found.values()), found
    bare = overhead.apart(overhead.barebones, tmp_path)
    assert set(bare) == {overhead.DISPATCH}, "Trainer(barebones=True) has callbacks"
    rows = overhead.part_rows([found], [bare], whole=1e6)
    parts = [float(row.split("|")[2]) for row in rows]
    assert sum(parts) == pytest.approx(1e6, rel=1e-3), "the parts do not sum to the whole"


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    given = ("model=tiny", "data=tiny", "data.steps=none", "trainer.accelerator=cpu")
    run_of = runs.lay_out(tmp_path, *given, "optimizer=none", "schedule=none", "tracking=none")
    with pytest.raises(RuntimeError, match=r"the worker ended with 1: (.|\n)*TypeError"):
        runs.work(run_of)


def test_the_end_of_a_benchmark_names_no_training_to_go_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distdl.worker import main

    tiny = ("model=tiny", "data=tiny", "data.steps=2", "optimizer=none")
    more = ("schedule=none", "tracking=none", "trainer.accelerator=cpu", "trainer.max_epochs=1")
    task = ("task=benchmark", "task.warmup=1", "task.windows=1", "task.steps=2")
    for overrides, goes_on in (((), True), (task, False)):
        run_of = runs.lay_out(tmp_path, *tiny, *more, *overrides)
        assert main.main([str(run_of.path), str(run_of.path)]) == 0
        said = capsys.readouterr().out
        assert "python -m distdl report" in said
        assert ("resume" in said) == goes_on


def test_only_a_profiler_that_is_asked_for_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.profilers import Profiler

    tiny = ("model=tiny", "data=tiny", "data.steps=2", "optimizer=none", "schedule=none")
    more = ("tracking=none", "trainer.accelerator=cpu", "trainer.max_epochs=1")
    entered: list[str] = []
    profile = Profiler.profile
    monkeypatch.setattr(Profiler, "profile", lambda s, n: entered.append(n) or profile(s, n))
    runs.work(runs.lay_out(tmp_path, *tiny, *more))
    assert not entered
    asked = runs.lay_out(tmp_path, *tiny, *more, "trainer.profiler=simple")
    runs.work(asked)
    assert any(name.endswith("training_step") for name in entered)
    assert "FIT Profiler Report" in (asked.path / "attempts/001/logs/rank_0.log").read_text()


def test_a_rank_that_fails_ends_the_pair(tmp_path: Path) -> None:
    code = (
        "import json, os, sys, time; rank = os.environ['RANK'];"
        "print(rank, json.load(open(sys.argv[1]))['said']);"
        "rank == '1' and sys.exit('broken'); time.sleep(3600)"
    )
    with pytest.raises(RuntimeError, match=r"a rank ended with 1: (.|\n)*broken"):
        pair.start(code, {"said": "a plan"})
    assert len(set(pair.free_ports(5))) == 5


class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.end_headers()
        self.wfile.write(self.path.encode() + body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_proxy_lets_a_request_wait_and_passes_it_on() -> None:
    behind = http.server.HTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    command = [sys.executable, "-m", "benchmarks.delay", f"http://127.0.0.1:{behind.server_port}"]
    proxy = subprocess.Popen([*command, "0.3"], stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout
        uri = proxy.stdout.readline().strip()
        started = time.monotonic()
        with urllib.request.urlopen(f"{uri}/a?b=c", data=b" and a body") as answer:
            assert (answer.status, answer.read()) == (201, b"/a?b=c and a body")
        assert time.monotonic() - started >= 0.3
        assert tracking.requests(uri) == 1
    finally:
        proxy.kill()
        proxy.wait()
        behind.shutdown()
        behind.server_close()


def test_a_folder_is_listed_as_torchvision_lists_it() -> None:
    found = listing.main(classes=3, files=4, repeats=1)
    assert "listing 12 images" in found.what and found.ratio > 0


def test_arms_take_turns(tmp_path: Path) -> None:
    file, logs = tmp_path / "said", tmp_path / "logs"
    logs.mkdir()

    def arm(name: str, seconds: float, every: int = 1, dies: int = -1) -> turns.Arm:
        steps = turns.steps_in_all(2, 3, 4, every)
        arguments = [name, str(seconds), str(steps), str(file), str(dies)]
        return turns.Arm(stepper.main, arguments, every=every)

    settled: list[str] = []
    arms = {"a": arm("a", 0.0), "b": arm("b", 0.05), "c": arm("c", 0.0, every=2)}
    blocks, ends = turns.take(arms, 4, logs, lambda: settled.extend(file.read_text().splitlines()))
    assert {name: len(found) for name, found in blocks.items()} == {"a": 4, "b": 4, "c": 2}
    assert min(blocks["b"]) >= 0.15 > min(blocks["a"]) and ends.keys() == arms.keys()
    # The first block of each does not count; then everyone is first in his turn.
    assert len(settled) == 3 * (2 + 3)
    said = [line.split()[0] for line in file.read_text().splitlines()[len(settled) :]]
    order = "abc" + "ba" + "cab" + "ab"
    assert "".join(said) == "".join(3 * name for name in order) + "abc"

    broken = {"a": arm("a", 0.0), "d": arm("d", 0.0, dies=6)}
    with pytest.raises(RuntimeError, match="broken in step 6"):
        turns.take(broken, 4, logs)


def test_distdl_and_lightning_stop_before_each_block_of_the_tracking_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their last block is followed by one step, and the step that is logged lies in a block."""
    small = {"WARM_UP": 1, "STEPS": 2, "EVERY": 2, "BATCH": 2, "WIDTH": 8, "DEPTH": 1}
    for name, value in small.items():
        monkeypatch.setattr(tracking, name, value)
    stops: list[int] = []
    monkeypatch.setattr(
        turns, "stop_before", lambda step, first, steps: stops.append((step - first) % steps)
    )
    total = turns.steps_in_all(1, 2, 3)
    assert total == 1 + 2 * 4 + 1
    runs.rank_main(str(tracking.lay_out(tmp_path, total, "tracking=none")))
    assert len(stops) == total and stops[-1] == 0
    tracking.lightning(str(tmp_path), f"sqlite:///{tmp_path}/mlflow.db", str(total))
    assert stops[total:] == stops[:total]


def test_the_loop_by_hand_runs_on_a_cpu() -> None:
    size = gpu.Size(batch=2, pixels=32, classes=3, warm_up=1, steps=2, model="resnet18")
    loop = gpu.Loop(torch.device("cpu"), size)
    before = next(loop.model.parameters()).clone()
    assert loop.rate() > 0
    assert not torch.equal(before, next(loop.model.parameters())), "nothing was trained"


def test_the_summary_of_the_predictor_points_to_every_error() -> None:
    text = held_out.main().markdown()
    assert "docs/scaling.md" in text and "mean error of no model" in text

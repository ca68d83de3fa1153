"""`distdl report`: what the page says, and that it needs nothing but itself."""

from __future__ import annotations

import html
import html.parser
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import markupsafe
import pytest

from distdl.cli import report
from distdl.report import data
from distdl.report import page as report_page
from distdl.report.plots import POINTS, Chart, charts, draw
from distdl.runs.directory import RunDirectory
from distdl.runs.records import encode
from distdl.util.errors import UserError

CONFIG = "model:\n  note: <script>alert('x')</script> & more\n  _target_: my.Model\n"


Point = tuple[int, int, dict[str, float]]


def write(run: Path, points: list[Point], name: str = "metrics") -> None:
    """(attempt, step, metrics), one second apart."""
    (run / "logs").mkdir(parents=True, exist_ok=True)
    lines = [encode(1000.0 + i, s, a, m) for i, (a, s, m) in enumerate(points)]
    (run / "logs" / f"{name}.jsonl").write_bytes(b"".join(lines))


def attempt(run: Path, number: int, launch: str = "", **status: Any) -> None:
    folder = run / "attempts" / f"{number:03d}"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "launch.yaml").write_text(launch or "changes: {}\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "outputs" / "exp" / "r1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    git = {"commit": "3f2c1b9a8d7e", "dirty": True}
    provenance = {"git": git, "command": ["python", "-m", "distdl", "data=<x>"], "python": "3.11.2"}
    (run / "provenance.json").write_text(json.dumps(provenance))
    attempt(
        run, 1, state="FAILED", started=1000.0, ended=1100.0, error="RuntimeError: <oops>\nmore"
    )
    changes = "run_id: exp/r1\nchanges: {data.batch_size: 64}\n"
    attempt(run, 2, changes, state="SUCCEEDED", started=2000.0, ended=2060.0, error=None)
    points: list[Point] = []
    for step in range(0, 60, 10):
        metrics = {
            "train/loss": 5.0 - step / 20,
            "lr": 0.1,
            "perf/images_per_second": 2000.0 + step,
            "perf/data_wait": 0.25,
            "my/own": 1.0,
            "epoch": 0.0,
        }
        points.append((1 if step < 30 else 2, step, metrics))
    points.append((1, 50, {"val/acc1": 0.9, "system/cpu_percent": 50.0}))  # before the crash
    points.append((2, 50, {"val/acc1": 0.5, "val/acc5": 0.8, "val/loss": 2.0}))
    points.append((2, 59, {"val/acc1": 0.4321, "odd": math.nan}))
    write(run, points)
    write(run, [(1, 0, {"system/node1/cpu_percent": 7.0})], "metrics-node1")
    return run


class Page(html.parser.HTMLParser):
    """The text of a page, its tags, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.addresses = "", [], []  # type: ignore[var-annotated]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href", "data", "action", "srcset"):
                self.addresses.append(value)

    def handle_data(self, text: str) -> None:
        self.text += text + "\n"


def test_the_page_says_what_the_run_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    source = (run / "report.html").read_text()
    page = Page(source)
    for text in (
        "exp/r1",
        "SUCCEEDED",
        "commit 3f2c1b9a8d7e with local changes",
        "python -m distdl data=<x>",
        "43.21 % (best 50.00 %)",
        "2,030 samples/s (median)",
        "25.0 % of the time (median)",
        "2 min 40 s",
        "RuntimeError: <oops>",
        "data.batch_size: 64",
        "my/own",
        "node1/cpu_percent",
    ):
        assert text in page.text, text
    assert f"<pre>{markupsafe.escape(CONFIG)}</pre>" in source
    assert "script" not in page.tags and "more\n" not in page.text.split("oops")[1][:20]
    svgs = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    titles = ["Loss", "Accuracy", "Throughput", "Learning rate", "my", "odd"]
    titles.append("Processor, memory, disk")
    assert len(svgs) == len(titles)
    for title in titles:
        assert f">{title}</text>" in source, title
    for svg in svgs:
        ET.fromstring(svg)


def test_the_page_needs_nothing_but_itself(run: Path) -> None:
    report.main([str(run)])
    source = (run / "report.html").read_text()
    assert all(a and a.startswith("#") for a in Page(source).addresses)
    outside = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r'xmlns(:\w+)?="[^"]*"', "", source)))
    assert not {o for o in outside if "w3.org" not in o}, outside
    assert "@import" not in source and not re.search(r"url\((?!#)", source)
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids)), "one id twice: a browser clips with the wrong picture"
    for name in re.findall(r'(?:url\(#|href="#)([^")]+)', source):
        assert name in ids


def test_it_follows_light_and_dark(run: Path) -> None:
    report.main([str(run)])
    source = (run / "report.html").read_text()
    assert "prefers-color-scheme: dark" in source
    for svg in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL):
        texts = re.findall(r"<text [^>]*>", svg)
        assert texts and all("currentColor" in t for t in texts)
        assert "#000000" not in svg and "#ffffff" not in svg


def test_a_later_attempt_replaces_what_it_did_again(tmp_path: Path) -> None:
    first = [(1, step, {"x": 1.0, "system/cpu_percent": 1.0}) for step in range(0, 100, 10)]
    second = [(2, step, {"x": 2.0, "system/cpu_percent": 2.0}) for step in range(55, 80, 10)]
    write(tmp_path, first + second)
    series = data.load(tmp_path).series["x"]
    assert series.steps == [0, 10, 20, 30, 40, 50, 55, 65, 75, 80, 90]
    assert series.values == [1.0] * 6 + [2.0] * 3 + [1.0] * 2
    assert data.load(tmp_path).series["system/cpu_percent"].values == [1.0] * 10 + [2.0] * 3


def test_many_points_are_drawn_as_few_with_their_extremes() -> None:
    n = 50_000
    series = data.MetricSeries(list(range(n)), [0.0] * n, [float(i % 2) for i in range(n)])
    svg, legend = draw(Chart("T", {"x": series}), 0.0)
    assert len(svg) < 200_000 and [label for label, _ in legend] == ["x"]
    few, _ = draw(Chart("T", {"x": data.MetricSeries([0, 1], [0.0, 0.0], [1.0, 2.0])}), 0.0)
    assert "FillBetween" in svg and "FillBetween" not in few
    assert n > POINTS


def test_every_metric_is_in_one_chart_and_only_one() -> None:
    names = ["epoch", "train/loss", "val/loss", "train/acc", "val/acc", "lr-SGD", "perf/data_wait"]
    names += ["perf/other", "mine", "a/b/c", "system/gpu0_percent", "system/node2/gpu1_power_watts"]
    names += ["system/node2/strange", "system/memory_gib"]
    found = charts({n: data.MetricSeries([1], [1.0], [1.0]) for n in names}, "img/s")
    drawn = [n for chart in found for n in chart.lines]
    drawn += [n for chart in found if chart.second for n in [chart.second[0]]]
    assert sorted(drawn) == sorted(set(names) - {"epoch"})


def test_values_that_are_no_numbers_do_not_stop_the_page(run: Path) -> None:
    nothing = {"val/acc1": math.nan, "train/loss": math.inf, "perf/images_per_second": math.nan}
    write(run, [(1, i, nothing) for i in range(3)])
    assert report.main([str(run)]) == 0


def test_an_empty_run_and_broken_files_still_give_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "provenance.json").write_text("{")
    (tmp_path / "attempts/001").mkdir(parents=True)
    (tmp_path / "attempts/001/status.json").write_text('{"state": "RUN')
    (tmp_path / "attempts/001/launch.yaml").write_text("a: [")
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Nothing has been logged yet" in page and "Benchmark" not in page


def test_each_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"config.yaml": "seed: ", "launch.yaml": "run_id: e/r\n", "status.json": "{"}
    cut["provenance.json"] = '{"command": '
    for name, text in {"whole": "", **cut}.items():
        run = RunDirectory(tmp_path / name)
        run.create("seed: 1\n", {})
        first = run.begin_attempt({"run_id": "e/r", "where": {}})
        if text:
            folder = first.path if (first.path / name).exists() else run.path
            (folder / name).write_text(text)
        assert report.main([str(run.path)]) == 0
        page, said = (run.path / "report.html").read_text(), capsys.readouterr().err
        for told in (page, said):
            assert ("is damaged" in told) is (name != "whole")
            assert not text or f"{folder / name}: is damaged" in told


def test_a_foreign_file_is_never_overwritten(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "notes.html"
    mine.write_text("<p>my notes</p>")
    with pytest.raises(UserError, match="is not a report"):
        report.main([str(run), "--output", str(mine)])
    assert mine.read_text() == "<p>my notes</p>"
    (run / "report.html").write_text("mine, too")
    with pytest.raises(UserError, match="is not a report"):
        report.main([str(run)])
    for _ in range(2):  # its own it replaces
        assert report.main([str(run), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").is_file()
    assert not list(run.glob(".report*"))


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        report.main([str(tmp_path / "nothing")])
    with pytest.raises(UserError, match=r"is not a run(.|\n)*exp/r1"):
        report.main([str(tmp_path / "outputs")])


def test_it_says_how_to_open_the_trackers(run: Path) -> None:
    (run / "tracking").mkdir()
    state = {"server": None, "output_dir": "../..", "run_id": "abc", "experiment_id": "7"}
    (run / "tracking/mlflow.json").write_text(json.dumps(state))
    (run / "logs/tensorboard").mkdir()
    report.main([str(run)])
    text = Page((run / "report.html").read_text()).text
    assert f"sqlite:///{run.parents[1]}/mlflow.db" in text
    assert "http://127.0.0.1:5000/#/experiments/7/runs/abc" in text
    assert "tensorboard --logdir" in text


def test_an_attempt_that_trained_nothing_is_called_what_it_was(run: Path) -> None:
    assert "<th>task</th>" not in report_page.render(data.load(run)), "all of them trained"
    before = dict(data.summary(data.load(run)))["duration"]
    where = "where: {task: {_target_: distdl.tasks.benchmark}}\n"
    attempt(run, 3, where, state="SUCCEEDED", started=5000.0, ended=9000.0)
    page = report_page.render(data.load(run))
    assert "<th>task</th>" in page and "<td>benchmark</td>" in page
    assert dict(data.summary(data.load(run)))["duration"] == before

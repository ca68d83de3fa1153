"""`distdl report`: what the page shows, that it needs nothing but itself, and a hostile run."""

import html.parser
import json
import math
import re
import xml.etree.ElementTree as ET

import markupsafe
import pytest
import yaml

from distdl.cli import report
from distdl.runs.directory import RunDirectory
from distdl.runs.records import encode
from distdl.tools.pages import data
from distdl.tools.pages.plots import POINTS, Chart, charts, draw
from distdl.util.errors import UserError

CONFIG = "model:\n  note: <script>alert('x')</script> & more\n  _target_: my.Model\n"


def write(run, points, name="metrics"):
    """(attempt, step, metrics), one second apart."""
    (run / "logs").mkdir(parents=True, exist_ok=True)
    lines = [encode(1000.0 + i, s, a, m) for i, (a, s, m) in enumerate(points)]
    (run / "logs" / f"{name}.jsonl").write_bytes(b"".join(lines))


def attempt(run, number, launch, **status):
    folder = run / f"attempts/{number:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "launch.yaml").write_text(yaml.safe_dump(launch))


@pytest.fixture
def run(tmp_path):
    """A run that failed once, and then repeated some steps; after it, a benchmark."""
    run = tmp_path / "outputs/exp/r1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    git = {"commit": "3f2c1b9a8d7e", "dirty": True}
    provenance = {"git": git, "command": ["python", "-m", "distdl", "data=<x>"], "python": "3.11.2"}
    (run / "provenance.json").write_text(json.dumps(provenance))
    attempt(run, 1, {}, state="FAILED", started=1000, ended=1100, error="Error: <oops>\nmore")
    launch = {"run_id": "exp/r1", "changes": {"data.batch_size": 64}}
    attempt(run, 2, launch, state="SUCCEEDED", started=2000.0, ended=2060.0, error=None)
    launch = {"where": {"task": {"_target_": "distdl.tasks.benchmark"}}}
    attempt(run, 3, launch, state="SUCCEEDED", started=5000.0, ended=9000.0)
    points = []
    for step in range(0, 60, 10):
        metrics = {
            "train/loss": 5.0 - step / 20,
            "lr": 0.1,
            "my/own": 1.0,
            "epoch": 0.0,
            "perf/images_per_second": 2000.0 + step,
            "perf/data_wait": 0.25,
        }
        points.append((1 if step < 30 else 2, step, metrics))
    # Before the crash: the steps from 50 to 59 are those of the second attempt.
    points.append((1, 55, {"val/acc1": 0.9, "system/cpu_percent": 50.0}))
    points.append((2, 50, {"val/acc1": 0.5, "val/acc5": 0.8, "val/loss": 2.0}))
    points.append((2, 59, {"val/acc1": 0.4321, "odd": math.nan}))
    write(run, points)
    write(run, [(1, 0, {"system/node1/cpu_percent": 7.0})], "metrics-node1")
    return run


def reported(run):
    assert report.main([str(run)]).exit_code == 0
    return (run / "report.html").read_text()


class Page(html.parser.HTMLParser):
    """The text of a page, its tags, the names of attributes and their values."""

    def __init__(self, source):
        super().__init__()
        self.text = ""
        self.tags = set()
        self.values = {}
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            self.values.setdefault(name, []).append(value or "")

    def handle_data(self, text):
        self.text += text + "\n"


SHOWN = (
    "exp/r1",
    "SUCCEEDED",
    "commit 3f2c1b9a8d7e with local changes",
    "Error: <oops>",
    "python -m distdl data=<x>",
    "43.21 % (best 50.00 %)",
    "2,030 samples/s (median)",
    "25.0 % of the time (median)",
    "2 min 40 s",
    "data.batch_size: 64",
    "my/own",
    "node1/cpu_percent",
    "\nbenchmark\n",
)
TITLES = ("Loss", "Accuracy", "Throughput", "Learning rate", "my", "odd", "Processor, memory, disk")


def test_the_summary_begins_with_the_metric_that_chose_the_best_checkpoint(run):
    write(run, [(2, 59, {"val/zeta": 0.25, "val/alpha": 0.5})], "metrics-node2")
    (run / "checkpoints").mkdir()
    facts = {"files": {"best.ckpt": {"size": 0, "sha256": ""}}, "monitor": "val/zeta"}
    manifest = run / "checkpoints/best.ckpt.manifest.json"
    manifest.write_text(json.dumps({**facts, "mode": "max"}))
    text = Page(reported(run)).text
    assert text.index("val/zeta") < text.index("43.21 %") < text.index("val/alpha")


def test_the_page_describes_the_run_and_needs_nothing_but_itself(run):
    source = reported(run)
    page = Page(source)
    for text in SHOWN:
        assert text in page.text, text
    assert f"<pre>{markupsafe.escape(CONFIG)}</pre>" in source
    assert "script" not in page.tags
    assert "more\n" not in page.text.split("oops")[1][:20]
    svgs = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    assert len(svgs) == len(TITLES)
    assert all(f">{title}</text>" in source for title in TITLES)
    assert "prefers-color-scheme: dark" in source
    for svg in svgs:
        ET.fromstring(svg)
        texts = re.findall(r"<text [^>]*>", svg)
        assert texts
        assert all("currentColor" in t for t in texts)
        assert "#000000" not in svg
        assert "#ffffff" not in svg
    fetched = ("src", "href", "data", "action", "srcset")
    values = {k: v for k, v in page.values.items() if k.split(":")[-1] in fetched}
    assert all(address.startswith("#") for value in values.values() for address in value)
    outside = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r'xmlns(:\w+)?="[^"]*"', "", source)))
    assert not {o for o in outside if "w3.org" not in o}, outside
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids)), "one id twice: a browser clips with the wrong picture"
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', source)) <= set(ids)


def test_every_metric_is_in_one_chart_and_many_points_are_drawn_as_few():
    names = (
        "epoch train/loss val/loss train/acc val/acc lr-SGD perf/data_wait perf/other mine"
        " a/b/c system/gpu0_percent system/node2/gpu1_power_watts system/memory_gib"
    )
    made = charts({n: data.MetricSeries([1], [1.0], [1.0]) for n in names.split()}, "img/s")
    drawn = [n for c in made for n in (*c.lines, *(c.second or ())[:1])]
    assert sorted(drawn) == sorted(set(names.split()) - {"epoch"})
    n = 80 * POINTS
    series = data.MetricSeries(list(range(n)), [0.0] * n, [float(i % 2) for i in range(n)])
    svg, legend = draw(Chart("T", {"x": series}), 0.0)
    assert len(svg) < 200_000
    assert [label for label, _ in legend] == ["x"]
    assert "FillBetween" in svg, "the extremes are missing"


DAMAGED = {
    "": "",
    "config.yaml": "seed: ",
    "provenance.json": '{"command": ',
    "attempts/001/launch.yaml": "run_id: e/r\n",
    "attempts/001/status.json": "{",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_each_damaged_file_is_named(name, tmp_path, capsys):
    run = RunDirectory(tmp_path / "run")
    run.create("seed: 1\n", {})
    run.begin_attempt({"run_id": "e/r", "where": {}})
    if name:
        (run.path / name).write_text(DAMAGED[name])
    page = reported(run.path)
    assert "Nothing has been logged yet" in page
    assert "Benchmark" not in page
    for output in (page, capsys.readouterr().err):
        assert ("is damaged" in output) is bool(name)
        assert not name or f"{run.path / name}: is damaged" in output


def test_a_file_that_no_report_wrote_is_never_overwritten(run, tmp_path):
    notes = tmp_path / "notes.html"
    for page, options in ((notes, ["--output", str(notes)]), (run / "report.html", [])):
        page.write_text("my notes")
        with pytest.raises(UserError, match="is not a page of distdl report"):
            report.main([str(run), *options])
        assert page.read_text() == "my notes"
    for _ in range(2):  # its own it replaces
        assert report.main([str(run), "--output", str(tmp_path / "new/page.html")]).exit_code == 0
    assert (tmp_path / "new/page.html").is_file()
    assert not list(run.glob(".report*"))


# A run whose every text was chosen by somebody who wants the reader's browser
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'&><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "]]></text></svg><script>alert(1)</script><!-- --> -->",
    "</title></style></pre><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "{{ 7 * 191 }}{% for x in y %}",
    "$a_b$ \x00 \x1b[0m",
)
# What the page is made of, and matplotlib's pictures in it.
TAGS = (
    "html head meta title style body h1 h2 p span code pre table tr th td div br figure i"
    " figcaption svg defs g path use text rect clippath"
)


def foreign(run, text):
    """Every text of every file is `text`; numbers are numbers, for the page to show something."""
    (run / "logs/tensorboard").mkdir(parents=True)
    (run / "tracking").mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({text: text}))
    where = {"task": {"_target_": text}, "launcher": {"_target_": text}}
    launch = {"run_id": f"e/{text}", "where": where, "changes": {text: text}, "notes": [text]}
    status = {"state": text, "error": text, "host": text, "metrics": {text: 1.0}}
    attempt(run, 1, launch, **status, started=1.0, ended=2.0)
    names = (text, f"{text}/{text}", f"val/{text}", f"system/{text}", f"val/acc{text}")
    write(run, [(1, i, dict.fromkeys(names, 0.5)) for i in range(3)])
    git = {"commit": text, "branch": text, "dirty": True}
    provenance = {"git": git, "command": [text], "python": text, "platform": text}
    mlflow = {"server": text, "output_dir": "../..", "run_id": text}
    files = {"provenance": provenance, "tracking/mlflow": mlflow, "benchmark": benchmark(text)}
    for name, content in files.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    return run


def benchmark(text):
    split = dict.fromkeys(("data", "forward", "backward", "optimizer", "communication", "other"), 1)
    side = {"images_per_second": 1.0, "step_seconds": {"median": 1.0, "p95": 1.0}, "split": split}
    setting = "nodes devices_per_node accelerator strategy precision global_batch"
    result = {
        "real": side,
        "held": side,
        "setting": dict.fromkeys(setting.split(), text),
        "verdict": {"bound": text, "why": text, "remedies": [text]},
        "device": text,
    }
    limits = {"matrix_flops": 1e12, "matrix_size": 1, "dtype": text, "copy_bytes": 1e9}
    model = {"mfu": 0.5, "flops_per_sample": 1e9, "bandwidth_use": None, "note": text}
    return {**result, "memory_gib": 1.0, "limits": limits, "model": model}


def test_no_text_becomes_markup(tmp_path):
    text = " ".join(HOSTILE)
    source = reported(foreign(tmp_path / "e/r", text))
    page = Page(source)
    assert page.tags <= set(TAGS.split()), page.tags - set(TAGS.split())
    assert not [n for n in page.values if n.startswith("on") or n in ("src", "href")]
    values = [value for name, values in page.values.items() if name != "class" for value in values]
    assert "javascript:" not in " ".join(values)
    assert "1337" not in page.text
    shown = ("samples/s with real input", "held input", "milliseconds", "commit ", "mlflow ui")
    for each in (*shown, "tensorboard --logdir", text.split("\x00")[0]):
        assert each in page.text, each
    assert source.count("</svg>") == source.count("<svg ")


def test_links_that_lead_out_are_left_out(tmp_path):
    run = foreign(tmp_path / "e/r", "fine")
    point = {"t": 1, "step": 1, "attempt": 1, "metrics": {"hunter2": 1}}
    secret = {"state": "hunter2", "python": "hunter2", **point}
    (tmp_path / "secret").write_text(json.dumps(secret) + "\n")
    attempts = ("attempts/001/launch.yaml", "attempts/001/status.json")
    for name in ("config.yaml", *attempts, "provenance.json", "logs/metrics.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to(tmp_path / "secret")
    assert "hunter2" not in reported(run)


BEYOND = {"integer": "1" + 400 * "0", "float": "1e300", "infinity": "Infinity", "none": "NaN"}


@pytest.mark.parametrize("beyond", BEYOND.values(), ids=BEYOND)
def test_a_time_that_no_date_can_show_and_a_count_that_is_none(run, beyond, capsys):
    number = json.loads(beyond)
    parameters = {"total": 4, "trainable": number}
    attempt(run, 2, {}, state="SUCCEEDED", started=number, ended=1.0, parameters=parameters)
    assert "SUCCEEDED" in reported(run)
    shown = str(number)[:40]
    damage = f"started is '{shown}'"
    if beyond != "1e300":  # no date, but a count
        damage += f", parameters.trainable is '{shown}'"
    assert f"attempts/002/status.json: is damaged: {damage}\n" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[], {"real": 3}])
def test_files_of_another_shape_and_values_that_are_no_number(tmp_path, value):
    run = foreign(tmp_path / "e/r", "fine")
    nothing = {"val/acc1": math.nan, "train/loss": math.inf, "perf/images_per_second": math.nan}
    write(run, [(1, 1, nothing)])
    attempt(run, 1, value)
    for name in ("benchmark.json", "provenance.json", "attempts/001/status.json", "config.yaml"):
        (run / name).write_text(json.dumps(value))
    assert ("does not hold the result" in reported(run)) == isinstance(value, dict)

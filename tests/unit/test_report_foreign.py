"""A report of a run whose every text was chosen by somebody who wants the reader's browser."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distdl.cli import report

TEXTS = (
    "<script>alert(1)</script>",
    "\"'&><img src=x onerror=alert(1)>",
    "]]></text></svg><script>alert(1)</script><!-- --> -->",
    "</title></style></pre><script>alert(1)</script>",
    "javascript:alert(1)",
    '" onmouseover="alert(1)',
    "{{ 7 * 191 }}{% for x in y %}",
    "$a_b$ \x00 \x1b[0m",
)
# What the page is made of, and matplotlib's pictures in it.
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "span", "code", "pre"),
    *("table", "tr", "th", "td", "div", "br", "figure", "figcaption", "i"),
    *("svg", "defs", "g", "path", "use", "text", "rect", "clippath"),
}


class Page(html.parser.HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text, self.values = "", ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.values += " ".join(value or "" for name, value in attrs if name != "class")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "outputs/e/r"
    (run / "logs/tensorboard").mkdir(parents=True)
    return run


def create_attempt(run: Path, text: str) -> None:
    """Every text of every file is `text`; numbers are numbers, for the page to show something."""
    (run / "config.yaml").write_text(yaml.safe_dump({text: text}))
    said = {"git": {"commit": text, "branch": text, "dirty": True}, "command": [text]}
    (run / "provenance.json").write_text(json.dumps({**said, "python": text, "platform": text}))
    attempt = run / "attempts/001"
    attempt.mkdir(parents=True, exist_ok=True)
    where = {"task": {"_target_": text}, "launcher": {"_target_": text}}
    launch = {"run_id": f"e/{text}", "where": where, "changes": {text: text}, "notes": [text]}
    (attempt / "launch.yaml").write_text(yaml.safe_dump(launch))
    status = {"state": text, "error": text, "host": text, "metrics": {text: 1.0}}
    (attempt / "status.json").write_text(json.dumps({**status, "started": 1.0, "ended": 2.0}))
    names = (text, f"{text}/{text}", f"val/{text}", f"system/{text}", f"val/acc{text}")
    lines = [
        json.dumps({"t": 1.0 + i, "step": i, "attempt": 1, "metrics": dict.fromkeys(names, 0.5)})
        for i in range(3)
    ]
    (run / "logs/metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "tracking").mkdir(exist_ok=True)
    state = {"server": text, "output_dir": "../..", "run_id": text}
    (run / "tracking/mlflow.json").write_text(json.dumps(state))
    (run / "benchmark.json").write_text(json.dumps(benchmark(text)))


def benchmark(text: str) -> dict[str, Any]:
    split = dict.fromkeys(("data", "forward", "backward", "optimizer", "communication", "other"), 1)
    side = {"images_per_second": 1.0, "step_seconds": {"median": 1.0, "p95": 1.0}, "split": split}
    setting = dict.fromkeys(
        ("nodes", "devices_per_node", "accelerator", "strategy", "precision", "global_batch"), text
    )
    return {
        "real": side,
        "held": side,
        "setting": setting,
        "verdict": {"bound": text, "why": text, "remedies": [text]},
        "device": text,
        "memory_gib": 1.0,
        "limits": {"matrix_flops": 1e12, "matrix_size": 1, "dtype": text, "copy_bytes": 1e9},
        "model": {"mfu": 0.5, "flops_per_sample": 1e9, "bandwidth_use": None, "note": text},
    }


def test_no_text_becomes_markup(run: Path) -> None:
    text = " ".join(TEXTS)
    create_attempt(run, text)
    assert report.main([str(run)]) == 0
    source = (run / "report.html").read_text()
    page = Page(source)
    assert page.tags <= TAGS, page.tags - TAGS
    assert not {name for name in page.names if name.startswith("on")} | {"href", "src"} & page.names
    assert "javascript:" not in page.values and "1337" not in page.text
    for shown in ("samples/s with real input", "commit ", "mlflow ui", text.split("\x00")[0]):
        assert shown in page.text, shown
    assert source.count("</svg>") == page_count(source, "<svg")


def page_count(source: str, tag: str) -> int:
    return source.count(f"{tag} ")


def test_links_that_lead_out_are_left_out(run: Path, tmp_path: Path) -> None:
    create_attempt(run, "fine")
    secret = tmp_path / "id_rsa"
    secret.write_text("hunter2: hunter2\n")
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"state": "hunter2", "python": "hunter2"}))
    point = {"t": 1, "step": 1, "attempt": 1, "metrics": {"hunter2": 1}}
    (tmp_path / "points").write_text(json.dumps(point) + "\n")
    for name, target in {
        "config.yaml": secret,
        "attempts/001/launch.yaml": secret,
        "attempts/001/status.json": data,
        "provenance.json": data,
        "logs/metrics.jsonl": tmp_path / "points",
    }.items():
        (run / name).unlink()
        (run / name).symlink_to(target)
    report.main([str(run)])
    assert "hunter2" not in (run / "report.html").read_text()


@pytest.mark.parametrize("value", [[], "text", {"real": 3}])
def test_files_of_another_shape(run: Path, value: Any) -> None:
    create_attempt(run, "fine")
    (run / "logs/metrics.jsonl").unlink()
    for name in ("benchmark.json", "provenance.json", "attempts/001/status.json"):
        (run / name).write_text(json.dumps(value))
    for name in ("attempts/001/launch.yaml", "config.yaml"):
        (run / name).write_text(yaml.safe_dump(value))
    assert report.main([str(run)]) == 0
    assert ("holds something else" in (run / "report.html").read_text()) == bool(
        isinstance(value, dict)
    )

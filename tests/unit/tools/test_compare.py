"""`distdl compare` and the end of a sweep: what differs, limits for CI, a store, hostile runs."""

import json
import re
from types import SimpleNamespace

import pytest
import yaml

from distdl.cli import compare
from distdl.job import JobState
from distdl.runs.directory import Attempt, RunDirectory
from distdl.runs.records import encode
from distdl.stores import open_store
from distdl.tools.compare import finding, page, sweep_end
from distdl.tools.compare.comparison import Comparison
from distdl.tools.compare.facts import facts_of
from distdl.tools.compare.finding import FoundRun
from distdl.util.errors import UserError
from tests import aws

moto, s3 = aws.moto, aws.s3  # fixtures
HOSTILE = "<script>alert('x')</script>\x1b[2J"


def run(folder, name, accuracies=(0.25, 0.5), *, swept=(), speed=100.0, vm="", **settings):
    """A training that has ended, with the files of a real one."""
    config = {
        "seed": 0,
        "optimizer": {"lr": 0.1},
        "checkpoint": {"monitor": "val/acc1", "mode": "max"},
        **settings,
    }
    made = RunDirectory(folder / name)
    git = {"commit": "3f2c1b9a8d7e6f", "diff": ""}
    facts = {"git": git, "distdl": "0.1", "python": "3.11.2", "packages": ["torch==2.15.0"]}
    made.create(yaml.safe_dump(config), {**facts, "swept": [*swept]})
    launcher = {"_target_": "distdl.launchers.local.LocalLauncher", "vm_size": vm}
    size = {"num_nodes": 1, "devices": 2, "accelerator": "cpu"}
    record = {"run_id": name, "where": {"launcher": launcher}, "resources": size, "changes": {}}
    attempt = made.begin_attempt(record)
    attempt.update(started=1000.0, data="0123456789ab")
    attempt.end(JobState.SUCCEEDED, metrics={"val/acc1": accuracies[-1]})
    attempt.update(ended=4600.0)
    points = [
        {"val/acc1": value, "val/loss": 1 - value, "perf/images_per_second": speed}
        for value in accuracies
    ]
    (made.path / "logs").mkdir()
    lines = [encode(1000.0 + n, 10 * n, 1, point) for n, point in enumerate(points)]
    (made.path / "logs/metrics.jsonl").write_bytes(b"".join(lines))
    return made.path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(*words, code=0):
    answer = compare.main([*map(str, words)])
    assert answer.exit_code == code
    return answer.value


def refused(*words):
    with pytest.raises(UserError) as caught:
        compare.main([*map(str, words)])
    return str(caught.value)


def test_what_differs_and_what_does_not(folder, capsys):
    run(folder, "a", (0.5, 0.75, 0.625))
    run(folder, "b", (0.5, 0.25), optimizer={"lr": 0.2, "momentum": 0.9})
    compared("a", "b")
    printed = capsys.readouterr().out
    assert re.search(
        r"^a +succeeded, best +75.00 % .* 100 samples/s +60 min 0 s|1 h 0 min", printed, re.M
    )
    assert re.search(r"^optimizer.lr +0.1 +0.2$", printed, re.M)
    assert re.search(r"^optimizer.momentum +\(not set\) +0.9$", printed, re.M)
    assert "seed " not in printed.split("differs")[1].split("\n\n")[0]
    assert "same    commit 3f2c1b9a8d, local changes none, data set 0123456789ab" in printed
    assert "2 device-hours" in printed
    assert "nobody knows what chance does to val/acc1" in printed
    source = (folder / "compare.html").read_text()
    assert "optimizer.momentum" in source
    assert source.count("<svg") == 3, "val/acc1, val/loss, speed: both runs in each"


def test_the_seed_alone_shows_what_a_difference_means(folder, capsys):
    run(folder, "a", (0.5,))
    run(folder, "b", (0.53,), seed=1)
    run(folder, "c", (0.9,), seed=2, optimizer={"lr": 0.2})
    (spread,) = compared("a", "b", "c", "--no-page").seeds
    assert spread["runs"] == ["a", "b"]
    assert spread["spread"] == pytest.approx(0.03)
    compared("a", "b")
    assert (
        "2 runs that differ by the seed alone differ by 0.03 in val/acc1" in capsys.readouterr().out
    )


def test_the_code_and_the_changes_of_a_resume_count_as_differences(folder, capsys):
    run(folder, "a")
    run(folder, "b")
    again = Attempt(folder / "b/attempts/001")
    launch = again.launch()
    launch["changes"] = {"optimizer": {"name": "adamw"}}
    again.write_launch(launch)
    again.update(data="other")
    assert compared("a", "b", "--no-page").differences == {
        "optimizer.lr": ["0.1", "(not set)"],
        "optimizer.name": ["(not set)", "adamw"],
        "data set": ["0123456789ab", "other"],
    }


def test_whose_commit_or_data_is_unknown(folder, capsys):
    run(folder, "a")
    path = run(folder, "b")
    Attempt(path / "attempts/001").update(data="")
    provenance = json.loads((path / "provenance.json").read_text())
    (path / "provenance.json").write_text(json.dumps({**provenance, "git": {}}))
    compared("a", "b", "--no-page")
    shown = capsys.readouterr().out
    assert "unknown the commit of b, started outside git" in shown
    assert "unknown the data set of b, of which no digest" in shown


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        (("--fail-worse", "val/acc1:5%"), 1),  # 0.8 -> 0.75: 6.25 %
        (("--fail-worse", "val/acc1:7%"), 0),
        (("--fail-worse", "val/acc1:0.06"), 0),
        (("--fail-worse", "val/acc1:0.04"), 1),
        (("--fail-worse", "val/loss:0.04"), 1),  # more loss is worse
        (("--fail-slower", "5%"), 1),
        (("--fail-slower", "15%"), 0),
        (("--fail-worse", "val/acc1:7%", "--fail-slower", "5%"), 1),
    ],
)
def test_limits_for_a_pipeline(folder, limit, code, capsys):
    run(folder, "a", (0.8,))
    run(folder, "b", (0.75,), speed=90.0)
    compared("a", "b", "--no-page", *limit, code=code)
    assert ("FAILED  b: " in capsys.readouterr().err) == bool(code)
    compared("b", "a", "--no-page", *limit)  # better and faster passes


def test_a_run_that_ended_with_nan_is_worse(folder, capsys):
    run(folder, "a", (0.8,))
    other = run(folder, "b", (0.9, float("nan")))
    (other / "checkpoints").mkdir()
    facts = {"files": {"best.ckpt": {"size": 0, "sha256": ""}}, "metrics": {"val/acc1": 0.9}}
    (other / "checkpoints/best.ckpt.manifest.json").write_text(json.dumps(facts))
    compared("a", "b", "--no-page", "--fail-worse", "val/acc1:50%", code=1)
    assert "val/acc1 is NaN" in capsys.readouterr().err
    assert "is nan, so that nothing is worse" in refused("b", "a", "--fail-worse", "val/acc1:5%")


@pytest.mark.parametrize("end", ["FAILED", "RUNNING", "PRUNED", "unreadable"])
def test_a_run_that_has_not_succeeded_keeps_no_limit(folder, end, capsys):
    """Its best value so far may be better, and nobody knows how it would have ended."""
    run(folder, "a", (0.5,))
    attempt = Attempt(run(folder, "b", (0.9,)) / "attempts/001")
    if end == "unreadable":
        (attempt.path / "status.json").write_text("hello <script>")
    else:
        attempt.update(state=end, host="another")
    said = "UNKNOWN" if end == "unreadable" else end
    compared("a", "b", "--no-page", "--fail-worse", "val/acc1:5%", code=1)
    assert f"and the run is {said} (limit 5 %)" in capsys.readouterr().err
    assert f"b is {said}, so it is no measure" in refused("b", "a", "--fail-worse", "val/acc1:5%")
    compared("a", "b", "--no-page")


def test_the_time_of_an_attempt_that_was_killed_ends_with_its_last_line(folder):
    """Its status says RUNNING for ever: it would cost more with each look."""
    run(folder, "a")
    made = RunDirectory(run(folder, "b"))
    first = made.attempts()[0]
    second = made.begin_attempt(first.launch())
    first.update(state="RUNNING", ended=None)
    second.end(JobState.SUCCEEDED, metrics={"val/acc1": 0.9})
    second.update(started=5000.0, ended=5060.0)
    with (made.path / "logs/metrics.jsonl").open("ab") as file:
        file.write(encode(1300.0, 15, 1, {"val/acc1": 0.3}))
    assert compared("a", "b", "--no-page").runs[1]["seconds"] == 300.0 + 60.0
    second.update(state="RUNNING", ended=None, pid=2**22 + 1)  # and so is the last one
    (_, killed) = compared("a", "b", "--no-page").runs
    assert (killed["state"], killed["seconds"]) == ("FAILED", 300.0)


@pytest.mark.parametrize("left", [0, 0.5, 1.5])
def test_a_journal_that_lacks_something_is_named(folder, left, capsys):
    """Cut at the end of a line it can be read, and says less than the run has logged."""
    run(folder, "a")
    path = run(folder, "b")
    journal = path / "logs/metrics.jsonl"
    first, second = journal.read_bytes().splitlines(keepends=True)
    Attempt(path / "attempts/001").conclude(JobState.SUCCEEDED)
    compared("a", "b", "--no-page")
    assert "damaged" not in capsys.readouterr().err
    kept = {0: b"", 0.5: first, 1.5: first[:-9] + b"\n" + second}[left]
    journal.write_bytes(kept)
    compared("a", "b", "--no-page")
    said = capsys.readouterr().err
    assert f"{journal.relative_to(folder)}: is damaged: " in said.replace(f"{folder}/", "")
    assert ("1 line cannot be read" in said) == (left == 1.5)
    assert "bytes that the run has written are left" in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("a",), "a: is one run: there is nothing to compare it with"),
        (("a", "a"), "a: is one run"),
        (("a", "absent"), "absent: there is no such folder"),
        (("a", "b", "--fail-worse", "val/acc1"), "'val/acc1' is no METRIC:AMOUNT"),
        (("a", "b", "--fail-worse", "val/acc1:-1"), "is no METRIC:AMOUNT"),
        (("a", "b", "--fail-worse", "val/f1:1%"), "val/f1 was not logged by a, b"),
        (("a", "b", "--fail-worse", "own:1%"), "nobody knows whether more or less of own"),
        (("a", "b", "--fail-slower", "5"), "'5' is no share of a speed"),
        (("a", "b", "short", "--fail-slower", "5%"), "no speed was recorded in short\n"),
        (("a", "b", "--output", "own.html"), "is not a page of distdl compare"),
        (("a", "s3://"), "names no bucket"),
        (("a", ""), "is empty"),
    ],
)
def test_wrong_input_gets_one_message(folder, words, what, capsys):
    for name in ("a", "b"):
        path = run(folder, name)
        with (path / "logs/metrics.jsonl").open("ab") as file:
            file.write(encode(2000.0, 90, 1, {"own": 1.0}))
    journal = run(folder, "short") / "logs/metrics.jsonl"
    journal.write_bytes(encode(1000.0, 1, 1, {"val/acc1": 0.5}))
    (folder / "own.html").write_text("mine")
    assert what in refused(*words)
    assert (folder / "own.html").read_text() == "mine"


def test_a_hostile_run_is_shown_and_harms_nothing(folder, capsys):
    run(folder, "a")
    run(folder, "b", swept=[f"model={HOSTILE}"], **{HOSTILE: "<img src=x onerror=alert(1)>"})
    with (folder / "b/logs/metrics.jsonl").open("ab") as file:
        file.write(encode(1002.0, 30, 1, {f"val/{HOSTILE}": 0.5}))
    (folder / "private").write_text("model: {secret: of the reader}\n")
    linked = run(folder, "c")
    (linked / "config.yaml").unlink()
    (linked / "config.yaml").symlink_to(folder / "private")
    bomb = run(folder, "d")
    doubled = "".join(f"k{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 64))
    (bomb / "config.yaml").write_text(f"k0: &a0 [1]\n{doubled}")
    deep = run(folder, "e")
    (deep / "attempts/001/launch.yaml").write_text("a: {b: " * 900 + "1" + "}" * 900)
    huge = run(folder, "f")
    with (huge / "logs/metrics.jsonl").open("a") as file:
        for line in ({"step": 1, "metrics": {"x": 10**400}}, {"step": 10**400, "metrics": {}}):
            file.write(json.dumps({"t": 1, "attempt": 1, **line}) + "\n")
    compared("a", "b", "c", "d", "e", "f")
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    source = (folder / "compare.html").read_text()
    assert "<script" not in source
    assert "<img" not in source
    assert "\x1b" not in source
    assert "Glyph" not in printed.err, "no font has a control character"
    assert "of the reader" not in source + printed.out
    assert "is damaged" in printed.err


def test_runs_of_a_store_are_compared_with_one_here(folder, s3, capsys, monkeypatch):
    monkeypatch.setattr(finding, "MOST_BYTES", 8000)  # no checkpoint is fetched
    here = run(folder, "a")
    there = run(folder, "there/s/b", (0.25, 0.375), swept=["optimizer.lr=0.2"])
    (there / "checkpoints").mkdir()
    (there / "checkpoints/last.ckpt").write_bytes(b"9" * 9000)
    store = open_store("s3://box/runs")
    for path in (p for p in (folder / "there").rglob("*") if p.is_file()):
        store.upload(path, path.relative_to(folder / "there").as_posix())
    first, second = compared(here, "s3://box/runs", "--no-page").runs
    assert (first["run"], second["run"]) == ("a", "s3://box/runs/s/b")
    assert second["metrics"]["val/acc1"] == 0.375
    with pytest.raises(UserError, match="holds no config"):
        compare.main(["a", "s3://box/none"])


def test_the_end_of_a_sweep_has_a_table_and_a_page(folder, capsys):
    results = []
    for number, value in enumerate((0.5, 0.75, 0.6)):
        words = f"optimizer.lr={number}"
        path = run(folder, f"sweep/{number}", (value,), swept=[words], optimizer={"lr": number})
        results.append((words, SimpleNamespace(run=RunDirectory(path)), JobState.SUCCEEDED))
    never = SimpleNamespace(run=RunDirectory(folder / "sweep/never"))
    sweep_end.show([*results, ("optimizer.lr=9", never, JobState.PENDING)])
    printed = capsys.readouterr().out
    assert re.search(r"^optimizer.lr=1 +succeeded, best +75.00 %", printed, re.M)
    assert printed.count("best") == 1
    assert re.search(r"^optimizer.lr=9 +pending", printed, re.M)
    assert "page    sweep/compare.html" in printed
    assert "optimizer.lr=1" in (folder / "sweep/compare.html").read_text()
    # The same of the sweep's folder, later.
    compared("sweep")
    assert "page    sweep/compare.html" in capsys.readouterr().out


def test_without_a_page_all_differences_are_printed(folder, capsys):
    run(folder, "a")
    run(folder, "b", data={f"key{n}": n for n in range(40)})
    compared("a", "b")
    assert "10 more differences on the page" in capsys.readouterr().out
    compared("a", "b", "--no-page")
    printed = capsys.readouterr().out
    assert "on the page" not in printed
    assert printed.count("data.key") == 40


def test_members_of_two_sweeps_with_the_same_values_are_told_apart(folder, capsys):
    for name in ("one/a", "two/a"):
        run(folder, name, swept=["optimizer.lr=0.1"], optimizer={"lr": 0.1})
    labels = [each["label"] for each in compared("one", "two", "--no-page").runs]
    assert labels == ["one/a", "two/a"]


def test_a_page_that_cannot_be_written_costs_a_sweep_nothing(folder, capsys):
    path = run(folder, "sweep/a")
    (folder / "sweep/compare.html").write_text("mine")
    sweep_end.show([("seed=1", SimpleNamespace(run=RunDirectory(path)), JobState.SUCCEEDED)])
    printed = capsys.readouterr().out
    assert "there is no page of this sweep: " in printed
    assert (folder / "sweep/compare.html").read_text() == "mine"


def test_of_many_runs_the_best_curves_are_drawn(folder):
    paths = [run(folder, str(n), (n / 100,), seed=n) for n in range(12)]
    comparison = Comparison([facts_of(FoundRun(path.name, path)) for path in paths])
    assert [each.name for each in page.drawn_runs(comparison)] == [str(n) for n in range(11, 3, -1)]
    assert "Of the best 8 of 12 runs." in page.render(comparison, (), "many")

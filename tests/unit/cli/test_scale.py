"""`python -m distdl scale` without a worker: its members, what is measured again, and the table,
the advice and the plot of what was measured."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib import pyplot
from omegaconf import OmegaConf
from pytest import approx

from distdl.job import JobState
from distdl.launch import jobs, submitting
from distdl.tools.measure import PHASES
from distdl.tools.scaling import Link, advice, members, plot, printing, results
from distdl.tools.scaling.results import Rented
from distdl.util.errors import UserError

TINY = ("model=resnet18", "data.batch_size=12", "trainer.accelerator=cpu", "tracking=none")
MINE = ("scale", *TINY, "name=mine")
ONE = (*MINE, "--devices", "1", "--mode", "weak")
NAME = "single-1x1-batch12"
RUN = Path("outputs/default/mine/single-1x1-batch12")
HOOKED = ("ddp", "ddp strategy.comm_hook=bf16")


def bench(world=1, nodes=1, rate=100.0, batch=0, communication=0.0, bound="compute-bound", **more):
    """What a benchmark writes: 12 samples a device, `rate` img/s of all devices."""
    batch = batch or 12 * world
    split = {**dict.fromkeys(PHASES, 0.0), "forward": 0.04, "backward": 0.08}
    split["communication"] = communication
    seconds = {"median": batch / rate, "p95": batch / rate}
    side = {
        "images_per_second": rate,
        "windows": [0.9 * rate, rate, 1.05 * rate],
        "step_seconds": seconds,
        "split": split,
    }
    setting = {
        "strategy": "ddp" if world > 1 else "single",
        "comm_hook": "none",
        **more,
        "strategy_node": {"bucket_cap_mb": 25},
        "precision": "32-true",
        "nodes": nodes,
        "devices_per_node": world // nodes,
    }
    result = {"communication": setting.pop("trace", {"calls": 3.0} if world > 1 else None)}
    setting |= {"world_size": world, "global_batch": batch}
    link = {"bandwidth": 1e9, "latency": 1e-5, "ranks": world} if world > 1 else None
    result |= {"device": "a CPU", "real": side, "held": side, "link": link, "setting": setting}
    result |= {"epoch_samples": 36_000, "model": {"gradient_bytes": 44_000_000, "mfu": 0.1}}
    return {**result, "verdict": {"bound": bound, "why": "", "remedies": ["do this"]}}


def member(result, name="ddp", *modes):
    setting = result["setting"]
    size = (setting["nodes"], setting["devices_per_node"])
    return members.Member(name, *size, list(modes or ("weak",)), None, None, result)


def test_sizes_and_batches_of_members(tmp_path, monkeypatch):
    """A node is filled before the next one, and one device is measured once."""
    monkeypatch.chdir(tmp_path)
    assert members.sizes([4, 1, 2], [2, 1]) == [(1, 1), (1, 2), (1, 4), (2, 4)]
    result = members.members(TINY, HOOKED, [(1, 1), (2, 2)], ("weak", "strong"))
    assert len({m.name for m in result}) == len(result) == 1 + 2 * 2
    alone = [(m.strategy, m.modes) for m in result if m.world_size == 1]
    assert alone == [("single", ["weak", "strong"])]
    for mode, batch in (("weak", 12), ("strong", 3)):
        assert {m.config.data.batch_size for m in result if m.modes == [mode]} == {batch}
    hooks = {m.config.strategy.comm_hook for m in result if "bf16" in m.strategy}
    assert hooks == {"bf16"}
    with pytest.raises(UserError, match="does not divide by 5"):
        members.members(TINY, HOOKED, [(1, 5)], ("strong",))
    # A pipeline takes the batch of all its devices.
    for strategy, batch in (("pipeline", 48), ("pipeline strategy.stages=2", 24)):
        (one,) = members.members(TINY, (strategy,), [(1, 4)], ("weak",))
        assert one.config.data.batch_size == batch
    # Published numbers are shown beside their own model only.
    for name, known in (("resnet50", True), ("wide_resnet50_2", False)):
        one.config = OmegaConf.create({"model": {"_target_": f"torchvision.models.{name}"}})
        assert one.is_resnet50 is known


@pytest.fixture
def started(without_stage_2, monkeypatch):
    """The names of the runs that were started, each of which ends at once. It has a result, unless
    its name ends with `started.fails`."""

    class Started(list):
        fails = "nothing"

    started = Started()

    def run_one(plan):
        started.append(plan.run.path.name)
        attempt = submitting.create_attempt(plan, ["x"], None)
        state = JobState.FAILED
        if started.fails not in started[-1]:
            world = plan.resources.world_size
            batch = plan.config.data.batch_size
            result = bench(world, rate=45 * world if world > 1 else 100, batch=batch * world)
            result["attempt"] = attempt.number
            state = JobState.SUCCEEDED
            (plan.run.path / "benchmark.json").write_text(json.dumps(result))
        attempt.end(state)
        return state

    monkeypatch.setattr("distdl.launch.sweeps.run_one", run_one)
    return started


def test_only_what_is_missing_is_measured(command, started):
    typed = ("scale", *TINY, "--devices", "1,2", "--mode", "weak")
    started.fails = "1x2"
    result = command(*typed)
    assert result.code == 1
    assert "not measured: ddp-1x2-batch12" in result.out
    started.fails = "nothing"
    result = command(*typed, "--vm", "standard_nc6s_v3", "--predict", "64")
    assert result.code == 0
    assert started == [NAME, "ddp-1x2-batch12", "ddp-1x2-batch12"]
    assert "45.0 %" in result.out
    assert "$3.06 an hour" in result.out
    assert "most efficient of several: ddp on 1 x 2 (weak), 45 %" in result.out
    (folder,) = Path("outputs/default").glob("scale-*")
    record = json.loads((folder / "scale.json").read_text())
    assert [r["efficiency"] for r in record["rows"]] == [1.0, approx(0.45)]
    assert record["rows"][1]["predicted"]
    assert record["vm"] == "Standard_NC6s_v3"
    # The prediction does not know what made it so slow; a note reports the difference.
    (note,) = record["notes"]
    assert note.startswith("ddp on 1 x 2 (weak): measured 45.0 %, predicted ")
    assert f"note    {note}\n" in result.out
    result = command("scale", *TINY, "--devices", "2", "--mode", "weak")
    assert result.code == 0
    assert len(started) == 3
    assert "one device is measured as well" in result.out


def test_what_is_under_way_elsewhere_or_damaged(command, started, monkeypatch):
    assert command(*ONE).code == 0
    file, status = RUN / "benchmark.json", RUN / "attempts/001/status.json"
    ended = json.loads(status.read_text())
    status.write_text(json.dumps({**ended, "state": "RUNNING", "host": "another"}))
    result = command(*ONE)
    assert result.code == 0
    assert len(started) == 1
    assert "not measured" not in result.out
    assert f"under way: {NAME}; once they have ended" in result.out
    # It has ended, and its files are with a platform's store.
    file.unlink()
    (RUN / "attempts/001/job.json").write_text('{"handle": "far://1"}')
    status.write_text(json.dumps({**ended, "concluded": True}))
    monkeypatch.setattr(jobs, "job_of", lambda attempt: SimpleNamespace(is_remote=True))
    result = command(*ONE)
    assert result.code == 1
    assert len(started) == 1
    assert f"jobs fetch {RUN}\n" in result.out
    assert "resumes with them" not in result.out
    assert f"not fetched: {NAME}; fetch them" in result.out
    # A job that shares our store has nothing to fetch.
    monkeypatch.setattr(jobs, "job_of", lambda attempt: SimpleNamespace(is_remote=False))
    for number, left in enumerate(("", "{", '{"attempt": 1}'), 2):
        if left:
            file.write_text(left)
        result = command(*ONE)
        assert result.code == 0
        assert started == [NAME] * number
        assert "measured again" in result.out
        assert json.loads(file.read_text())["attempt"] == number
        assert ("could not be read" in result.out) == bool(left)
        assert not left or file.with_name("benchmark.json.damaged").read_text() == left


@pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix")
def test_what_was_measured_before_stays_in_the_table(command, started):
    folder = RUN.parent
    two = (*MINE, "--devices", "1,2")
    assert command(*two).code == 0
    assert len(started) == 1 + 2

    def rows():
        rows = json.loads((folder / "scale.json").read_text())["rows"]
        return {(r["strategy"], r["mode"], r["devices"]) for r in rows}

    complete = rows()
    assert len(complete) == 2 * 2
    result = command(*ONE)
    assert result.code == 0
    assert len(started) == 3
    assert rows() == complete
    assert "strong scaling" in result.out
    assert f"{NAME}: measured before\n" in result.out
    # A row without a result is left out of both, and reported.
    (folder / "ddp-1x2-batch12/benchmark.json").unlink()
    result = command(*ONE)
    assert rows() == complete - {("ddp", "weak", 2)}
    assert "left out: ddp-1x2-batch12, whose benchmark.json is gone" in result.out
    # With other settings of the task, nothing of before can stand beside them in table or plot.
    started.fails = "single"
    result = command(*ONE, "task.steps=7")
    assert "measured before with task.steps=20, so it is measured again" in result.out
    assert result.code == 1
    assert "not measured: single" in result.out, "an older one was shown"
    started.fails = "nothing"
    result = command(*ONE, "task.steps=7")
    assert result.code == 0
    assert "100.0 %" in result.out
    assert rows() == {("single", "weak", 1), ("single", "strong", 1)}
    assert "which was measured with other settings" in result.out
    assert not (folder / "scale.png").exists()


REFUSED = {
    "--devices 0,2": "--devices",
    "--between nan": "more than",
    "--predict 1": "2 or more",
    "--vm Standard_X": "no VM size",
    "--spot": "--vm Standard_ND40rs",
    "--mode week": "there is no 'week'",
    "trainer.devices=2": "--devices 1,2,4",
    "strategy.comm_hook=bf16": "belongs to a strategy",
    "--devices 2,4 --strategy dpd": "did you mean strategy=ddp",
}


@pytest.mark.parametrize("arguments, message", REFUSED.items())
def test_refused_arguments(command, started, arguments, message):
    result = command("scale", *TINY, *arguments.split())
    assert result.code == 2
    assert not started
    assert not Path("outputs").exists()
    assert message in result.err
    assert result.err.count("did you mean") < 2


def weak(*measured, rented=None):
    """Rows of weak scaling, of one device and what else was measured."""
    return results.rows([member(bench(), "single"), *measured], rented, None, ("weak",))


def test_efficiency_prediction_and_price():
    measured = [
        member(bench(), "single", "weak", "strong"),
        member(bench(2, rate=160, communication=0.03)),
        member(bench(8, nodes=2, rate=480)),
        member(bench(2, rate=120, batch=12), "ddp", "strong"),
    ]
    rented = Rented("VM", gpus=4, price=2.0, bandwidth=0)
    rows = results.rows(measured, rented, None, ("weak", "strong"))
    weak, strong = ({r.world_size: r for r in rows if r.mode == m} for m in ("weak", "strong"))
    assert {n: r.efficiency for n, r in weak.items()} == approx({1: 1, 2: 0.8, 8: 0.6})
    assert strong[2].efficiency == approx(0.6)
    assert weak[2].communication == approx(0.03 / 0.15)
    assert weak[2].spread == approx(0.15)
    # 36,000 images: 225 s on one VM, 75 s on two.
    assert weak[2].price == approx(2 * 225 / 3600)
    assert weak[8].price == approx(4 * 75 / 3600)
    # 44 MB in two buckets: 44 ms on the link, half of it behind a backward of 80 ms.
    assert weak[2].predicted.step_seconds == approx(0.12 + 0.022, rel=0.01)
    assert strong[2].predicted.step_seconds == approx(0.06 + 0.024, rel=0.05)
    assert weak[1].predicted is None
    assert results.rows(measured[1:], None, None, ("weak",))[0].efficiency is None
    # Without a known link or strategy, nothing is predicted.
    one, two, *_ = (each.result for each in measured)
    inside, between = (results.links_of(measured[:2], None, x) for x in (None, Link(1e8, 1e-5)))
    assert results.prediction(one, two, inside, 2, 4) is None
    assert results.prediction(one, two, between, 2, 4).efficiency < 0.5
    assert results.prediction(one, bench(2, strategy="local_sgd"), between, 2) is None
    assert results.links_of(measured[:2], Rented("VM", 2, None, 7e9), None)[1].bandwidth == 7e9
    # bf16: as many buckets, each half as large; half of the backward hides one of them.
    half = results.prediction(one, bench(2, comm_hook="bf16"), (Link(1e8, 0.0), None), 2)
    assert half.step_seconds == approx(0.12 + 0.22 - 0.04)


UP_FIRST = "scale up before out (weak): 95 % inside a node, 62 %"
CAUSE = "communication is not the cause"
ADVICE = [
    ([], "more than one device", "most efficient"),
    ([bench(2, bound="data-bound")], "input first", CAUSE),
    ([bench(2, rate=190), bench(4, nodes=2, rate=250)], UP_FIRST, "input first"),
    ([bench(2, communication=0.04)], "communicates 25 % of a step: do this", CAUSE),
    ([bench(2, rate=120)], CAUSE, "communicates"),
    ([bench(2, rate=120, trace=None)], "ddp on 1 x 2 (weak): do this", CAUSE),
    ([bench(2, rate=230)], "", "most efficient"),
]


@pytest.mark.parametrize("measured, present, absent", ADVICE)
def test_advice(measured, present, absent):
    rented = Rented("VM", 1, 1.0, 0)
    text = "\n".join(advice.advise(weak(*map(member, measured), rented=rented)))
    assert present in text
    assert absent not in text
    assert ("cheapest: " in text) == bool(measured)


def test_a_refuted_prediction_and_a_disturbed_measurement_are_reported():
    def rows(efficiency):
        return weak(member(bench(2, rate=200 * efficiency)))

    (note,) = advice.disturbed(rows(1.15))
    assert note.startswith("ddp on 1 x 2 (weak): 115 % means that something slowed the measurement")
    guess = rows(1.0)[1].predicted.efficiency
    # More than a few points, and less than the windows of one measurement are apart.
    for near in (1.15, guess - 1.5 * printing.CLOSE):
        assert printing.gaps(rows(near), {}) == []
    (text,) = printing.gaps(rows(0.2), {"ddp": {1: 1.0, 2: 0.85, 64: 0.5}})
    assert "do not trust predictions beyond 2 devices either" in text


def test_the_plot_is_complete(tmp_path, monkeypatch):
    """Of members that are faster together than alone, of a strategy with a long name."""
    figures = []
    _, name = HOOKED
    rows = weak(member(bench(2, rate=260), name))
    beyond = {name: {2: 0.97, 4096: 0.7}}
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot.draw(tmp_path / "scale.png", rows, beyond, "Scaling", published_too=True)
    (figure,) = figures
    (axes,) = figure.axes
    legend = figure.legends[0].get_texts()
    assert axes.get_ylim()[1] > 130
    assert any("beyond" in text.get_text() for text in legend)
    assert len(axes.texts) == 8, "the published lines have their names"
    for text in (*axes.texts, axes.title, *legend, axes.xaxis.label):
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.width, text
        assert box.y0 >= 0, text
        assert box.y1 <= figure.bbox.height, text

"""`python -m distdl scale` without a worker: its members, what is measured again, and the table,
the advice and the plot of what was measured."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.text import Text
from omegaconf import OmegaConf
from pytest import approx

from distdl.benchmark import PHASES
from distdl.job import JobState
from distdl.launch import jobs, start
from distdl.scaling import Link, members, plot, printing, results
from distdl.scaling.results import Rented
from distdl.util.errors import UserError

TINY = ("model=resnet18", "data.batch_size=12", "trainer.accelerator=cpu", "tracking=none")
ONE = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
NAME, RUN = "single-1x1-batch12", Path("outputs/default/mine/single-1x1-batch12")
HOOKED = ("ddp", "ddp strategy.comm_hook=bf16")
PARTS = {"bandwidth": 1e9, "latency": 1e-5}


def bench(world=1, nodes=1, rate=100.0, batch=0, communication=0.0, bound="compute-bound", **more):
    """What a benchmark writes: 12 samples a device, `rate` img/s of all devices."""
    batch = batch or 12 * world
    split = {**dict.fromkeys(PHASES, 0.0), "forward": 0.04, "backward": 0.08}
    split["communication"] = communication
    seconds = {"median": batch / rate, "p95": batch / rate}
    side = {"images_per_second": rate, "windows": [0.9 * rate, rate, 1.05 * rate]}
    side |= {"step_seconds": seconds, "split": split}
    setting = {"strategy": "ddp" if world > 1 else "single", "comm_hook": "none", **more}
    setting |= {"strategy_node": {"bucket_cap_mb": 25}, "precision": "32-true"}
    setting |= {"nodes": nodes, "devices_per_node": world // nodes}
    trace = setting.pop("trace", {"calls": 3.0} if world > 1 else None)
    return {
        "device": "a CPU",
        "real": side,
        "held": side,
        "link": {**PARTS, "ranks": world} if world > 1 else None,
        "communication": trace,
        "epoch_samples": 36_000,
        "setting": {**setting, "world_size": world, "global_batch": batch},
        "model": {"gradient_bytes": 44_000_000, "mfu": 0.1},
        "verdict": {"bound": bound, "why": "", "remedies": ["do this"]},
    }


def member(result, name="ddp", *modes):
    setting = result["setting"]
    size = (setting["nodes"], setting["devices_per_node"])
    return members.Member(name, *size, list(modes or ("weak",)), None, None, result)


def test_sizes_and_batches_of_members(tmp_path, monkeypatch):
    """A node is filled before the next one, and one device is measured once."""
    monkeypatch.chdir(tmp_path)
    assert members.sizes([4, 1, 2], [2, 1]) == [(1, 1), (1, 2), (1, 4), (2, 4)]
    result = members.members(TINY, HOOKED, [(1, 1), (1, 2), (2, 2)], ("weak", "strong"))
    assert len({m.name for m in result}) == len(result) == 1 + 2 * 2 * 2
    alone = [(m.strategy, m.modes) for m in result if m.world_size == 1]
    assert alone == [("single", ["weak", "strong"])]
    for mode, batches in (("weak", {2: 12, 4: 12}), ("strong", {2: 6, 4: 3})):
        same = [m for m in result if m.modes == [mode]]
        assert {m.world_size: m.config.data.batch_size for m in same} == batches
    hooks = {m.config.strategy.comm_hook for m in result if "bf16" in m.strategy}
    assert hooks == {"bf16"}
    with pytest.raises(UserError, match="does not divide by 5"):
        members.members(TINY, HOOKED, [(1, 5)], ("strong",))
    # A pipeline takes the batch of all its devices.
    for strategy, batch in (("pipeline", 48), ("pipeline strategy.stages=2", 24)):
        (one,) = members.members(TINY, (strategy,), [(1, 4)], ("weak",))
        assert one.config.data.batch_size == batch


class Started:
    """The runs that were started. Each of them ends at once, with a result if it succeeds."""

    def __init__(self):
        self.names, self.fails = [], "nothing"  # part of a name

    def run_one(self, plan):
        self.names.append(plan.run.path.name)
        attempt = start.create_attempt(plan, ["x"], None)
        failed = self.fails in self.names[-1]
        if not failed:
            world, batch = plan.resources.world_size, plan.config.data.batch_size
            result = bench(world, rate=45 * world if world > 1 else 100, batch=batch * world)
            result["attempt"] = attempt.number
            (plan.run.path / "benchmark.json").write_text(json.dumps(result))
        state = JobState.FAILED if failed else JobState.SUCCEEDED
        attempt.end(state)
        return state


@pytest.fixture
def started(without_stage_2, monkeypatch):
    started = Started()
    monkeypatch.setattr("distdl.launch.sweeps.run_one", started.run_one)
    return started


def change_status(**fields):
    file = RUN / "attempts/001/status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_only_what_is_missing_is_measured(command, started):
    typed = ("scale", *TINY, "--devices", "1,2", "--mode", "weak")
    started.fails = "1x2"
    result = command(*typed)
    assert result.code == 1 and "not measured: ddp-1x2-batch12" in result.out
    started.fails = "nothing"
    result = command(*typed, "--vm", "standard_nc6s_v3", "--predict", "64")
    assert result.code == 0 and started.names == [NAME, "ddp-1x2-batch12", "ddp-1x2-batch12"]
    assert "45.0 %" in result.out and "$3.06 an hour" in result.out
    assert "most efficient of several: ddp on 1 x 2 (weak), 45 %" in result.out
    (folder,) = Path("outputs/default").glob("scale-*")
    assert (folder / "scale.png").stat().st_size > 10_000
    record = json.loads((folder / "scale.json").read_text())
    assert [r["efficiency"] for r in record["rows"]] == [1.0, approx(0.45)]
    assert record["rows"][1]["predicted"] and record["vm"] == "Standard_NC6s_v3"
    # The prediction does not know what made it so slow; a note reports the difference.
    (note,) = record["notes"]
    assert "measured 45.0 %, predicted " in note and f"note    {note}\n" in result.out
    result = command("scale", *TINY, "--devices", "2", "--mode", "weak")
    assert result.code == 0 and len(started.names) == 3
    assert "one device is measured as well" in result.out


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"attempt": 1}'])
def test_a_missing_or_damaged_result_is_measured_again(command, started, left):
    assert command(*ONE).code == 0
    file, damaged = RUN / "benchmark.json", RUN / "benchmark.json.damaged"
    file.write_text(left) if left else file.unlink()
    result = command(*ONE)
    assert result.code == 0 and started.names == [NAME] * 2 and "measured again" in result.out
    assert json.loads(file.read_text())["attempt"] == 2
    assert ("could not be read" in result.out) == damaged.exists() == bool(left)
    assert not left or damaged.read_text() == left


def test_a_run_under_way_or_with_a_remote_store_is_not_measured_again(
    command, started, monkeypatch
):
    assert command(*ONE).code == 0
    change_status(state="RUNNING", host="another")
    result = command(*ONE)
    assert result.code == 0 and len(started.names) == 1 and "not measured" not in result.out
    assert f"under way: {NAME}; once they have ended" in result.out
    (RUN / "benchmark.json").unlink()
    (RUN / "attempts/001/job.json").write_text('{"handle": "far://1"}')
    change_status(state="SUCCEEDED", concluded=True)
    remote = type("Remote", (), {"fetch": lambda self, to: None})
    monkeypatch.setattr(jobs, "job_of", lambda attempt: remote())
    result = command(*ONE)
    assert result.code == 1 and len(started.names) == 1
    assert f"jobs fetch {RUN}\n" in result.out and "resumes with them" not in result.out
    assert f"not fetched: {NAME}; fetch them" in result.out
    monkeypatch.setattr(
        jobs, "job_of", lambda attempt: object()
    )  # shares our store: nothing to fetch
    assert command(*ONE).code == 0 and len(started.names) == 2


def test_what_was_measured_before_stays_in_the_table(command, started):
    typed = ("scale", *TINY, "name=mine")
    assert command(*typed, "--devices", "1,2,4").code == 0
    folder, count = Path("outputs/default/mine"), len(started.names)

    def rows():
        rows = json.loads((folder / "scale.json").read_text())["rows"]
        return {(r["strategy"], r["mode"], r["devices"]) for r in rows}

    complete = rows()
    assert len(complete) == 2 * (1 + 2)
    result = command(*typed, "--devices", "1,2", "--mode", "weak")
    assert result.code == 0 and len(started.names) == count and rows() == complete
    assert "strong scaling" in result.out
    # A row without a result is left out of both, and reported.
    (folder / "ddp-1x4-batch12/benchmark.json").unlink()
    result = command(*typed, "--devices", "1,2")
    assert rows() == complete - {("ddp", "weak", 4)}
    assert "left out: ddp-1x4-batch12, whose benchmark.json is gone" in result.out
    # With other settings of the task, nothing of before can stand beside them in table or plot.
    result = command(*typed, "task.steps=7", "--devices", "1", "--mode", "weak")
    assert rows() == {("single", "weak", 1), ("single", "strong", 1)}
    assert "which was measured with other settings" in result.out
    assert not (folder / "scale.png").exists()


def test_other_settings_of_the_task_are_measured_again(command, started):
    assert command(*ONE, "task.steps=5").code == 0
    assert f"{NAME}: measured before\n" in command(*ONE, "task.steps=5").out
    started.fails = "single"
    result = command(*ONE, "task.steps=7")
    assert "measured before with task.steps=5, so it is measured again" in result.out
    assert result.code == 1 and "not measured: single" in result.out, "an older one was shown"
    started.fails = "nothing"
    result = command(*ONE, "task.steps=7")
    assert result.code == 0 and "measured before" not in result.out and "100.0 %" in result.out


REFUSED = {"--devices 0,2": "--devices", "--devices two": "--devices", "--between nan": "more than"}
REFUSED |= {"--mode week": "there is no 'week'", "--vm Standard_X": "no VM size"}
REFUSED |= {"trainer.devices=2": "--devices 1,2,4", "--predict 1": "2 or more"}
REFUSED |= {"strategy.comm_hook=bf16": "belongs to a strategy", "--between -1": "more than 0"}
REFUSED |= {"--devices 2,4 --strategy dpd": "did you mean strategy=ddp"}
REFUSED |= {"--low-priority": "--vm Standard_ND40rs_v2"}


@pytest.mark.parametrize("arguments, message", REFUSED.items())
def test_refused_arguments(command, started, arguments, message):
    result = command("scale", *TINY, *arguments.split())
    assert result.code == 2 and not started.names and not Path("outputs").exists()
    assert message in result.err and result.err.count("did you mean") < 2


def weak(*measured, rented=None):
    """Rows of weak scaling, of one device and what else was measured."""
    return results.rows([member(bench(), "single"), *measured], rented, None, ("weak",))


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draws a plot, and keeps its figure open."""
    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", figures.append)

    def draw(rows, further=None, published=True):
        plot.draw(tmp_path / "scale.png", rows, further or {}, "Scaling", published)
        figures[-1].canvas.draw()
        return figures[-1]

    yield draw
    for figure in figures:
        close(figure)


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
    assert weak[2].communication == approx(0.03 / 0.15) and weak[2].spread == approx(0.15)
    # 36,000 images: 225 s on one VM, 75 s on two.
    assert weak[2].price == approx(2 * 225 / 3600) and weak[8].price == approx(4 * 75 / 3600)
    # 44 MB in two buckets: 44 ms on the link, half of it behind a backward of 80 ms.
    assert weak[2].predicted.step_seconds == approx(0.12 + 0.022, rel=0.01)
    assert strong[2].predicted.step_seconds == approx(0.06 + 0.024, rel=0.05)
    assert weak[1].predicted is None
    assert results.rows(measured[1:], None, None, ("weak",))[0].efficiency is None


def test_predictions_need_a_known_link_and_strategy():
    one, two = bench(), bench(2, rate=160)
    measured = [member(one, "single"), member(two)]
    inside = results.links_of(measured, None, None)
    assert inside == (Link(1e9, 1e-5), None)
    assert results.prediction(one, two, inside, 2, 4) is None
    between = results.links_of(measured, None, Link(1e8, 1e-5))
    assert results.prediction(one, two, between, 2, 4).efficiency < 0.5
    assert results.prediction(one, bench(2, strategy="local_sgd"), between, 2) is None
    assert results.links_of(measured, Rented("VM", 2, None, 7e9), None)[1] == Link(7e9, 2e-6)
    # bf16: as many buckets, each half as large; half of the backward hides one of them.
    links = (Link(1e8, 0.0), None)
    plain, half = (
        results.prediction(one, bench(2, comm_hook=h), links, 2) for h in ("none", "bf16")
    )
    assert half.communication_seconds == approx(plain.communication_seconds / 2)
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
    advice = "\n".join(results.advise(weak(*map(member, measured))))
    assert present in advice and absent not in advice
    rented = weak(member(bench(2)), rented=Rented("VM", 1, 1.0, 0))
    assert "cheapest: single" in "\n".join(results.advise(rented))


def test_published_numbers_are_shown_beside_their_own_model_only(draw, capsys):
    two, prefix = member(bench(2)), "torchvision.models"
    for target in (f"{prefix}.resnet50", f"{prefix}.wide_resnet50_2", "mine.seresnet50"):
        two.config = OmegaConf.create({"model": {"network": {"_target_": target}}})
        assert two.is_resnet50 is (target == f"{prefix}.resnet50")
    (axes,) = draw(weak(two), published=False).axes
    assert not axes.texts and axes.get_xlim()[1] < 3
    printing.print_rows(weak(two), None)
    assert "samples/s" in capsys.readouterr().out  # of data that are no images of distdl's


def test_the_table_of_a_narrow_terminal_leaves_columns_out(monkeypatch, capsys):
    rows = weak(member(bench(2, rate=160), "ddp strategy.comm_hook=bf16"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width, left_out in (("60", {"spread", "data", "verdict"}), ("100", {"spread", "data"})):
        monkeypatch.setenv("COLUMNS", width)
        printing.print_rows(rows, None)
        words = (output := capsys.readouterr().out).split()
        assert "…" not in output and "80.0 %" in output and "comm_hook=bf16" in "".join(words)
        assert left_out.isdisjoint(words) and ("compute-bound" in words) is (width == "100")


def test_a_refuted_prediction_and_a_disturbed_measurement_are_reported():
    disturbed = weak(member(bench(2, rate=230)))
    (note,) = results.disturbed(disturbed)
    assert note.startswith(
        "ddp on 1 x 2 (weak): 115 % means that something slowed the measurement of one"
    )
    assert printing.gaps(disturbed, {}) == []

    def rows(efficiency):
        return weak(member(bench(2, rate=200 * efficiency)))

    guess = rows(1.0)[1].predicted.efficiency
    assert guess > 0.5 and printing.gaps(rows(guess), {}) == []
    # More than a few points, and less than the windows of one measurement are apart.
    near = rows(guess - 1.5 * printing.CLOSE)
    assert near[1].spread > 0.1 and printing.gaps(near, {}) == []
    (text,) = printing.gaps(rows(0.2), {})
    compared = f"ddp on 1 x 2 (weak): measured 20.0 %, predicted {100 * guess:.1f} %, "
    assert text.startswith(compared) and "something slows it" in text
    (text,) = printing.gaps(rows(0.2), {"ddp": {1: 1.0, 2: 0.85, 64: 0.5}})
    assert "do not trust predictions beyond 2 devices either" in text


def test_nothing_is_cut_off_the_plot(draw):
    # Faster together than alone, and a strategy with a long name.
    figure = draw(weak(member(bench(2, rate=260), "ddp strategy.comm_hook=bf16")))
    (axes,) = figure.axes
    assert axes.get_ylim()[1] > 130
    for text in (*axes.texts, axes.title, *figure.legends[0].get_texts(), axes.xaxis.label):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, text
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height, text
    # Labels of the published lines do not touch each other.
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda b: b.y0)
    assert len(boxes) == 8 and all(a.y1 <= b.y0 + 0.5 for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize("exponents, reach", [(2, 32 * 1.2), (13, 32 * 2)])
def test_the_plot_names_only_what_is_in_it(draw, exponents, reach):
    beyond = {"ddp": {2**i: 0.97**i for i in range(exponents)}}
    figure = draw(weak(member(bench(2, rate=160))), beyond)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any("beyond" in text for text in legend) is (exponents == 13)
    # Rows of dots lead to the labels, and none of them across decades without published numbers.
    (axes,) = figure.axes
    for text in axes.texts:
        assert text.arrow_patch.get_linestyle() == plot.DOTS
        start = Text.get_window_extent(text).x0  # an annotation's own has its arrow in it
        assert axes.transData.inverted().transform((start, 0))[0] < reach, text

"""`python -m distdl scale` without a worker: members, rows, advice, the plot's labels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distdl import jobs
from distdl.benchmark.clock import PHASES
from distdl.commands import _scale_members, _scale_plot, _scale_rows, _scale_table
from distdl.commands._scale_rows import Rented
from distdl.errors import UserError
from distdl.job import JobState
from distdl.scaling import Link

TINY = ("model=resnet18", "data.batch_size=12", "trainer.accelerator=cpu", "tracking=none")
STRATEGIES = ("ddp", "ddp strategy.comm_hook=bf16")


def bench(world: int = 1, nodes: int = 1, rate: float = 100.0, **more: Any) -> dict[str, Any]:
    """What a benchmark writes: 12 samples a device, `rate` img/s of all devices."""
    batch = more.pop("batch", 12 * world)
    split = {**dict.fromkeys(PHASES, 0.0), "forward": 0.04, "backward": 0.08}
    split["communication"] = more.pop("communication", 0.0)
    step = batch / rate
    side = {
        "images_per_second": rate,
        "windows": [0.9 * rate, rate, 1.05 * rate],
        "step_seconds": {"median": step, "p95": step},
        "split": split,
    }
    link = {"bandwidth": 1e9, "latency": 1e-5, "ranks": world} if world > 1 else None
    return {
        "device": "a CPU",
        "real": side,
        "held": side,
        "link": link,
        "communication": more.pop("trace", {"calls": 3.0} if world > 1 else None),
        "epoch_samples": 36_000,
        "setting": {
            "strategy": more.pop("strategy", "ddp" if world > 1 else "single"),
            "strategy_node": {"bucket_cap_mb": 25},
            "nodes": nodes,
            "devices_per_node": world // nodes,
            "world_size": world,
            "global_batch": batch,
            "comm_hook": more.pop("comm_hook", "none"),
            "precision": "32-true",
        },
        "model": {"gradient_bytes": 44_000_000, "mfu": 0.1},
        "verdict": {
            "bound": more.pop("bound", "compute-bound"),
            "why": "",
            "remedies": ["do this"],
        },
    }


def member(found: dict[str, Any], name: str = "ddp", *modes: str) -> Any:
    setting = found["setting"]
    return _scale_members.Member(
        name,
        setting["nodes"],
        setting["devices_per_node"],
        list(modes or ("weak",)),
        [],
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        found,
    )


def members(counts: list[tuple[int, int]], modes: tuple[str, ...] = ("weak", "strong")) -> Any:
    return _scale_members.members(TINY, STRATEGIES, counts, modes)


def test_sizes_fill_a_node_before_the_next_one() -> None:
    assert _scale_members.sizes([4, 1, 2], [2, 1]) == [(1, 1), (1, 2), (1, 4), (2, 4)]


def test_one_device_is_measured_once_and_batches_follow_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = members([(1, 1), (1, 2), (2, 2)])
    assert len(found) == 1 + 2 * 2 * 2
    assert [(m.strategy, m.modes) for m in found if m.world_size == 1] == [
        ("single", ["weak", "strong"])
    ]
    weak, strong = (
        {m.world_size: m.config.data.batch_size for m in found if m.modes == [mode]}
        for mode in ("weak", "strong")
    )
    assert (weak, strong) == ({2: 12, 4: 12}, {2: 6, 4: 3})
    hooked = [m for m in found if "bf16" in m.strategy]
    assert hooked and all(m.config.strategy.comm_hook == "bf16" for m in hooked)
    assert len({m.name for m in found}) == len(found)
    with pytest.raises(UserError, match="does not divide by 5"):
        members([(1, 5)])


def test_a_pipeline_takes_the_batch_of_all_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = _scale_members.members(TINY, ("pipeline",), [(1, 4)], ("weak",))
    assert found.config.data.batch_size == 48
    strategies = ("pipeline strategy.stages=2",)
    (found,) = _scale_members.members(TINY, strategies, [(1, 4)], ("weak",))
    assert found.config.data.batch_size == 24


def test_efficiency_prediction_and_price() -> None:
    measured = [
        member(bench(), "single", "weak", "strong"),
        member(bench(2, rate=160, communication=0.03)),
        member(bench(8, nodes=2, rate=480)),
        member(bench(2, rate=120, batch=12), "ddp", "strong"),
    ]
    rented = Rented("VM", gpus=4, price=2.0, bandwidth=0)
    rows = _scale_rows.rows(measured, rented, None, ("weak", "strong"))
    weak = {r.world_size: r for r in rows if r.mode == "weak"}
    strong = {r.world_size: r for r in rows if r.mode == "strong"}
    assert {n: r.efficiency for n, r in weak.items()} == pytest.approx({1: 1, 2: 0.8, 8: 0.6})
    assert strong[2].efficiency == pytest.approx(0.6)
    assert weak[2].communication == pytest.approx(0.03 / 0.15)
    assert weak[2].spread == pytest.approx(0.15)
    # 36,000 images: 225 s on one VM, 75 s on two.
    assert weak[2].price == pytest.approx(2 * 225 / 3600)
    assert weak[8].price == pytest.approx(2 * 2 * 75 / 3600)
    predicted = weak[2].predicted
    # 44 MB in two buckets: 44 ms on the link, half of it behind a backward of 80 ms.
    assert predicted and predicted.step_seconds == pytest.approx(0.12 + 0.022, rel=0.01)
    half = strong[2].predicted
    assert half and half.step_seconds == pytest.approx(0.06 + 0.024, rel=0.05)
    assert weak[1].predicted is None
    assert _scale_rows.rows(measured[1:], None, None, ("weak",))[0].efficiency is None


def test_beyond_a_node_nothing_is_predicted_that_nothing_is_known_of() -> None:
    one, two = bench(), bench(2, rate=160)
    measured = [member(one, "single"), member(two)]
    inside = _scale_rows.links_of(measured, None, None)
    assert inside == (Link(1e9, 1e-5), None)
    assert _scale_rows.prediction(one, two, inside, 2, 4) is None
    told = _scale_rows.links_of(measured, None, Link(1e8, 1e-5))
    found = _scale_rows.prediction(one, two, told, 2, 4)
    assert found and found.efficiency < 0.5
    rented = Rented("VM", 2, None, 7e9)
    assert _scale_rows.links_of(measured, rented, None)[1] == Link(7e9, 2e-6)
    unknown = bench(2, strategy="local_sgd")
    assert _scale_rows.prediction(one, unknown, told, 2) is None


def test_half_the_bytes_are_predicted_with_half_the_bytes() -> None:
    one, links = bench(), (Link(1e8, 0.0), None)
    plain = _scale_rows.prediction(one, bench(2), links, 2)
    half = _scale_rows.prediction(one, bench(2, comm_hook="bf16"), links, 2)
    assert plain and half
    assert half.communication_seconds == pytest.approx(plain.communication_seconds / 2)
    # As many buckets as before, each half as large: half of the backward hides one of them.
    assert half.step_seconds == pytest.approx(0.12 + 0.22 - 0.04)


def test_advice() -> None:
    def of(*measured: Any, rented: Rented | None = None) -> str:
        return "\n".join(
            _scale_rows.advise(
                _scale_rows.rows([member(bench(), "single"), *measured], rented, None, ("weak",))
            )
        )

    assert "more than one device" in of()
    assert "input first" in of(member(bench(2, bound="data-bound")))
    out = of(member(bench(2, rate=190)), member(bench(4, nodes=2, rate=250)))
    assert "scale up before out (weak): 95 % inside a node, 62 %" in out
    assert "communicates 25 % of a step: do this" in of(member(bench(2, communication=0.04)))
    assert "without communication being the cause" in of(member(bench(2, rate=120)))
    unseen = of(member(bench(2, rate=120, trace=None)))
    assert "ddp on 1 x 2 (weak): do this" in unseen and "without communication" not in unseen
    assert "cheapest: single" in of(member(bench(2)), rented=Rented("VM", 1, 1.0, 0))


def test_labels_of_the_reference_lines_do_not_touch(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 7), layout="constrained")
    axes.set_ylim(0, 108)
    ends = _scale_plot.references(axes)
    _scale_plot.label_right(axes, ends)
    figure.canvas.draw()
    boxes = sorted((t.get_window_extent() for t in axes.texts), key=lambda b: b.y0)
    assert len(boxes) == len(ends) == 8
    assert all(a.y1 <= b.y0 + 0.5 for a, b in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.width for box in boxes)
    plt.close(figure)


def test_only_what_is_missing_is_measured(
    command: Callable[..., Any], without_stage_2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run_one(plan: Any) -> JobState:
        from distdl import launch

        started.append(plan.run.path.name)
        attempt = launch.lay_down(plan, ["x"], None)
        if "1x2" in plan.run.path.name and len(started) < 3:
            attempt.end(JobState.FAILED)
            return JobState.FAILED
        world = plan.resources.world_size
        (plan.run.path / "benchmark.json").write_text(json.dumps(bench(world, rate=90 * world)))
        attempt.end(JobState.SUCCEEDED)
        return JobState.SUCCEEDED

    monkeypatch.setattr("distdl.sweeps.run_one", run_one)
    given = ("scale", *TINY, "--devices", "1,2", "--mode", "weak")
    said = command(*given)
    assert said.code == 1 and "not measured: ddp-1x2-batch12" in said.out
    said = command(*given, "--vm", "standard_nc6s_v3", "--predict", "2")
    # The one that had failed, and no other.
    assert said.code == 0
    assert started == ["single-1x1-batch12", "ddp-1x2-batch12", "ddp-1x2-batch12"]
    assert "100.0 %" in said.out and "$3.06 an hour" in said.out
    assert command(*given).code == 0 and len(started) == 3
    (folder,) = Path("outputs/default").glob("scale-*")
    assert (folder / "scale.png").stat().st_size > 10_000
    rows = json.loads((folder / "scale.json").read_text())["rows"]
    assert [r["efficiency"] for r in rows] == [1.0, 1.0] and rows[1]["predicted"]


@pytest.fixture
def started(without_stage_2: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; each of them writes a result at once."""
    names: list[str] = []

    def run_one(plan: Any) -> JobState:
        from distdl import launch

        names.append(plan.run.path.name)
        attempt = launch.lay_down(plan, ["x"], None)
        world, batch = plan.resources.world_size, plan.config.data.batch_size
        found = bench(world, rate=45 * world if world > 1 else 100, batch=batch * world)
        found["attempt"] = attempt.number
        (plan.run.path / "benchmark.json").write_text(json.dumps(found))
        attempt.end(JobState.SUCCEEDED)
        return JobState.SUCCEEDED

    monkeypatch.setattr("distdl.sweeps.run_one", run_one)
    return names


@pytest.mark.parametrize("left", ["", "{", "[1]", '{"attempt": 1}'])
def test_a_result_that_is_gone_or_damaged_is_measured_again(
    command: Callable[..., Any], started: list[str], left: str
) -> None:
    given = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
    assert command(*given).code == 0
    result = Path("outputs/default/mine/single-1x1-batch12/benchmark.json")
    result.write_text(left) if left else result.unlink()
    said = command(*given)
    assert said.code == 0 and started == ["single-1x1-batch12"] * 2
    assert "jobs fetch" not in said.out and "once more" in said.out
    assert json.loads(result.read_text())["attempt"] == 2
    damaged = result.with_name("benchmark.json.damaged")
    assert ("could not be read" in said.out) == damaged.exists() == bool(left)
    assert not left or damaged.read_text() == left


def test_a_result_that_lies_elsewhere_is_not_measured_again(
    command: Callable[..., Any], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
    assert command(*given).code == 0
    run = Path("outputs/default/mine/single-1x1-batch12")
    (run / "benchmark.json").unlink()
    (run / "attempts/001/job.json").write_text('{"handle": "far://1"}')
    status = json.loads((run / "attempts/001/status.json").read_text())
    (run / "attempts/001/status.json").write_text(json.dumps({**status, "concluded": True}))

    class Far:
        def fetch(self, to: Path) -> None: ...

    monkeypatch.setattr(jobs, "of", lambda attempt: Far())
    said = command(*given)
    # Nothing is shown, and nothing of it will come by itself.
    assert said.code == 1 and len(started) == 1
    assert "jobs fetch outputs/default/mine/single-1x1-batch12\n" in said.out
    assert "not here: single-1x1-batch12; fetch them" in said.out
    assert "goes on with them" not in said.out
    # A store that is shared with us has nothing to fetch.
    monkeypatch.setattr(jobs, "of", lambda attempt: object())
    assert command(*given).code == 0 and len(started) == 2


def test_what_is_under_way_is_no_failure(command: Callable[..., Any], started: list[str]) -> None:
    given = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
    assert command(*given).code == 0
    run = Path("outputs/default/mine/single-1x1-batch12")
    status = json.loads((run / "attempts/001/status.json").read_text())
    running = {**status, "state": "RUNNING", "host": "another"}
    (run / "attempts/001/status.json").write_text(json.dumps(running))
    said = command(*given)
    assert said.code == 0 and len(started) == 1
    assert "under way: single-1x1-batch12; once they have ended" in said.out
    assert "not measured" not in said.out


def test_one_device_is_measured_by_itself(command: Callable[..., Any], started: list[str]) -> None:
    said = command("scale", *TINY, "--devices", "2", "--mode", "weak", "--predict", "64")
    assert said.code == 0 and started == ["single-1x1-batch12", "ddp-1x2-batch12"]
    assert "one device is measured as well" in said.out
    assert "most efficient of several: ddp on 1 x 2 (weak), 45 %" in said.out
    # The prediction knows nothing of what made it so slow, and says so where it is read.
    (folder,) = Path("outputs/default").glob("scale-*")
    (note,) = json.loads((folder / "scale.json").read_text())["notes"]
    assert "measured 45.0 %, predicted " in note and f"note    {note}\n" in said.out


def test_what_was_measured_before_stays_in_the_table(
    command: Callable[..., Any], started: list[str]
) -> None:
    given = ("scale", *TINY, "name=mine")
    assert command(*given, "--devices", "1,2,4").code == 0
    folder, count = Path("outputs/default/mine"), len(started)

    def rows() -> set[tuple[str, str, int]]:
        found = json.loads((folder / "scale.json").read_text())["rows"]
        return {(r["strategy"], r["mode"], r["devices"]) for r in found}

    whole = rows()
    assert len(whole) == 2 * (1 + 2)
    said = command(*given, "--devices", "1,2", "--mode", "weak")
    assert said.code == 0 and len(started) == count and rows() == whole
    assert "strong scaling" in said.out
    # What has no result any more is gone from both, with a word.
    (gone,) = folder.glob("ddp-1x4-batch12")
    (gone / "benchmark.json").unlink()
    said = command(*given, "--devices", "1,2")
    assert rows() == whole - {("ddp", "weak", 4)}
    assert "left out: ddp-1x4-batch12, there is no benchmark.json" in said.out
    # Other settings of the task: nothing of before can stand beside them, and no plot of it.
    said = command(*given, "task.steps=7", "--devices", "1", "--mode", "weak")
    assert rows() == {("single", "weak", 1)} | {("single", "strong", 1)}
    assert "it was measured with other settings" in said.out
    assert not (folder / "scale.png").exists()


def test_a_refuted_prediction_is_said() -> None:
    def rows(efficiency: float) -> list[_scale_rows.Row]:
        two = member(bench(2, rate=200 * efficiency))
        return _scale_rows.rows([member(bench(), "single"), two], None, None, ("weak",))

    guess = rows(1.0)[1].predicted
    assert guess and guess.efficiency > 0.5
    assert _scale_table.gaps(rows(guess.efficiency), {}) == []
    # More than a few points, and less than the windows of one measurement are apart.
    near = rows(guess.efficiency - 1.5 * _scale_table.CLOSE)
    assert near[1].spread > 0.1 and _scale_table.gaps(near, {}) == []
    (text,) = _scale_table.gaps(rows(0.2), {})
    said = f"measured 20.0 %, predicted {100 * guess.efficiency:.1f} %, "
    assert text.startswith(f"ddp on 1 x 2 (weak): {said}")
    assert "what slows it here" in text
    (text,) = _scale_table.gaps(rows(0.2), {"ddp": {1: 1.0, 2: 0.85, 64: 0.5}})
    assert "do not believe what is predicted beyond 2 devices either" in text


def test_a_problem_is_said_once(command: Callable[..., Any]) -> None:
    said = command("scale", *TINY, "--devices", "2,4", "--strategy", "dpp")
    assert said.code == 2 and said.err.count("did you mean") == 1


def test_other_settings_of_the_task_are_measured_again(
    command: Callable[..., Any], without_stage_2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [JobState.SUCCEEDED]

    def run_one(plan: Any) -> JobState:
        from distdl import launch

        attempt = launch.lay_down(plan, ["x"], None)
        if ends[-1] is JobState.SUCCEEDED:
            found = {**bench(), "attempt": attempt.number}
            (plan.run.path / "benchmark.json").write_text(json.dumps(found))
        attempt.end(ends[-1])
        return ends[-1]

    monkeypatch.setattr("distdl.sweeps.run_one", run_one)
    given = ("scale", *TINY, "name=mine", "--devices", "1", "--mode", "weak")
    assert command(*given, "task.steps=5").code == 0
    assert "single-1x1-batch12: measured before\n" in command(*given, "task.steps=5").out
    # A named folder keeps the sizes whatever the task's settings are.
    ends.append(JobState.FAILED)
    said = command(*given, "task.steps=7")
    assert "measured before, with task.steps=5: once more" in said.out
    assert said.code == 1 and "not measured: single" in said.out, "an older measurement was shown"
    ends.append(JobState.SUCCEEDED)
    said = command(*given, "task.steps=7")
    assert said.code == 0 and "measured before" not in said.out and "100.0 %" in said.out
    assert "single-1x1-batch12: measured before\n" in command(*given, "task.steps=7").out


def test_nothing_is_cut_off_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    # Faster together than alone, and a strategy with a long name.
    two = member(bench(2, rate=260), "ddp strategy.comm_hook=bf16")
    rows = _scale_rows.rows([member(bench(), "single"), two], None, None, ("weak",))
    _scale_plot.draw(tmp_path / "scale.png", rows, {}, "Scaling on a CPU, 32-true")
    monkeypatch.undo()
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_ylim()[1] > 130
    figure.canvas.draw()
    texts = [*axes.texts, axes.title, *figure.legends[0].get_texts(), axes.xaxis.label]
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, text
    plt.close(figure)


def test_the_plot_names_only_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    two = member(bench(2, rate=160))
    rows = _scale_rows.rows([member(bench(), "single"), two], None, None, ("weak",))
    _scale_plot.draw(tmp_path / "a.png", rows, {"ddp": {1: 1.0, 2: 0.8}}, "Scaling")
    ahead = {2**i: 0.97**i for i in range(13)}
    _scale_plot.draw(tmp_path / "b.png", rows, {"ddp": ahead}, "Scaling")
    monkeypatch.undo()
    near, far = drawn
    legends = [[t.get_text() for t in f.legends[0].get_texts()] for f in drawn]
    assert [any("beyond" in text for text in each) for each in legends] == [False, True]
    # To the labels lead rows of dots, and none of them across decades where nothing was published.
    for figure, reach in ((near, 32 * 1.2), (far, 32 * 2)):
        figure.canvas.draw()
        (axes,) = figure.axes
        for text in axes.texts:
            assert text.arrow_patch.get_linestyle() == _scale_plot.DOTS
            start = Text.get_window_extent(text).x0  # an annotation's own has its arrow in it
            assert axes.transData.inverted().transform((start, 0))[0] < reach, text
            assert text.get_window_extent().x1 <= figure.bbox.width
        plt.close(figure)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "0,2"), "--devices"),
        (("--devices", "two"), "--devices"),
        (("--mode", "week"), "there is no 'week'"),
        (("--vm", "Standard_X"), "no VM size"),
        (("trainer.devices=2",), "--devices 1,2,4"),
        (("strategy.comm_hook=bf16",), "belongs to a strategy"),
        (("--strategy", "dpd"), "did you mean strategy=ddp"),
        (("--between", "-1"), "more than 0"),
        (("--between", "nan"), "more than 0"),
        (("--predict", "1"), "2 or more"),
        (("--low-priority",), "--vm Standard_ND40rs_v2"),
    ],
)
def test_what_makes_no_sense_is_refused(
    command: Callable[..., Any], started: list[str], arguments: tuple[str, ...], words: str
) -> None:
    said = command("scale", *TINY, *arguments)
    assert said.code == 2 and words in said.err and not started and not Path("outputs").exists()

"""`python -m distdl scale`: what the table, the advice and the plot say of what was measured."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from omegaconf import OmegaConf

from distdl.scaling import Link, plot, printing, results
from distdl.scaling.results import Rented
from tests.unit.scale_results import bench, member


def weak(*measured: Any, rented: Rented | None = None) -> list[results.ScalingRow]:
    """Rows of weak scaling, of one device and what else was measured."""
    return results.rows([member(bench(), "single"), *measured], rented, None, ("weak",))


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Draws a plot, and keeps its figure open."""
    import matplotlib.pyplot as plt

    figures: list[Any] = []
    close = plt.close
    monkeypatch.setattr(plt, "close", figures.append)

    def drawn(rows: Any, further: Any = None, published: bool = True) -> Any:
        plot.draw(tmp_path / "scale.png", rows, further or {}, "Scaling", published)
        return figures[-1]

    yield drawn
    for figure in figures:
        close(figure)


def test_efficiency_prediction_and_price() -> None:
    measured = [
        member(bench(), "single", "weak", "strong"),
        member(bench(2, rate=160, communication=0.03)),
        member(bench(8, nodes=2, rate=480)),
        member(bench(2, rate=120, batch=12), "ddp", "strong"),
    ]
    rented = Rented("VM", gpus=4, price=2.0, bandwidth=0)
    rows = results.rows(measured, rented, None, ("weak", "strong"))
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
    assert results.rows(measured[1:], None, None, ("weak",))[0].efficiency is None


def test_beyond_a_node_nothing_is_predicted_that_nothing_is_known_of() -> None:
    one, two = bench(), bench(2, rate=160)
    measured = [member(one, "single"), member(two)]
    inside = results.links_of(measured, None, None)
    assert inside == (Link(1e9, 1e-5), None)
    assert results.prediction(one, two, inside, 2, 4) is None
    told = results.links_of(measured, None, Link(1e8, 1e-5))
    found = results.prediction(one, two, told, 2, 4)
    assert found and found.efficiency < 0.5
    rented = Rented("VM", 2, None, 7e9)
    assert results.links_of(measured, rented, None)[1] == Link(7e9, 2e-6)
    unknown = bench(2, strategy="local_sgd")
    assert results.prediction(one, unknown, told, 2) is None


def test_half_the_bytes_are_predicted_with_half_the_bytes() -> None:
    one, links = bench(), (Link(1e8, 0.0), None)
    plain = results.prediction(one, bench(2), links, 2)
    half = results.prediction(one, bench(2, comm_hook="bf16"), links, 2)
    assert plain and half
    assert half.communication_seconds == pytest.approx(plain.communication_seconds / 2)
    # As many buckets as before, each half as large: half of the backward hides one of them.
    assert half.step_seconds == pytest.approx(0.12 + 0.22 - 0.04)


def test_advice() -> None:
    def of(*measured: Any, rented: Rented | None = None) -> str:
        return "\n".join(results.advise(weak(*measured, rented=rented)))

    assert "more than one device" in of()
    assert "input first" in of(member(bench(2, bound="data-bound")))
    out = of(member(bench(2, rate=190)), member(bench(4, nodes=2, rate=250)))
    assert "scale up before out (weak): 95 % inside a node, 62 %" in out
    assert "communicates 25 % of a step: do this" in of(member(bench(2, communication=0.04)))
    assert "without communication being the cause" in of(member(bench(2, rate=120)))
    unseen = of(member(bench(2, rate=120, trace=None)))
    assert "ddp on 1 x 2 (weak): do this" in unseen and "without communication" not in unseen
    assert "most efficient" not in of(member(bench(2, rate=230)))
    assert "cheapest: single" in of(member(bench(2)), rented=Rented("VM", 1, 1.0, 0))


def test_more_than_there_is_was_disturbed() -> None:
    """Neither advice nor a prediction is held against it."""
    two = member(bench(2, rate=230))
    rows = weak(two)
    (said,) = results.disturbed(rows)
    assert said.startswith("ddp on 1 x 2 (weak): 115 % is a disturbed measurement")
    assert printing.gaps(rows, {}) == []


def test_others_numbers_are_shown_beside_their_own_model_only(
    draw: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    two = member(bench(2))
    for target, same in (
        ("torchvision.models.resnet50", True),
        ("torchvision.models.wide_resnet50_2", False),
        ("mine.seresnet50", False),
    ):
        two.config = OmegaConf.create({"model": {"network": {"_target_": target}}})
        assert two.is_resnet50 is same
    (axes,) = draw(weak(two), published=False).axes
    assert not axes.texts and axes.get_xlim()[1] < 3
    printing.print_rows(weak(two), None)
    assert "samples/s" in capsys.readouterr().out  # of data that are no images of distdl's


def test_the_table_of_a_narrow_terminal_leaves_columns_out(monkeypatch, capsys) -> None:
    """A column that is cut says nothing."""
    hook = member(bench(2, rate=160), "ddp strategy.comm_hook=bf16")
    rows = weak(hook)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width, left_out in (("60", {"spread", "data", "verdict"}), ("100", {"spread", "data"})):
        monkeypatch.setenv("COLUMNS", width)
        printing.print_rows(rows, None)
        said = capsys.readouterr().out
        assert "…" not in said and "80.0 %" in said and "comm_hook=bf16" in "".join(said.split())
        words = said.split()
        assert left_out.isdisjoint(words) and ("compute-bound" in words) is (width == "100")


def test_a_refuted_prediction_is_said() -> None:
    def rows(efficiency: float) -> list[results.ScalingRow]:
        two = member(bench(2, rate=200 * efficiency))
        return weak(two)

    guess = rows(1.0)[1].predicted
    assert guess and guess.efficiency > 0.5
    assert printing.gaps(rows(guess.efficiency), {}) == []
    # More than a few points, and less than the windows of one measurement are apart.
    near = rows(guess.efficiency - 1.5 * printing.CLOSE)
    assert near[1].spread > 0.1 and printing.gaps(near, {}) == []
    (text,) = printing.gaps(rows(0.2), {})
    said = f"measured 20.0 %, predicted {100 * guess.efficiency:.1f} %, "
    assert text.startswith(f"ddp on 1 x 2 (weak): {said}")
    assert "what slows it here" in text
    (text,) = printing.gaps(rows(0.2), {"ddp": {1: 1.0, 2: 0.85, 64: 0.5}})
    assert "do not believe what is predicted beyond 2 devices either" in text


def test_nothing_is_cut_off_the_plot(draw: Callable[..., Any]) -> None:
    # Faster together than alone, and a strategy with a long name.
    figure = draw(weak(member(bench(2, rate=260), "ddp strategy.comm_hook=bf16")))
    (axes,) = figure.axes
    assert axes.get_ylim()[1] > 130
    figure.canvas.draw()
    for text in (*axes.texts, axes.title, *figure.legends[0].get_texts(), axes.xaxis.label):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, text
    # Labels of the published lines do not touch each other.
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda b: b.y0)
    assert len(boxes) == 8 and all(a.y1 <= b.y0 + 0.5 for a, b in itertools.pairwise(boxes))


def test_the_plot_names_only_what_is_in_it(draw: Callable[..., Any]) -> None:
    rows = weak(member(bench(2, rate=160)))
    beyond = {"ddp": {2**i: 0.97**i for i in range(13)}}
    near, far = draw(rows, {"ddp": {1: 1.0, 2: 0.8}}), draw(rows, beyond)
    legends = [[t.get_text() for t in f.legends[0].get_texts()] for f in (near, far)]
    assert [any("beyond" in text for text in each) for each in legends] == [False, True]
    # Rows of dots lead to the labels, and none of them across decades without published numbers.
    for figure, reach in ((near, 32 * 1.2), (far, 32 * 2)):
        figure.canvas.draw()
        (axes,) = figure.axes
        for text in axes.texts:
            assert text.arrow_patch.get_linestyle() == plot.DOTS
            start = Text.get_window_extent(text).x0  # an annotation's own has its arrow in it
            assert axes.transData.inverted().transform((start, 0))[0] < reach, text
            assert text.get_window_extent().x1 <= figure.bbox.width

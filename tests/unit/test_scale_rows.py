"""`python -m distdl scale`: the table, the advice and the plot of what was measured."""

import itertools
import sys

import pytest
from matplotlib import pyplot
from matplotlib.text import Text
from omegaconf import OmegaConf
from pytest import approx

from distdl.scaling import Link, plot, printing, results
from distdl.scaling.results import Rented
from tests.unit.scale_results import bench, member


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
CAUSE = "without communication being the cause"
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
    assert note.startswith("ddp on 1 x 2 (weak): 115 % is a disturbed measurement")
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
    assert text.startswith(compared) and "what slows it here" in text
    (text,) = printing.gaps(rows(0.2), {"ddp": {1: 1.0, 2: 0.85, 64: 0.5}})
    assert "do not believe what is predicted beyond 2 devices either" in text


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

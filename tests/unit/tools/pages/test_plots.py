"""Curves of the report."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from distdl.tools.pages.data import MetricSeries
from distdl.tools.pages.plots import Chart, charts, draw


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[1e308], [1, 1e308, -1e308], [math.inf, -math.inf], [math.nan]])
def test_a_report_draws_any_number_or_says_so(values):
    series = SimpleNamespace(steps=[*range(len(values))], times=[0.0] * len(values), values=values)
    hidden = sum(not abs(value) < 1e100 for value in values)
    for more in ({}, {"unit": "%", "scale": 100.0}):
        svg, [(label, _)] = draw(Chart("Loss", {"train/loss": series}, **more), 0.0)
        assert "<svg" in svg
        assert label.startswith(f"train/loss ({hidden} of {len(values)} values")


@pytest.mark.filterwarnings("error")
def test_minus_one_of_cocos_is_left_out_and_said():
    """It would squeeze all other curves of its chart."""
    names = {"val/box_ap": [-1, 0.25, 0.5], "val/box_ap_large": [-1] * 3, "own/score": [-1, 0, 1]}
    lines = {
        name: MetricSeries([1, 2, 3], [0.0] * 3, [*map(float, values)])
        for name, values in names.items()
    }
    _, legend = draw(Chart("val/box", lines), 0.0)
    said = "values are -1: there is no such object)"
    assert [label for label, _ in legend] == [
        f"val/box_ap (1 of 3 {said}",
        f"val/box_ap_large (3 of 3 {said}",
        "own/score",
    ]
    coco = {name: series for name, series in lines.items() if name.startswith("val")}
    svg, _ = draw(Chart("val/box", coco), 0.0)
    ticks = [
        float(text.replace("\N{MINUS SIGN}", "-")) for text in re.findall(r">([^<>]*\.\d+)<", svg)
    ]
    assert ticks
    assert min(ticks) >= 0


def test_many_metrics_of_a_prefix_are_shared_out_by_their_next_words():
    numbers = ("ap", "ap50", "ap75", "ap_small", "ar1", "ar10", "ar_small")
    names = [f"val/{kind}_{number}" for kind in ("box", "mask") for number in numbers]
    series = {name: MetricSeries([1], [1.0], [0.5]) for name in [*names, "val/f1", "own/a"]}
    made = {chart.title: [*chart.lines] for chart in charts(series, "img/s")}
    assert made["val/box"] == names[:7]
    assert made["val/mask"] == names[7:]
    assert made["val"] == ["val/f1"]
    assert made["own"] == ["own/a"]
    more = {f"val/box_ap_{number}": MetricSeries() for number in range(9)}
    titles = [chart.title for chart in charts(series | more, "img/s")]
    assert {"val/box_ap", "val/box_ar"} <= {*titles}
    assert sorted(name for chart in charts(series | more, "") for name in chart.lines) == sorted(
        series | more
    )

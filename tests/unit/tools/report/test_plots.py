"""Curves of the report."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from distdl.tools.report.plots import Chart, draw


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[1e308], [1, 1e308, -1e308], [math.inf, -math.inf], [math.nan]])
def test_a_report_draws_any_number_or_says_so(values):
    series = SimpleNamespace(steps=[*range(len(values))], times=[0.0] * len(values), values=values)
    hidden = sum(not abs(value) < 1e100 for value in values)
    for more in ({}, {"unit": "%", "scale": 100.0}):
        svg, [(label, _)] = draw(Chart("Loss", {"train/loss": series}, **more), 0.0)
        assert "<svg" in svg
        assert label.startswith(f"train/loss ({hidden} of {len(values)} values")

"""The table of predictions, as each format writes it."""

from __future__ import annotations

import math

import numpy as np
import pytest


def test_rows_in_json_lines_are_json():
    pyarrow = pytest.importorskip("pyarrow")
    from distdl.tasks.prediction_rows import column, encoded

    table = pyarrow.table({"x": column(np.array([[1.0, math.nan], [math.inf, 2.0]]))})
    lines = encoded(table, "jsonl").decode().splitlines()
    assert lines == ['{"x": [1.0, "nan"]}', '{"x": ["inf", 2.0]}']

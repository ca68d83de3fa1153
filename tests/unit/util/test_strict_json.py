"""Any number is written so that any reader of JSON takes it."""

from __future__ import annotations

import json
import math

import numpy as np

from distdl.job import JobState
from distdl.runs.attempt import Attempt
from distdl.runs.checkpoints import manifest_at
from distdl.runs.files import write_json
from distdl.util import strict_json


def test_every_number_is_written_as_json(tmp_path):
    values = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": np.float64("nan"), "e": 1.5}

    def refuse(text: str):
        raise AssertionError(f"{text} is no JSON")

    read = json.loads(strict_json.dumps(values), parse_constant=refuse)
    assert read == {"a": "nan", "b": ["inf", {"c": "-inf"}], "d": "nan", "e": 1.5}
    attempt = Attempt(tmp_path / "001")
    attempt.path.mkdir()
    attempt.end(JobState.SUCCEEDED, metrics={"x": math.nan, "y": -math.inf, "z": 1})
    json.loads((attempt.path / "status.json").read_text(), parse_constant=refuse)
    metrics = attempt.status()["metrics"]
    assert math.isnan(metrics["x"])
    assert metrics["y"] == -math.inf
    assert metrics["z"] == 1
    files = {"a.ckpt": {"size": 1, "sha256": ""}}
    write_json(tmp_path / "a.ckpt.manifest.json", {"files": files, "metrics": {"x": math.inf}})
    assert manifest_at(tmp_path / "a.ckpt")["metrics"] == {"x": math.inf}

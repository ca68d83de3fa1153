"""The frozen recipe of every shipped experiment, as it was reviewed.

A change of a default reaches recipes that nobody thought of: here it shows. After a change that is
meant `pytest tests/golden --refresh-golden` writes them again; the diff belongs in the review.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distdl.config import compose
from distdl.config import recipe as configs
from tests.conftest import ROOT, check_golden

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_recipe_and_header(experiment, tmp_path, monkeypatch, pytestconfig):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)
    recipe = configs.recipe_of(compose.compose([f"+experiment={experiment}"]))
    file = ROOT / f"tests/golden/{experiment}.yaml"
    check_golden(pytestconfig, file, configs.to_yaml(recipe))
    header = (ROOT / f"conf/experiment/{experiment}.yaml").read_text().partition("\ndefaults:")[0]
    assert header.startswith("# @package _global_\n")
    assert f"experiment={experiment}" in header
    for word in ("command ", "hardware ", "duration ", "accuracy "):
        assert f"#   {word}" in header, f"{experiment}: its header lacks {word}"


def test_no_recipe_is_left_over():
    golden = {path.stem for path in Path(__file__).parent.glob("*.yaml")}
    assert EXPERIMENTS
    assert golden == set(EXPERIMENTS)

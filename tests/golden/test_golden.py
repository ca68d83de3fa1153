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

GOLDEN = Path(__file__).parent
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_other_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTDL_CONF", raising=False)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_recipe(experiment: str, pytestconfig: pytest.Config) -> None:
    recipe = configs.recipe_of(compose.compose([f"+experiment={experiment}"]))
    file, text = GOLDEN / f"{experiment}.yaml", configs.to_yaml(recipe)
    check_golden(pytestconfig, file, text)


def test_no_recipe_is_left_over() -> None:
    assert EXPERIMENTS and {path.stem for path in GOLDEN.glob("*.yaml")} == set(EXPERIMENTS)


def test_each_experiment_says_what_to_expect() -> None:
    """Its header: the command, on what, how long, and how good."""
    for experiment in EXPERIMENTS:
        text = (ROOT / f"conf/experiment/{experiment}.yaml").read_text()
        header = text.partition("\ndefaults:")[0]
        assert header.startswith("# @package _global_\n")
        for word in ("command ", "hardware ", "duration ", "accuracy "):
            assert f"#   {word}" in header, f"{experiment} says nothing about {word}"
        assert f"experiment={experiment}" in header

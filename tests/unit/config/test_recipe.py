"""What of a config makes a model that can be exported, and what trains a run for longer."""

import pytest
from omegaconf import OmegaConf

from distdl.config import recipe


def test_an_export_that_is_refused_says_what_to_type():
    own = {"_target_": "mine.Net"}
    ours = {"_target_": "distdl.models.ImageClassifier"}
    synthetic = recipe.exportable_instead({"model": ours, "data": own}, "outputs/r")
    assert "data=imagenet data.root=FOLDER" in synthetic
    weights = "its weights alone: python -m distdl convert outputs/r --to weights"
    assert synthetic.endswith(weights)
    stored = {"_target_": "distdl.data.StoredImages"}
    assert recipe.exportable_instead({"model": own, "data": stored}, "outputs/r") == weights


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ({"max_epochs": 3, "max_steps": -1}, "trainer.max_epochs=6"),
        ({"max_epochs": -1, "max_steps": 50}, "trainer.max_steps=100"),
        ({"max_time": "00:13:30:00"}, "trainer.max_time=01:03:00:00"),
        ({"max_time": {"minutes": 45}}, "trainer.max_time=00:01:30:00"),
        (
            {"max_time": {"_target_": "datetime.timedelta", "hours": 1}},
            "trainer.max_time=00:02:00:00",
        ),
        ({"max_epochs": -1}, ""),  # it ended by itself, and would end again
        ({"max_time": "soon"}, ""),
    ],
)
def test_a_longer_training_can_be_typed(trainer, text):
    assert recipe.longer(OmegaConf.create({"trainer": trainer})) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("00:00:01:00", "00:00:01:00"),
        ({"minutes": 90}, "00:01:30:00"),
        ({"_target_": "datetime.timedelta", "days": 2}, "02:00:00:00"),
        ({"seconds": 1.5}, "{seconds:1.5}"),
    ],
)
def test_a_time_is_shown_as_it_can_be_typed(value, text):
    shown = recipe.max_time_text(OmegaConf.create({"time": value}).time)
    assert shown == text


def test_more_time_than_an_attempt_without_a_limit_has_used():
    assert recipe.twice_time("00:01:00:00", least=3600) == "00:02:00:00"
    assert recipe.twice_time("00:01:00:00", least=3 * 3600) == "00:04:00:00"

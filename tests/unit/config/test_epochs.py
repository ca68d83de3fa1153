from __future__ import annotations

import pytest

from distdl.config import epochs

SCHEDULE = "distdl.optim.warmup_step"
TRAINS = {"task": {"_target_": "distdl.tasks.Train"}, "trainer": {"max_epochs": 3}}


@pytest.mark.parametrize(
    ("section", "node", "said"),
    [
        ("model", {"unfreeze_at": 3}, "model.unfreeze_at=3: the training ends after 3 epochs"),
        ("model", {"unfreeze_at": 2}, None),
        ("schedule", {"_target_": SCHEDULE, "warmup_epochs": 5}, "all of it is warm-up"),
        ("schedule", {"_target_": SCHEDULE, "warmup_epochs": 2.5}, None),
        ("schedule", {"_target_": SCHEDULE, "milestones": [1, 30, 60]}, "not fall at 30, 60"),
        ("schedule", {"_target_": "mine.Steps", "milestones": [30]}, None),
        ("trainer", {"max_epochs": 3, "check_val_every_n_epoch": 4}, "nothing is validated"),
        ("trainer", {"max_epochs": -1, "check_val_every_n_epoch": 4}, None),
        ("task", {"_target_": "distdl.tasks.Validate"}, None),
    ],
)
def test_what_comes_after_the_last_epoch_is_said(section, node, said):
    config = {**TRAINS, "model": {"unfreeze_at": None}, section: node}
    notes = [*epochs.unreached(config)]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]

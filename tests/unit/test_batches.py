"""The global batch stays what it was when the number of ranks changes."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from distdl import batches
from distdl.errors import UserError
from distdl.job import Resources


def config(batch_size=32, accumulate=1):
    data = {} if batch_size is None else {"batch_size": batch_size}
    return OmegaConf.create(
        {"data": data, "trainer": {"accumulate_grad_batches": accumulate}},
    )


def test_the_product() -> None:
    size = Resources(2, 4)
    assert batches.global_batch_size(config(32, 2), size) == 512
    assert batches.describe(config(32, 2), size) == "32 x 8 devices x 2 accumulated = 512 per step"
    assert batches.describe(config(32), Resources()) == "32 x 1 device = 32 per step"


def test_data_that_does_not_say_its_batch_size() -> None:
    assert batches.global_batch_size(config(None), Resources()) is None
    assert batches.global_batch_size(OmegaConf.create({"trainer": {}}), Resources()) is None
    assert "as the loaders say" in batches.describe(config(None), Resources())
    assert batches.keep_global_batch(config(None), Resources(), 256, ()).changes == {}


def test_the_stages_of_a_pipeline_share_a_batch() -> None:
    staged = config(64)
    for stages, pipelines in ((2, 2), (4, 1), (None, 1)):
        staged.strategy = {"stages": stages}
        assert batches.global_batch_size(staged, Resources(1, 4)) == 64 * pipelines
    assert batches.describe(staged, Resources(1, 4)) == "64 x 1 pipeline = 64 per step"


@pytest.mark.parametrize(
    ("ranks", "accumulate", "per_device"), [(1, 1, 256), (4, 1, 64), (2, 4, 32)]
)
def test_another_number_of_ranks_keeps_the_product(ranks, accumulate, per_device) -> None:
    kept = batches.keep_global_batch(config(128, accumulate), Resources(1, ranks), 256, ())
    assert kept.changes == {"data.batch_size": per_device}
    devices = f"{ranks} device{'s' if ranks > 1 else ''}"
    assert f"{per_device} on {devices}:" in kept.notes[0] and "stays 256" in kept.notes[0]


def test_another_data_modules_word_is_named_as_such() -> None:
    mine = config(16)
    mine.data._target_ = "mine.Data"
    assert batches.describe(mine, Resources(1, 2)).endswith("32 per step (by data.batch_size)")


@pytest.mark.parametrize("declared", [None, 16])
def test_where_the_loaders_gave_something_else_nothing_is_changed(declared) -> None:
    """Under another name, or divided by the data module itself."""
    status = {"loaders": {"batch_size": 8, "declared": declared, "shares": 2}}
    loaders = batches.recorded([{}, {"loaders": "nonsense"}, status])
    before = declared and 2 * declared
    kept = batches.keep_global_batch(config(declared), Resources(), before, (), loaders)
    assert kept.changes == {} and "the loaders gave 8 x 2:" in kept.notes[0]
    same = batches.keep_global_batch(config(declared), Resources(1, 2), before, (), loaders)
    assert same == batches.Kept()


def test_nothing_changes_where_nothing_has_to() -> None:
    assert batches.keep_global_batch(config(128), Resources(1, 2), 256, ()) == batches.Kept()
    assert batches.keep_global_batch(config(128), Resources(1, 2), None, ()) == batches.Kept()


def test_what_the_user_says_is_done_and_noted() -> None:
    for given in ("data.batch_size", "trainer.accumulate_grad_batches"):
        kept = batches.keep_global_batch(config(100), Resources(1, 2), 256, [given])
        assert kept.changes == {}
        assert kept.notes == ["the global batch changes from 256 to 200, as asked for"]


@pytest.mark.parametrize(("before", "ranks", "accumulate"), [(256, 3, 1), (4, 8, 1), (64, 4, 3)])
def test_what_does_not_divide_is_refused(before, ranks, accumulate) -> None:
    with pytest.raises(UserError) as refused:
        batches.keep_global_batch(config(999, accumulate), Resources(1, ranks), before, ())
    (problem,) = refused.value.problems
    assert f"global batch of {before} does not divide by {ranks} devices" in problem.what
    assert "data.batch_size=" in problem.remedy

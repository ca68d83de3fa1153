"""The global batch stays what it was when the number of ranks changes."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from distdl.config import batches
from distdl.job import Resources
from distdl.util.errors import UserError


def config(batch_size=32, accumulate=1, target=None, **more):
    data = {k: v for k, v in (("batch_size", batch_size), ("_target_", target)) if v is not None}
    trainer = {"accumulate_grad_batches": accumulate}
    return OmegaConf.create({"data": data, "trainer": trainer, **more})


@pytest.mark.parametrize(
    ("given", "size", "product", "text"),
    [
        (config(32, 2), (2, 4), 512, "32 x 8 devices x 2 accumulated = 512 per step"),
        (config(32), (1, 1), 32, "32 x 1 device = 32 per step"),
        (config(None), (1, 1), None, "as the loaders say"),
        (OmegaConf.create({"trainer": {}}), (1, 1), None, "as the loaders say"),
        # The stages of a pipeline share a batch.
        (config(64, strategy={"stages": 2}), (1, 4), 128, "64 x 2 pipelines = 128 per step"),
        (config(64, strategy={"stages": None}), (1, 4), 64, "64 x 1 pipeline = 64 per step"),
        # Another data module need not give its loaders what the config says.
        (config(16, target="mine.Data"), (1, 2), 32, "= 32 per step (by data.batch_size)"),
    ],
)
def test_the_product(given, size, product, text) -> None:
    assert batches.global_batch_size(given, Resources(*size)) == product
    assert text in batches.describe(given, Resources(*size))


@pytest.mark.parametrize(
    ("ranks", "accumulate", "per_device"), [(1, 1, 256), (4, 1, 64), (2, 4, 32)]
)
def test_another_number_of_ranks_keeps_the_product(ranks, accumulate, per_device) -> None:
    kept = batches.keep_global_batch(config(128, accumulate), Resources(1, ranks), 256, ())
    assert kept.changes == {"data.batch_size": per_device}
    devices = f"{ranks} device{'s' if ranks > 1 else ''}"
    assert f"{per_device} on {devices}:" in kept.notes[0] and "stays 256" in kept.notes[0]


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


@pytest.mark.parametrize(
    ("batch", "before", "given", "notes"),
    [
        (128, 256, (), []),
        (128, None, (), []),
        (None, 256, (), []),
        # What the user says is done and noted.
        *(
            (100, 256, [key], ["the global batch changes from 256 to 200, as asked for"])
            for key in ("data.batch_size", "trainer.accumulate_grad_batches")
        ),
    ],
)
def test_nothing_changes_where_nothing_has_to(batch, before, given, notes) -> None:
    kept = batches.keep_global_batch(config(batch), Resources(1, 2), before, given)
    assert kept == batches.Kept(notes=notes)


@pytest.mark.parametrize(("before", "ranks", "accumulate"), [(256, 3, 1), (4, 8, 1), (64, 4, 3)])
def test_what_does_not_divide_is_refused(before, ranks, accumulate) -> None:
    with pytest.raises(UserError) as refused:
        batches.keep_global_batch(config(999, accumulate), Resources(1, ranks), before, ())
    (problem,) = refused.value.problems
    assert f"global batch of {before} does not divide by {ranks} devices" in problem.what
    assert "data.batch_size=" in problem.remedy

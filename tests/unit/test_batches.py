"""The global batch stays what it was when the number of ranks changes."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from distdl.config import batches
from distdl.job import Resources
from distdl.util.errors import UserError


def config(batch_size=32, accumulate=1, target=None, **more):
    data = {"batch_size": batch_size, "_target_": target}
    data = {key: value for key, value in data.items() if value is not None}
    trainer = {"accumulate_grad_batches": accumulate}
    return OmegaConf.create({"data": data, "trainer": trainer, **more})


PRODUCTS = [
    (config(32, 2), (2, 4), 512, "32 x 8 devices x 2 accumulated = 512 per step"),
    (config(32), (1, 1), 32, "32 x 1 device = 32 per step"),
    (config(None), (1, 1), None, "shown when training starts"),
    (OmegaConf.create({"trainer": {}}), (1, 1), None, "shown when training starts"),
    # The stages of a pipeline share a batch.
    (config(64, strategy={"stages": 2}), (1, 4), 128, "64 x 2 pipelines = 128 per step"),
    (config(64, strategy={"stages": None}), (1, 4), 64, "64 x 1 pipeline = 64 per step"),
    # Another data module need not give its loaders what the config says.
    (config(16, target="mine.Data"), (1, 2), 32, "= 32 per step (by data.batch_size)"),
]


@pytest.mark.parametrize(("config", "size", "product", "text"), PRODUCTS)
def test_the_product(config, size, product, text) -> None:
    assert batches.global_batch_size(config, Resources(*size)) == product
    assert text in batches.describe(config, Resources(*size))


CHANGED = "the global batch changes from 256 to 200, as asked for"
# batch size, accumulation, ranks, global batch before, what the user set -> batch size now, note
KEPT = [
    (128, 1, 1, 256, (), 256, "256 on 1 device: the global batch stays 256"),
    (128, 4, 2, 256, (), 32, "32 on 2 devices: the global batch stays 256"),
    *(
        (batch, 1, 2, before, (), None, "")
        for batch, before in ((128, 256), (128, None), (None, 9))
    ),
    *(
        (100, 1, 2, 256, [key], None, CHANGED)
        for key in ("data.batch_size", "trainer.accumulate_grad_batches")
    ),
]


@pytest.mark.parametrize(("batch", "accumulate", "ranks", "before", "typed", "now", "note"), KEPT)
def test_another_number_of_ranks(batch, accumulate, ranks, before, typed, now, note) -> None:
    size = Resources(1, ranks)
    kept = batches.keep_global_batch(config(batch, accumulate), size, before, typed)
    assert kept.changes == ({} if now is None else {"data.batch_size": now})
    assert len(kept.notes) == bool(note) and note in "".join(kept.notes)


@pytest.mark.parametrize(("before", "ranks", "accumulate"), [(256, 3, 1), (4, 8, 1), (64, 4, 3)])
def test_a_batch_that_does_not_divide_is_refused(before, ranks, accumulate) -> None:
    with pytest.raises(UserError) as error:
        batches.keep_global_batch(config(999, accumulate), Resources(1, ranks), before, ())
    (problem,) = error.value.problems
    assert (problem.path, "data.batch_size=" in problem.remedy) == ("trainer.devices", True)
    assert f"global batch of {before} is not divisible by {ranks} devices" in problem.what


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

"""Frozen weights under every strategy, and an exact resume before and after they are trained."""

import pytest
import torch

from tests.conftest import matrix_only
from tests.strategies import matrix
from tests.strategies.matrix import HALF, MATRIX, SAME_TO, STEPS, step, two

# The files of this folder share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")

TOPOLOGIES = {**matrix.TOPOLOGIES, "zero2 x2": two("deepspeed_zero2")}
# All that the first stage of the pipeline has, or less than that.
FIRST = ("conv1", "bn1", "layer1") if MATRIX else ("stem", "body")
LAST = ("layer4", "fc") if MATRIX else ("wide", "fc")
FROZEN = (f"model.freeze=[{','.join(FIRST)}]", "model.norm=batch", "optimizer.weight_decay=0.1")
CLIPPED = "+trainer.gradient_clip_val=0.5"
RATES = ("optimizer.lr=1.0", "optimizer.layer_decay=0.9")


def parts(file, names):
    return {k: v for k, v in matrix.read(file)["state_dict"].items() if k.split(".")[1] in names}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "name", [n for n in TOPOLOGIES if n != "single"] if MATRIX else ["fsdp x2"]
)
def test_frozen_weights_and_statistics_do_not_change_by_a_bit(name, runs):
    more = (*FROZEN, *([CLIPPED, "callbacks=[ema]"] if MATRIX and "ddp" in name else []))
    files = runs.train(f"frozen {name}", TOPOLOGIES[name].plus(*more))
    other = runs.train("frozen single", TOPOLOGIES["single"].plus(*FROZEN, "optimizer.lr=1.0"))
    kept = parts(step(other), FIRST)
    assert [key for key in kept if key.endswith("running_mean")]
    for file in (step(files, HALF), step(files)):
        assert equal(parts(file, FIRST), kept), "as built, and as with any rate"
    assert not equal(parts(step(files, HALF), LAST), parts(step(files), LAST))
    (state,) = matrix.read(step(files))["optimizer_states"]
    assert not [name for name in state["state"] if name.split(".")[1] in FIRST]
    if MATRIX:  # without batch norm, whose statistics are those of a rank
        grouped = (*FROZEN, "model.norm=group")
        both = (runs.train(f"grouped {n}", TOPOLOGIES[n].plus(*grouped)) for n in ("single", name))
        assert matrix.apart(*(matrix.read(step(each))["state_dict"] for each in both)) < SAME_TO


THAWS = ("data.train_samples=24", "trainer.max_epochs=2", "checkpoint.every_n_steps=1")
THAWING = (f"model.freeze=[{','.join(FIRST)}]", "model.unfreeze_at=1", *RATES, CLIPPED, *THAWS)


def at(files, number):
    """The checkpoint of a step; each epoch has three."""
    epoch, rest = divmod(number - 1, HALF)
    of_step = "" if rest == HALF - 1 else f"_step_{number:08d}"
    return files / f"epoch_{epoch:03d}{of_step}.ckpt"


DRIFTS = two("local_sgd", *matrix.batch(4), "strategy.sync_every=2")
UNFREEZING = {**TOPOLOGIES, "local_sgd x2": DRIFTS}


@pytest.mark.parametrize("name", UNFREEZING if MATRIX else ["ddp x2", "zero2 x2"])
def test_a_resume_before_and_after_the_unfreezing_is_exact(name, runs):
    topology = UNFREEZING[name].plus(*THAWING)
    whole = runs.train(f"thaws {name}", topology)
    before, between, after = (parts(at(whole, n), FIRST) for n in (1, HALF, STEPS))
    assert equal(before, between)
    still = {key for key in between if torch.equal(between[key], after[key])}
    # A residual branch that begins at zero moves its first norm by less than the last digit.
    assert not {key for key in still if not (MATRIX and key.endswith(".bn1.weight"))}, "all train"
    seen = runs.seen[f"thaws {name}"]
    assert len(seen.losses) == 24 // 8 * 2 * (2 if name == "single" else 1), "each batch once"
    for number in (HALF - 1, HALF, HALF + 1) if MATRIX else (HALF - 1,):
        again = runs.train(f"thaws {name} from {number}", topology, resume=at(whole, number))
        one, other = (matrix.read(at(files, STEPS)) for files in (whole, again))
        assert equal(one["state_dict"], other["state_dict"])
        (state,), (resumed,) = one["optimizer_states"], other["optimizer_states"]
        assert state["param_groups"] == resumed["param_groups"]
        for weight, held in state["state"].items():
            assert equal(held, resumed["state"][weight])
    rates = {group["layer"]: group["initial_lr"] for group in state["param_groups"]}
    ordered = [*rates.values()]
    assert ordered == sorted(ordered, reverse=True)
    assert next(iter(rates)) == "fc"
    if name not in ("single", "local_sgd x2") and MATRIX:
        alone = runs.train("thaws single", TOPOLOGIES["single"].plus(*THAWING))
        both = (matrix.read(at(files, STEPS)) for files in (alone, whole))
        assert matrix.apart(*(each["state_dict"] for each in both)) < SAME_TO


@matrix_only
@pytest.mark.parametrize("name", ["zero1 x2", "zero2 x2", "zero3 x2", "pipeline x2", "fsdp x2"])
def test_weights_that_are_trained_later_begin_at_their_first_step(name, runs):
    # Adam's steps differ by parameter: those that were frozen have none when the others have three.
    adam = ("optimizer=adamw", "optimizer.lr=0.05", *(o for o in THAWING if o not in RATES))
    found = []
    for each in ("single", name):
        files = runs.train(f"adam {each}", TOPOLOGIES[each].plus(*adam))
        saved = matrix.read(at(files, STEPS))
        (state,) = saved["optimizer_states"]
        steps = {
            float(held["step"]) for k, held in state["state"].items() if k.split(".")[1] in FIRST
        }
        assert steps == {float(HALF)}
        found.append(saved["state_dict"])
    assert matrix.apart(*found) < 1e-4

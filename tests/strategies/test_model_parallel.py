"""A module that divides itself over a mesh: groups of ranks with different samples, whose ranks
divide layers among them. All train the small network, of which the last two layers are divided."""

import pytest
import torch

from distdl.strategies.model_parallel import by_mesh, total_norm
from tests.conftest import matrix_only
from tests.strategies import matrix, ranks
from tests.strategies.matrix import HALF, MESHED, WIDE, difference, mesh, step, two
from tests.strategies.ranks import Case, shared
from tests.strategies.test_equality import exact

# The files of this folder share the ranks.
pytestmark = pytest.mark.xdist_group("strategies")

SAME_TO = 2e-5  # five times the largest difference that was seen
NAMES = {"1 x 2": (1, 2), "2 x 2": (2, 2), "4 x 1": (4, 1), "1 x 4": (1, 4)}
ALONE = matrix.Topology(1, ("strategy=single", MESHED, WIDE, *matrix.batch(8)))
DDP = two("ddp", MESHED, WIDE, *matrix.batch(4))
CLIPPED = ("+trainer.gradient_clip_val=0.2",)
SETTINGS = {
    "plain": (),
    "clipped": CLIPPED,
    "clipped by value": (
        "+trainer.gradient_clip_val=0.01",
        "+trainer.gradient_clip_algorithm=value",
    ),
    "adamw": ("optimizer=adamw", "optimizer.lr=0.1"),
    "lars": ("optimizer=lars",),
    "lamb": ("optimizer=lamb", "optimizer.max_grad_norm=null", *CLIPPED),
    "accumulated": ("trainer.accumulate_grad_batches=2", "data.train_samples=128"),
    "bf16": ("+trainer.precision=bf16-mixed",),
}


def trained(runs, name, sizes, more=(), **options):
    topology = ALONE if sizes is None else mesh(*sizes)
    return runs.train(name, topology.plus(*more), **options)


CASES = [("1 x 2", "clipped")]
EVERY = [(name, setting) for name in NAMES for setting in SETTINGS]


@pytest.mark.parametrize(
    ("name", "setting"),
    [c if c in CASES else pytest.param(*c, marks=matrix_only) for c in EVERY],
)
def test_trains_as_one_process_does_and_resumes_exactly(name, setting, runs):
    more = SETTINGS[setting]
    alone = trained(runs, f"mesh alone {setting}", None, more)
    whole = trained(runs, f"mesh {name} {setting}", NAMES[name], more)
    losses = [runs.seen[f"mesh {n} {setting}"].losses for n in ("alone", name)]
    bf16 = setting == "bf16"
    assert losses[1] == pytest.approx(losses[0], abs=2e-2 if bf16 else 1e-5)
    assert losses[0][-1] != pytest.approx(losses[0][0], abs=1e-3), "it does train"
    assert difference(step(alone), step(whole)) < (2e-2 if bf16 else SAME_TO)
    again = trained(
        runs, f"mesh {name} {setting} again", NAMES[name], more, resume=step(whole, HALF)
    )
    assert exact(step(whole), step(again))


@matrix_only
@pytest.mark.parametrize("folder", [False, True])
def test_checkpoints_go_to_ddp_and_back_without_a_changed_bit(folder, runs, tmp_path):
    before = step(runs.train("mesh from ddp", DDP), HALF)
    source = before
    places = {"2 x 2": mesh(2, 2), "1 x 2": mesh(1, 2), "ddp": DDP}
    for name, topology in places.items():
        file = tmp_path / f"{name}.ckpt"
        saves = "+callbacks.saves._target_=tests.strategies.small.SavesFirst"
        more = (saves, f"+callbacks.saves.path='{file}'")
        if folder and name != "ddp":
            more = (*more, "checkpoint.sharded=true")
        through = f"mesh through {name} {folder}"
        runs.train(through, topology.plus(*more), resume=before)
        if not file.is_dir():
            assert exact(source, file)
        before = file
    rest = runs.train(f"mesh after all {folder}", mesh(2, 2), resume=before)
    assert difference(step(runs.train("mesh from ddp", DDP)), step(rest)) < SAME_TO


@matrix_only
def test_each_sample_counts_once_in_a_validation(runs):
    """With batch norm, whose statistics differ between the groups until a validation."""
    short = ("trainer.max_steps=-1", "data.train_samples=16", "model.norm=batch")
    case = Case(
        [*matrix.COMMON, *mesh(2, 2, *matrix.batch(4), *short).overrides], runs.folder / "v"
    )
    case.validate = True
    seen = shared(4).train(case)
    assert seen.validated["val/samples"] == 21
    assert seen.metrics["val/samples"] == 21
    ddp = Case([*matrix.COMMON, *DDP.plus(*short).overrides], runs.folder / "v-ddp", validate=True)
    other = shared(2).train(ddp)
    assert seen.validated == pytest.approx(other.validated, rel=1e-5)
    trains = seen.metrics["train/loss"], other.metrics["train/loss"]
    assert trains[0] == pytest.approx(trains[1], rel=1e-5)


@matrix_only
def test_what_is_recomputed_changes_no_bit(runs):
    kept = trained(runs, "mesh 2 x 2 plain", NAMES["2 x 2"])
    more = ("model.recompute=[network.stem,network.wide]",)
    again = trained(runs, "mesh 2 x 2 recomputed", NAMES["2 x 2"], more)
    assert difference(step(kept), step(again)) == 0


def norms_of_gradients(folder, *overrides):
    """Called on each rank: the norm as the strategy computes it, of gradients that are known."""
    built = ranks.built_of(Case([*matrix.COMMON, *overrides], folder))
    norms = []

    class Look:
        def __call__(self, optimizer):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(float(total_norm(by_mesh(parameters))))
            whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in parameters]
            norms.append(float(torch.cat([each.flatten() for each in whole]).norm()))

    built.module.on_before_optimizer_step = Look()
    built.trainer.fit_loop.epoch_loop.max_steps = 1
    built.trainer.fit(built.module, datamodule=built.datamodule)
    return {"norms": norms}


@matrix_only
def test_the_norm_of_gradients_on_several_meshes_is_that_of_whole_ones(runs):
    call = "tests.strategies.test_model_parallel:norms_of_gradients"
    seen = shared(4).train(Case(list(mesh(2, 2).overrides), runs.folder / "norms", call=call))
    alone = shared(1).train(Case(list(ALONE.overrides), runs.folder / "norm", call=call))
    (expected, same) = alone.ranks[0]["norms"]
    assert expected == pytest.approx(same)
    for each in seen.ranks:
        assert each["norms"] == pytest.approx([expected, expected], rel=1e-5)


@matrix_only
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Undivided", r"averages no gradients of \d+ parameters"),
        ("Untold", "gradients differ within a tensor-parallel group"),
        ("OwnBatches", "have different batches of one step"),
    ],
)
def test_what_would_train_apart_is_refused_on_every_rank(kind, words, runs):
    own = f"model._target_=tests.strategies.small.{kind}"
    with pytest.raises(AssertionError, match=words):
        runs.train(f"mesh {kind}", mesh(2, 2).plus(own))

"""FSDP and DeepSpeed: what is theirs alone."""

import json

import pytest
import yaml
from omegaconf import OmegaConf
from torch import nn

from distdl.strategies.fsdp import units
from distdl.worker import autotune
from tests.conftest import UNCHECKED, distdl, matrix_only
from tests.strategies import matrix
from tests.strategies.matrix import (
    HALF,
    SAME_TO,
    TOPOLOGIES,
    WIDE,
    Topology,
    batch,
    difference,
    step,
    two,
)
from tests.strategies.ranks import Case, shared

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")


@pytest.mark.parametrize("name", ["fsdp", "deepspeed_zero3"])
def test_validates_after_the_training_and_without_one(name, runs):
    short = ("trainer.max_steps=-1", "data.train_samples=16", "model.norm=batch", *batch(4))
    case = Case([*matrix.COMMON, *two(name, *short).overrides], runs.folder / f"after {name}")
    case.validate = True
    seen = shared(2).train(case)
    case.fit = False
    assert seen.validated["val/samples"] == 21
    assert seen.validated == pytest.approx(shared(2).train(case).validated, rel=1e-6)
    trained = {metric: seen.metrics[metric] for metric in seen.validated}
    assert seen.validated == pytest.approx(trained, rel=1e-6)


def test_settings_of_deepspeeds_own(runs):
    file = runs.folder / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false}}')
    result = runs.train("own settings", TOPOLOGIES["zero1 x2"].plus(f"strategy.config={file}"))
    assert difference(step(runs.train("ddp x2")), step(result)) < SAME_TO


def test_units_by_size_and_of_parts_that_are_called_by_themselves():
    large, one, other = (nn.Linear(10, 10, bias=False) for _ in range(3))
    model = nn.Sequential(nn.Linear(3, 3), large, nn.ModuleList([one, other]))
    assert units(model, 100) == [large, one, other]
    assert units(model, 101) == [], "a list gathers nothing, and nothing else is large enough"
    large.weight = one.weight
    assert units(model, 100) == [other], "what is shared belongs to the whole"
    attention = nn.MultiheadAttention(16, 2)
    model = nn.Sequential(nn.Linear(3, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), attention)
    assert units(model, 200) == [model[1][0], attention], "its out_proj is not called"
    assert units(model, 300, every_part=True) == [attention, model[0], model[1][0]]


# Lightning's own strategy, as a user's file of the group `strategy` names it.
PARALLEL = (
    "{_target_: lightning.pytorch.strategies.ModelParallelStrategy"
    ", tensor_parallel_size: 2, save_distributed_checkpoint: %s}"
)


@pytest.mark.parametrize("folder", [True, pytest.param(False, marks=matrix_only)])
def test_tensor_parallel_ranks_train_on_the_same_samples(folder, runs):
    """The loss is a DTensor, which a step without a number returns; the strategy reads its
    checkpoints itself."""
    model = "model._target_=tests.strategies.small.TensorParallel"
    strategy = f"+strategy={PARALLEL % str(folder).lower()}"
    topology = Topology(2, ("~strategy", strategy, model, WIDE, *batch(8)))
    name = f"parallel {folder}"
    whole = runs.train(name, topology)
    rest = runs.train(f"{name} resumed", topology, resume=step(whole, HALF))
    seen = runs.seen[name]
    resumed = runs.seen[f"{name} resumed"]
    assert seen.losses[HALF:] == resumed.losses
    alone = runs.train("single, one batch", Topology(1, ("strategy=single", WIDE, *batch(8))))
    assert seen.losses == pytest.approx(runs.seen["single, one batch"].losses, abs=1e-5)
    assert seen.metrics["train/loss"] == pytest.approx(seen.losses[-1])
    if not folder:
        weights = [matrix.read(step(each))["state_dict"] for each in (alone, whole, rest)]
        assert max(matrix.apart(weights[0], other) for other in weights[1:]) < SAME_TO


@matrix_only
def test_autotune_freezes_what_it_measured(tmp_path):
    left_out = ("callbacks", "trainer.max_steps", "model.network")
    own = (o for o in matrix.COMMON if not o.startswith(left_out))
    tuned = ("strategy=deepspeed_zero2", "strategy.autotune=true", "name=tuned", *batch(1))
    size = ("trainer.max_steps=1", "data.train_samples=16", "trainer.devices=2")
    done = distdl(*own, *tuned, *size, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs/default/tuned"
    launch = yaml.safe_load((run / "attempts/001/launch.yaml").read_text())
    assert len(launch["autotune"]) == 3, "three stages, one way to cut a batch of 1"
    assert (done.stdout + done.stderr).count("ms a step") == 3
    changes = launch["changes"]
    assert changes["strategy.stage"] in (1, 2, 3)
    assert changes["strategy.autotune"] is False
    manifests = map(json.loads, (m.read_text() for m in run.glob("checkpoints/epoch*.json")))
    assert {manifest["global_batch_size"] for manifest in manifests} == {2}


@pytest.mark.parametrize(("strategy", "stages"), [({}, {1, 2, 3}), ({"config": "x.json"}, {None})])
def test_autotune_keeps_the_global_batch(strategy, stages):
    names = ("data.batch_size", "trainer.accumulate_grad_batches")
    config = {"data": {"batch_size": 12}, "trainer": {"accumulate_grad_batches": 2}}
    config = OmegaConf.create({**config, "strategy": strategy})
    changes = [candidate.changes for candidate in autotune.candidates(config)]
    assert {change.get("strategy.stage") for change in changes} == stages
    cuts = {tuple(change[name] for name in names) for change in changes}
    assert cuts == {(24, 1), (12, 2), (6, 4), (3, 8)}

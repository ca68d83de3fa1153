"""FSDP and DeepSpeed: what is theirs alone."""

import json

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.strategies.fsdp import units
from distdl.strategies.sharing import on_host
from distdl.worker import autotune
from tests.conftest import UNCHECKED, distdl
from tests.strategies.matrix import (
    COMMON,
    HALF,
    SAME_TO,
    TOPOLOGIES,
    batch,
    by_position,
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
    case = Case([*COMMON, *two(name, *short).overrides], runs.folder / f"after {name}")
    case.validate = True
    seen = shared(2).train(case)
    case.fit = False
    assert seen.validated["val/samples"] == 21
    assert seen.validated == pytest.approx(shared(2).train(case).validated, rel=1e-6)
    trained = {metric: seen.metrics[metric] for metric in seen.validated}
    assert seen.validated == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("name", ["fsdp x2", "zero3 x2"])
def test_a_file_of_distdl_0_1_resumes(name, runs):
    ddp = runs.train("ddp x2")
    old = by_position(step(ddp, HALF), runs.folder / "old.ckpt", keep=True)
    resumed = runs.train(f"old then {name}", TOPOLOGIES[name], resume=old)
    assert difference(step(ddp), step(resumed)) < SAME_TO


def test_settings_of_deepspeeds_own(runs):
    file = runs.folder / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false}}')
    result = runs.train("own settings", TOPOLOGIES["zero1 x2"].plus(f"strategy.config={file}"))
    assert difference(step(runs.train("ddp x2")), step(result)) < SAME_TO


def test_slices_are_not_for_everyone(command):
    result = command("strategy=ddp", "checkpoint.sharded=true", "dry_run=true")
    assert result.code == 2
    assert "checkpoint.sharded: DDPStrategy writes each checkpoint as one file" in result.err


def block(width):
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU())


def test_units_by_size():
    small, large, inside = block(3), block(10), nn.ModuleList([block(10), block(10)])
    model = nn.Sequential(small, large, inside)
    assert units(model, 100) == [large[0], inside[0][0], inside[1][0]]
    assert units(model, 101) == [], "a list gathers nothing, and nothing else is large enough"
    assert units(nn.Sequential(nn.Sequential(block(8), block(8))), 100) != []
    model[1][0].weight = inside[0][0].weight
    assert units(model, 100) == [inside[1][0]], "what is shared belongs to the whole"


def test_units_of_parts_that_are_called_by_themselves():
    attention = nn.MultiheadAttention(16, 2)
    model = nn.Sequential(nn.Linear(3, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), attention)
    assert units(model, 300) == [attention], "its out_proj has weights, and is not called"
    assert units(model, 200) == [model[1][0], attention]
    assert units(model, 300, every_part=True) == [attention, model[0], model[1][0]]


def test_autotune_freezes_what_it_measured(tmp_path):
    own = (o for o in COMMON if not o.startswith(("callbacks", "trainer.max_steps")))
    tuned = ("strategy=deepspeed_zero2", "strategy.autotune=true", "name=tuned", *batch(1))
    size = ("trainer.max_steps=1", "data.train_samples=16", "trainer.devices=2")
    done = distdl(*own, *tuned, *size, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs/default/tuned"
    launch = yaml.safe_load((run / "attempts/001/launch.yaml").read_text())
    assert len(launch["autotune"]) == 3, "three stages, one way to cut a batch of 1"
    assert (done.stdout + done.stderr).count("ms a step") == 3
    changes = launch["changes"]
    assert changes["strategy.stage"] in (1, 2, 3) and changes["strategy.autotune"] is False
    manifests = map(json.loads, (m.read_text() for m in run.glob("checkpoints/epoch*.json")))
    assert {manifest["global_batch_size"] for manifest in manifests} == {2}


@pytest.mark.parametrize(("strategy", "stages"), [({}, {1, 2, 3}), ({"config": "x.json"}, {None})])
def test_autotune_keeps_the_global_batch(strategy, stages):
    trainer = {"accumulate_grad_batches": 2}
    config = {"data": {"batch_size": 12}, "trainer": trainer, "strategy": strategy}
    changes = [candidate.changes for candidate in autotune.candidates(OmegaConf.create(config))]
    assert {change.get("strategy.stage") for change in changes} == stages
    names = ("data.batch_size", "trainer.accumulate_grad_batches")
    cuts = {tuple(change[name] for name in names) for change in changes}
    assert cuts == {(24, 1), (12, 2), (6, 4), (3, 8)}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_checkpoint_copies_each_tensor_once(device):
    operators = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():  # a GPU's tensors, without one
        tensor = torch.empty(3, 4, device=device)
        with Record():
            copy = on_host(tensor)
    assert copy.device.type == "cpu" and copy is not tensor
    copies = [name for name in operators if name in ("_to_copy", "clone", "copy_")]
    assert copies == ["_to_copy"]

"""FSDP and DeepSpeed: what is theirs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.strategies.fsdp import units
from distdl.strategies.sharing import on_host
from distdl.worker import autotune
from tests.conftest import UNCHECKED, Said, distdl
from tests.strategies.matrix import (
    COMMON,
    HALF,
    SAME_TO,
    STEPS,
    TOPOLOGIES,
    Runs,
    batch,
    by_position,
    difference,
    step,
)
from tests.strategies.ranks import Case, shared

# With test_equality: they share the runs.
pytestmark = pytest.mark.xdist_group("strategies")


@pytest.mark.parametrize("name", ["fsdp", "deepspeed_zero3"])
def test_validates_after_the_training_and_without_one(name: str, runs: Runs) -> None:
    short = ("trainer.max_steps=-1", "data.train_samples=16", "model.norm=batch", *batch(4))
    overrides = [*COMMON, *short, f"strategy={name}"]
    folder = runs.folder / f"after {name}"
    seen = shared(2).train(Case(overrides, folder, validate=True))
    alone = shared(2).train(Case(overrides, folder, fit=False, validate=True))
    assert seen.validated["val/samples"] == 21
    assert seen.validated == pytest.approx(alone.validated, rel=1e-6)
    for metric, value in seen.validated.items():
        assert value == pytest.approx(seen.metrics[metric], rel=1e-6), metric


@pytest.mark.parametrize("name", ["fsdp x2", "zero3 x2"])
def test_a_file_of_distdl_0_1_resumes(name: str, runs: Runs) -> None:
    ddp = runs.whole("ddp x2")
    old = by_position(step(ddp, HALF), runs.folder / "old.ckpt", keep=True)
    resumed = runs.train(f"old then {name}", TOPOLOGIES[name], resume=old)
    assert difference(step(ddp, STEPS), step(resumed, STEPS)) < SAME_TO


def test_settings_of_deepspeeds_own(runs: Runs) -> None:
    file = runs.folder / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false}}')
    ours = runs.train("own settings", TOPOLOGIES["zero1 x2"], f"strategy.config={file}")
    assert difference(step(runs.whole("ddp x2"), STEPS), step(ours, STEPS)) < SAME_TO


def test_slices_are_not_for_everyone(command: Any) -> None:
    said: Said = command("strategy=ddp", "checkpoint.sharded=true", "dry_run=true")
    assert said.code == 2
    assert "checkpoint.sharded: DDPStrategy writes whole checkpoints only" in said.err


def test_units_by_size() -> None:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU())

    small, large = block(3), block(10)
    inside = nn.ModuleList([block(10), block(10)])
    model = nn.Sequential(small, large, inside)
    assert units(model, 100) == [large[0], inside[0][0], inside[1][0]]
    assert units(model, 101) == [], "a list gathers nothing, and nothing else is large enough"
    assert units(nn.Sequential(nn.Sequential(block(8), block(8))), 100) != []
    model[1][0].weight = inside[0][0].weight
    assert units(model, 100) == [inside[1][0]], "what is shared belongs to the whole"


def test_units_of_parts_that_are_called_by_themselves() -> None:
    attention = nn.MultiheadAttention(16, 2)
    model = nn.Sequential(nn.Linear(3, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), attention)
    assert units(model, 300) == [attention], "its out_proj has weights, and is not called"
    assert units(model, 200) == [model[1][0], attention]
    assert units(model, 300, each=True) == [attention, model[0], model[1][0]]


def test_autotune_freezes_what_it_measured(tmp_path: Path) -> None:
    import yaml

    overrides = [
        *(o for o in COMMON if not o.startswith(("callbacks", "trainer.max_steps"))),
        "trainer.max_steps=1",
        "data.train_samples=16",
        "data.batch_size=1",
        "trainer.devices=2",
        "strategy=deepspeed_zero2",
        "strategy.autotune=true",
        "name=tuned",
    ]
    done = distdl(*overrides, cwd=tmp_path, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs/default/tuned"
    launch = yaml.safe_load((run / "attempts/001/launch.yaml").read_text())
    assert len(launch["autotune"]) == 3, "three stages, one way to cut a batch of 1"
    assert (done.stdout + done.stderr).count("ms a step") == 3
    changes = launch["changes"]
    assert changes["strategy.stage"] in (1, 2, 3) and changes["strategy.autotune"] is False
    manifests = run.glob("checkpoints/epoch*.json")
    assert {json.loads(m.read_text())["global_batch_size"] for m in manifests} == {2}


def test_autotune_keeps_the_global_batch() -> None:
    from omegaconf import OmegaConf

    config = {"data": {"batch_size": 12}, "trainer": {"accumulate_grad_batches": 2}, "strategy": {}}
    found = list(autotune.candidates(OmegaConf.create(config)))
    keys = ("data.batch_size", "trainer.accumulate_grad_batches")
    cuts = {tuple(c.changes[key] for key in keys) for c in found}
    assert cuts == {(24, 1), (12, 2), (6, 4), (3, 8)}
    assert {c.changes["strategy.stage"] for c in found} == {1, 2, 3}
    config["strategy"] = {"config": "ds.json"}
    found = autotune.candidates(OmegaConf.create(config))
    assert all("strategy.stage" not in c.changes for c in found)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_checkpoint_copies_each_tensor_once(device) -> None:
    seen: list[str] = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():  # a GPU's tensors, without one
        tensor = torch.empty(3, 4, device=device)
        with Ops():
            copy = on_host(tensor)
    assert copy.device.type == "cpu" and copy is not tensor
    assert [name for name in seen if name in ("_to_copy", "clone", "copy_")] == ["_to_copy"]

"""A run whose fit was left is built again in the same attempt."""

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR

from distdl.loops.fit import Rebuilt
from distdl.optim.optimizers import build_optimizer
from distdl.runs.attempt import STATUS
from distdl.runs.checkpoints import manifest_of
from distdl.runs.directory import RunDirectory
from distdl.strategies import deepspeed_state
from distdl.worker import build, performing

OWN = "distdl.models.ImageClassifier"


@pytest.mark.parametrize(
    ("model", "checkpoint", "left"),
    [
        ({"_target_": OWN}, None, ("a.pth", "new")),
        ({"_target_": OWN}, "run/checkpoints/epoch_000.ckpt", (None, None)),
        ({"_target_": OWN, "lora": {"rank": 2}}, "run/checkpoints/last.ckpt", ("a.pth", "new")),
        ({"_target_": "mine.Module"}, "run/checkpoints/last.ckpt", ("a.pth", "new")),
    ],
)
def test_a_run_with_a_checkpoint_needs_no_other_weights(model, checkpoint, left):
    """The file that it began with may be gone. Adapters are nothing without it."""
    config = OmegaConf.create(
        {"model": {**model, "weights": "a.pth", "head": "new"}, "checkpoint": {}}
    )
    begun = performing.begun(config, checkpoint).model
    assert (begun.weights, begun.head) == left
    assert config.model.weights == "a.pth", "what is recorded stays"


class Large:
    """What a built run holds."""


def test_the_first_one_is_gone_when_the_second_is_built():
    held, again, released = [], [], []

    def build_once(anew):
        gc.collect()
        again.append((anew, [each() for each in held]))
        part = Large()
        held.append(weakref.ref(part))
        return SimpleNamespace(part=part, release=lambda: released.append(True))

    def run(built):
        if len(again) < 3:
            raise Rebuilt
        return {"loss": 1.0}

    built, metrics = performing.built_and_performed(SimpleNamespace(run=run), build_once)
    assert again == [(False, []), (True, [None]), (True, [None, None])]
    assert released == [True, True]
    assert built.part is held[2]()
    assert metrics == {"loss": 1.0}


@pytest.mark.parametrize(
    ("facts", "epoch"),
    [
        ({"epoch": 1, "reason": "epoch"}, 2),
        ({"epoch": 1, "reason": "step"}, 1),
        ({"epoch": "9"}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_the_epoch_of_a_checkpoint(tmp_path, facts, epoch):
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    file = run.checkpoints / "epoch_001.ckpt"
    entry = {"size": 1, "sha256": "0"}
    manifest_of(file).write_text(json.dumps({"files": {file.name: entry}, **facts}))
    assert build.next_epoch(str(file), run) == epoch
    # Another run's may be one of which the weights alone are taken.
    assert build.next_epoch(str(file), RunDirectory(tmp_path / "other")) == 0
    assert build.next_epoch(None, run) == 0


def end(context, metrics):
    config = OmegaConf.create({"task": {"_target_": "distdl.tasks.test"}})
    built = SimpleNamespace(run=context.run, config=config)
    performing.end(built, context, SimpleNamespace(how_to_open=lambda: ()), metrics)


def test_the_time_of_a_run_is_said_without_its_record(context, capsys):
    """Something has removed it while the run trained."""
    (context.attempt.path / STATUS).unlink()
    end(context, {"test/loss": 0.5})
    printed = capsys.readouterr().out
    assert "test/loss 0.5" in printed
    assert "time    0 min" in printed


def test_a_run_without_a_result_says_so(context, capsys):
    end(context, {})
    assert "done    no result was logged" in capsys.readouterr().out


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.first.requires_grad_(False)


def test_groups_of_which_nothing_is_trained_yet_are_set_aside_and_keep_their_schedule():
    module = Layered()
    config = {"_target_": "torch.optim.SGD", "lr": 1.0, "weight_decay": 0.1}
    later = {"first.weight", "first.bias"}
    optimizer = build_optimizer(module, config, global_batch=1, later=later)
    names = {id(p): name for name, p in module.named_parameters()}
    order = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert order == [["second.weight"], ["second.bias"], ["first.weight"], ["first.bias"]]
    parts = [ConstantLR(optimizer, 0.5, 1), LambdaLR(optimizer, lambda step: 1 / (2 + step))]
    schedule = SequentialLR(optimizer, parts, milestones=[1])
    groups = deepspeed_state.set_aside_frozen(optimizer, schedule)
    assert len(optimizer.param_groups) == 2
    assert len(groups) == 4
    rates = []
    for _ in range(3):
        optimizer.step()
        schedule.step()
        rates.append({group["lr"] for group in groups})
    assert rates == [{1 / 2}, {1 / 3}, {1 / 4}]
    assert len(schedule.state_dict()["_last_lr"]) == 4
    # Nothing is set aside of which something is trained.
    module.requires_grad_(True)
    whole = torch.optim.SGD(module.parameters(), 1.0)
    assert deepspeed_state.set_aside_frozen(whole, None) == []

"""Learning rates, decay groups and schedules."""

from __future__ import annotations

import io
import math
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from torch import nn

from distdl.optim import optimizers
from distdl.optim.schedules import length_of
from distdl.util.errors import UserError

SGD = {
    "_target_": "torch.optim.SGD",
    "lr": 0.1,
    "lr_scaling": "linear",
    "lr_reference_batch": 256,
    "decay_norm_and_bias": False,
    "momentum": 0.9,
    "weight_decay": 1e-4,
}


@pytest.mark.parametrize(
    ("rule", "batch", "expected", "line"),
    [
        ("linear", 512, 0.2, "lr 0.1 per 256 images x 512/256 (linear) = 0.2"),
        ("linear", 64, 0.025, "lr 0.1 per 256 images x 64/256 (linear) = 0.025"),
        ("sqrt", 1024, 0.2, "lr 0.1 per 256 images x sqrt(1024/256) (sqrt) = 0.2"),
        ("none", 512, 0.1, "lr 0.1 (not scaled by the global batch of 512)"),
    ],
)
def test_scaling_rules(rule, batch, expected, line):
    assert optimizers.scale_lr(0.1, batch, rule) == pytest.approx(expected)
    assert optimizers.describe_lr({**SGD, "lr_scaling": rule}, batch) == line


def test_what_an_optimizer_cannot_be_built_from_is_refused():
    with pytest.raises(UserError, match="linear, sqrt, none"):
        optimizers.scale_lr(0.1, 512, "cubic")
    with pytest.raises(UserError, match="no trainable parameter"):
        optimizers.build_optimizer(nn.Linear(2, 2).requires_grad_(False), SGD, global_batch=8)
    with pytest.raises(UserError, match=r"optimizer\._target_"):
        optimizers.build_optimizer(nn.Linear(2, 2), {}, global_batch=8)
    assert "default" in optimizers.describe_lr({"_target_": "torch.optim.Adadelta"}, 512)


def counts(module, **kwargs):
    groups = optimizers.parameter_groups(module, 1e-4, **kwargs)
    return [(len(group["params"]), group["weight_decay"]) for group in groups]


def test_resnet50_decays_neither_its_106_norm_tensors_nor_its_bias():
    from torchvision.models import resnet50

    # 53 convolutions and one linear weight decay.
    assert counts(resnet50()) == [(54, 1e-4), (107, 0.0)]
    assert counts(resnet50(), decay_norm_and_bias=True) == [(161, 1e-4)]


def test_types_decide_and_not_names():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.Linear(2, 2, bias=False)  # decays, whatever it is called
            self.conv = nn.LayerNorm(2)
            self.bias_net = nn.Linear(2, 2)
            self.attention = nn.MultiheadAttention(2, 1)
            self.lstm = nn.LSTM(2, 2)
            self.norms = nn.ModuleList(
                [
                    nn.SyncBatchNorm(2),
                    nn.GroupNorm(1, 2),
                    nn.InstanceNorm2d(2, affine=True),
                    nn.RMSNorm(2),
                ]
            )

    decayed = 1 + 1 + 2 + 2  # bn, bias_net.weight, attention in and out, lstm ih and hh
    spared = 2 + 1 + 2 + 2 + (2 + 2 + 2 + 1)
    assert counts(Odd()) == [(decayed, 1e-4), (spared, 0.0)]


def test_timms_own_norms_shared_and_frozen_parameters():
    from timm.layers import BatchNormAct2d, RmsNorm2d, SimpleNorm2d

    assert counts(nn.Sequential(BatchNormAct2d(4), RmsNorm2d(4), SimpleNorm2d(4))) == [(4, 0.0)]
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    assert counts(nn.Sequential(first, second)) == [(1, 1e-4), (1, 0.0)]


def test_build_optimizer_scales_and_groups():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = optimizers.build_optimizer(module, OmegaConf.create(SGD), global_batch=512)
    assert type(optimizer) is torch.optim.SGD
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.2]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [1e-4, 0.0]
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_an_optimizers_own_default_decay_spares_norms_too():
    config = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
    optimizer = optimizers.build_optimizer(nn.Linear(2, 2), config, global_batch=512)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [1e-2, 0.0]
    assert optimizer.param_groups[0]["lr"] == 1e-3  # a node without a rule is not scaled


@pytest.mark.parametrize("name, given", [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_a_fused_step_is_the_default_and_the_same_step(name, given):
    made = {}
    for fused in (None, False):
        torch.manual_seed(0)
        module = nn.Linear(5, 3).double()
        node = {"_target_": f"torch.optim.{name}", "lr": 0.1, "fused": fused, **given}
        made[fused] = module, optimizers.build_optimizer(module, node, global_batch=256)
        for _ in range(3):
            made[fused][1].zero_grad()
            module(torch.ones(2, 5).double()).square().sum().backward()
            made[fused][1].step()
    assert made[None][1].defaults["fused"] is True and made[False][1].defaults["fused"] is False
    torch.testing.assert_close(made[None][0].weight, made[False][0].weight, rtol=0, atol=1e-14)
    # What goes on from a checkpoint uses its own kernels, and not those of who wrote it.
    for mine, other in ((None, False), (False, None)):
        made[mine][1].load_state_dict(made[other][1].state_dict())
        assert all(
            g["fused"] is made[mine][1].defaults["fused"] for g in made[mine][1].param_groups
        )


def test_a_fused_step_looks_at_how_things_are_laid_out():
    """torch's own takes a gradient's or momentum's numbers in the order of its parameter's."""
    made = []
    for fused in (None, False):
        torch.manual_seed(0)
        module = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
        optimizer = optimizers.build_optimizer(module, {**SGD, "fused": fused}, global_batch=256)
        for step in range(3):
            module.weight.grad = torch.arange(48.0).reshape(4, 3, 2, 2) / (step + 1)
            if step == 1:  # as another strategy wrote it
                saved = optimizer.state_dict()
                (state,) = saved["state"].values()
                state["momentum_buffer"] = state["momentum_buffer"].contiguous()
                optimizer.load_state_dict(saved)
            optimizer.step()
        made.append(module.weight)
    assert made[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(*made)


def test_nothing_is_fused_where_it_cannot_be():
    frozen = nn.Linear(2, 2).to("meta")
    assert not optimizers.can_fuse(torch.optim.SGD, [{"params": list(frozen.parameters())}])
    for node in ({"_target_": "torch.optim.Rprop"}, {**SGD, "foreach": True}):
        made = optimizers.build_optimizer(nn.Linear(2, 2), node, global_batch=256)
        assert not made.defaults.get("fused")


def test_lars_takes_a_step():
    config = {"_target_": "timm.optim.Lars", "lr": 0.3, "weight_decay": 1e-4, "trust_coeff": 1e-3}
    module = nn.Linear(2, 2)
    optimizer = optimizers.build_optimizer(module, config, global_batch=8)
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, module.weight)


def sgd(global_batch=512):
    return optimizers.build_optimizer(nn.Linear(2, 2), SGD, global_batch=global_batch)


def schedule(name, optimizer, steps=10, epochs=10, **arguments):
    config = {"_target_": f"distdl.optim.{name}", **arguments}
    return optimizers.build_schedule(optimizer, config, steps_per_epoch=steps, max_epochs=epochs)


def rates(built, optimizer, steps):
    """Of each step, including the first."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built["scheduler"].step()
    return found


def test_warmup_cosine():
    optimizer = sgd()
    built = schedule("warmup_cosine", optimizer, warmup_epochs=2, min_lr_ratio=0.1)
    assert built["interval"] == "step" and built["frequency"] == 1
    found = rates(built, optimizer, 101)
    assert found[:20] == pytest.approx([0.2 * (k + 1) / 20 for k in range(20)])
    expected = [0.2 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 80)) / 2) for k in range(81)]
    assert found[20:] == pytest.approx(expected)
    assert found[100] == pytest.approx(0.02)


def test_warmup_step_is_goyals():
    optimizer = sgd(global_batch=2048)  # k = 8: from 0.1 to 0.8
    built = schedule("warmup_step", optimizer, epochs=90)
    found = rates(built, optimizer, 900)
    assert found[0] == pytest.approx(0.1 + 0.7 / 50)
    assert found[49] == pytest.approx(0.8) == found[50] == found[299]
    assert [found[s] for s in (300, 600, 800, 899)] == pytest.approx([0.08, 0.008, 0.0008, 0.0008])
    steps = {round(b - a, 12) for a, b in pairwise(found[:50])}
    assert len(steps) == 1


def test_goyals_warmup_is_flat_at_the_reference_batch():
    optimizer = sgd(global_batch=256)
    assert set(rates(schedule("warmup_step", optimizer, epochs=9), optimizer, 90)) == {0.1}


@pytest.mark.parametrize(
    ("name", "arguments", "steps", "expected"),
    [
        ("constant", {}, 3, [0.2] * 3),
        ("constant", {"warmup_epochs": 0.4}, 5, [0.05, 0.1, 0.15, 0.2, 0.2]),
        # The warm-up may fill the whole training.
        ("warmup_cosine", {"epochs": 1, "warmup_epochs": 1}, 10, [0.02 * k for k in range(1, 11)]),
    ],
)
def test_short_schedules(name, arguments, steps, expected):
    optimizer = sgd()
    assert rates(schedule(name, optimizer, **arguments), optimizer, steps) == pytest.approx(
        expected
    )


@pytest.mark.parametrize("name", ["warmup_cosine", "warmup_step", "constant"])
def test_a_warmup_longer_than_training_is_said(name, caplog):
    schedule(name, sgd(), epochs=3, warmup_epochs=5)
    assert "warmup_epochs=5 is 50 optimizer steps and training lasts 30" in caplog.text


def test_states_are_plain_and_resume_exactly():
    optimizer = sgd()
    built = schedule("warmup_cosine", optimizer, warmup_epochs=2)
    rates(built, optimizer, 37)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), built["scheduler"].state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)

    resumed = sgd()
    again = schedule("warmup_cosine", resumed, warmup_epochs=2)
    resumed.load_state_dict(states[0])
    again["scheduler"].load_state_dict(states[1])
    assert rates(again, resumed, 20) == rates(built, optimizer, 20)


@pytest.mark.parametrize(
    "name, arguments", [("warmup_cosine", {}), ("warmup_step", {"milestones": [6]})]
)
def test_a_resume_under_another_global_batch_follows_the_new_curve(name, arguments):
    old = sgd(global_batch=512)
    built = schedule(name, old, steps=10, warmup_epochs=2, **arguments)
    rates(built, old, 70)  # epoch 7 of 10

    new = sgd(global_batch=1024)
    fresh = schedule(name, new, steps=5, warmup_epochs=2, **arguments)
    new.load_state_dict(old.state_dict())
    fresh["scheduler"].load_state_dict(built["scheduler"].state_dict())
    optimizers.rescale_schedule(fresh["scheduler"], new, old_lr=0.2, new_lr=0.4, step_ratio=0.5)
    assert {g["initial_lr"] for g in new.param_groups} == {0.4}

    reference = sgd(global_batch=1024)
    expected = rates(
        schedule(name, reference, steps=5, warmup_epochs=2, **arguments), reference, 50
    )
    assert fresh["scheduler"].get_last_lr()[0] == pytest.approx(expected[35])
    assert rates(fresh, new, 15) == pytest.approx(expected[35:])


def test_rescaling_torchs_own_schedules_multiplies_the_rate():
    optimizer = sgd()
    config = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2}
    built = optimizers.build_schedule(optimizer, config, steps_per_epoch=10, max_epochs=4)
    assert built["interval"] == "epoch"
    assert rates(built, optimizer, 3)[2] == pytest.approx(0.02)
    optimizers.rescale_schedule(built["scheduler"], optimizer, old_lr=0.2, new_lr=0.4, step_ratio=1)
    assert rates(built, optimizer, 2) == pytest.approx([0.04, 0.004])


class Trains:
    """What `length_of` asks a Trainer for, computed by Lightning's own property."""

    estimated_stepping_batches = Trainer.estimated_stepping_batches
    train_dataloader = ()

    def __init__(self, batches, max_epochs=-1, max_steps=-1, accumulate=1):
        self.num_training_batches, self.accumulate_grad_batches = batches, accumulate
        self.max_epochs, self.max_steps = max_epochs, max_steps


@pytest.mark.parametrize(
    ("trains", "steps"),
    [
        (Trains(1000, 90, 100), 100),
        (Trains(1000, 90, 1500), 1500),
        (Trains(1000, -1, 1500), 1500),
        (Trains(10, 3, 1000), 30),
        (Trains(10, 3, accumulate=4), 9),
        (Trains(10, 3, 8, accumulate=4), 8),
        (Trains(math.inf, 3, 70), 70),
    ],
)
@pytest.mark.parametrize("target", ["distdl.optim.warmup_cosine", "OneCycleLR"])
def test_a_schedule_ends_with_the_training(trains, steps, target):
    """Whichever comes first of max_epochs and max_steps, also within an epoch."""
    optimizer = sgd()
    config = {"_target_": target, "warmup_epochs": 0}
    if target == "OneCycleLR":
        config = {"_target_": f"torch.optim.lr_scheduler.{target}", "max_lr": 0.2}
    length = asdict(length_of(trains))
    found = rates(optimizers.build_schedule(optimizer, config, **length), optimizer, steps)
    assert max(found) > 0.17 and found[len(found) // 2] > 0.05 and found[-1] < 0.01


def test_a_schedule_without_an_end_is_refused():
    for trains in (Trains(10), Trains(math.inf, 3)):
        length = asdict(length_of(trains))
        with pytest.raises(UserError, match=r"trainer.max_steps="):
            optimizers.build_schedule(sgd(), {"_target_": "distdl.optim.warmup_cosine"}, **length)
        optimizers.build_schedule(sgd(), {"_target_": "distdl.optim.constant"}, **length)


def test_torchs_own_schedules():
    """They get the total steps, Lightning gets its own keys, and no node is not a schedule."""
    length = {"steps_per_epoch": 10, "max_epochs": 4}
    torchs = "torch.optim.lr_scheduler"
    once = {"_target_": f"{torchs}.OneCycleLR", "max_lr": 1.0}
    built = optimizers.build_schedule(sgd(), once, **length)
    assert built["scheduler"].total_steps == 40 and built["interval"] == "step"
    plateau = {"_target_": f"{torchs}.ReduceLROnPlateau", "monitor": "val/loss", "factor": 0.5}
    built = optimizers.build_schedule(sgd(), plateau, **length)
    assert built["monitor"] == "val/loss" and built["scheduler"].factor == 0.5
    assert optimizers.build_schedule(sgd(), {}, **length) == {}

"""Learning rates, decay groups and schedules."""

import io
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from timm.layers import BatchNormAct2d, RmsNorm2d, SimpleNorm2d
from timm.optim import Muon
from torch import nn
from torchvision.models import resnet50

from distdl.optim import learning_rates, optimizers, trial
from distdl.optim.schedules import length_of
from tests.prepared import refusal

DECAY = {"decay_norm_and_bias": False, "momentum": 0.9, "weight_decay": 1e-4}
SCALING = {"lr": 0.1, "lr_scaling": "linear", "lr_reference_batch": 256}
SGD = {"_target_": "torch.optim.SGD", **SCALING, **DECAY}
WARMUP = [0.2 * (k + 1) / 20 for k in range(20)]
COSINE = {"_target_": "distdl.optim.warmup_cosine"}
TORCHS = "torch.optim.lr_scheduler"


def build(module=None, node=SGD, global_batch=512):
    module = nn.Linear(2, 2) if module is None else module
    return optimizers.build_optimizer(module, node, global_batch=global_batch)


def schedule(name, optimizer, epoch_steps=10, epochs=10, **arguments):
    config = {"_target_": name if "." in name else f"distdl.optim.{name}", **arguments}
    length = {"steps_per_epoch": epoch_steps, "max_epochs": epochs}
    return optimizers.build_schedule(optimizer, config, **length)


def rates(built, optimizer, steps):
    """Of each step, including the first."""
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built["scheduler"].step()
    return result


def rates_of(name, steps, global_batch=512, **arguments):
    optimizer = build(global_batch=global_batch)
    return rates(schedule(name, optimizer, **arguments), optimizer, steps)


def test_scaling_rules():
    for rule, batch, line in (
        ("linear", 64, "lr 0.1 per 256 images x 64/256 (linear) = 0.025"),
        ("sqrt", 1024, "lr 0.1 per 256 images x sqrt(1024/256) (sqrt) = 0.2"),
        ("none", 512, "lr 0.1 (not scaled by the global batch of 512)"),
    ):
        assert learning_rates.describe_lr({**SGD, "lr_scaling": rule}, batch) == line
    for module, node, path, message in (
        (None, {**SGD, "lr_scaling": "cubic"}, "optimizer.lr_scaling", "linear, sqrt"),
        (nn.ReLU(), SGD, "model", "no trainable parameter"),
        (None, {}, "optimizer._target_", "is missing"),
    ):
        problem = refusal(build, module, node)
        assert problem.path == path
        assert message in f"{problem.what} {problem.remedy}"


def misleading():
    """Types decide, and not names."""
    norms = nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, affine=True), nn.RMSNorm(2)
    parts = {
        "bn": nn.Linear(2, 2, bias=False),
        "conv": nn.LayerNorm(2),
        "bias": nn.Linear(2, 2),
        "attention": nn.MultiheadAttention(2, 1),
        "lstm": nn.LSTM(2, 2),
    }
    return nn.ModuleDict({**parts, "norms": nn.ModuleList([*norms, nn.GroupNorm(1, 2)])})


def shared_and_frozen():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    ("make", "every", "expected"),
    [
        # 53 convolutions and one linear weight; 106 tensors of norms and one bias.
        (resnet50, False, [(54, 1e-4), (107, 0.0)]),
        # bn, bias.weight, attention in and out, lstm ih and hh
        (misleading, False, [(1 + 1 + 2 + 2, 1e-4), (2 + 1 + 2 + 2 + (2 + 2 + 1 + 2), 0.0)]),
        (lambda: nn.Sequential(BatchNormAct2d(4), RmsNorm2d(4), SimpleNorm2d(4)), False, [(4, 0)]),
        (shared_and_frozen, False, [(1, 1e-4), (1, 0.0)]),
        (shared_and_frozen, True, [(2, 1e-4)]),
    ],
)
def test_weights_decay_and_biases_and_norms_do_not(make, every, expected):
    built = build(make(), OmegaConf.create(SGD | {"decay_norm_and_bias": every})).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in built] == expected
    assert {(group["lr"], group["momentum"]) for group in built} == {(0.2, 0.9)}
    # An optimizer's own default decay spares biases too, and a node without a rule is not scaled.
    built = build(node={"_target_": "torch.optim.AdamW", "lr": 1e-3}).param_groups
    assert [(g["lr"], g["weight_decay"]) for g in built] == [(1e-3, 1e-2), (1e-3, 0)]


@pytest.mark.parametrize("name, size", [("SGD", 2), ("SGD", 1), ("AdamW", 2)])
def test_a_fused_step_is_the_default_and_the_same_step(name, size):
    """Whatever the memory layout: torch's own takes a gradient's or momentum's numbers in the order
    of its parameter's."""
    weights = []
    for fused in (None, False):
        torch.manual_seed(0)
        module = nn.Conv2d(3, 4, size, bias=False).to(memory_format=torch.channels_last)
        more = {"momentum": 0.9} if name == "SGD" else {}
        node = {"_target_": f"torch.optim.{name}", "lr": 0.2, "fused": fused, **more}
        optimizer = build(module, node)
        for step in range(3):
            numbers = torch.arange(12.0 * size**2) / (step + 1)
            module.weight.grad = numbers.reshape(4, 3, size, size)
            if step == 1:  # as another strategy wrote it
                saved = optimizer.state_dict()
                (state,) = saved["state"].values()
                state.update({key: value.contiguous() for key, value in state.items()})
                optimizer.load_state_dict(saved)
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is (fused is None), "as before it was loaded"
        weights.append(module.weight)
    assert weights[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(*weights)


def test_every_stage_of_a_pipeline_fuses_as_one_process_does():
    """A fused step rounds once less. The other stages' blocks are on meta."""
    stage = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    optimizer = build(stage, {"_target_": "torch.optim.SGD", "lr": 0.2})
    assert all(group["fused"] for group in optimizer.param_groups)


def test_nothing_is_fused_where_it_cannot_be():
    lars = {"_target_": "timm.optim.Lars", "lr": 0.3, "weight_decay": 1e-4, "trust_coeff": 1e-3}
    for node in ({"_target_": "torch.optim.Rprop"}, {**SGD, "foreach": True}, lars):
        module = nn.Linear(2, 2)
        optimizer = build(module, node)
        before = module.weight.detach().clone()
        assert not optimizer.defaults.get("fused")
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, module.weight)


def cosine(steps, low):
    return [0.2 * (low + (1 - low) * (1 + math.cos(math.pi * k / 80)) / 2) for k in range(steps)]


def line(steps, low):
    return [0.2 * (low + (1 - low) * (1 - k / 80)) for k in range(steps)]


# Goyal et al., k = 8: from 0.1 to 0.8, then a tenth at each milestone.
GOYAL = [0.1 + 0.7 * (k + 1) / 50 for k in range(50)]
GOYAL += [0.8] * 250 + [0.08] * 300 + [8e-3] * 200 + [8e-4] * 100


@pytest.mark.parametrize(
    ("name", "batch", "arguments", "expected"),
    [
        ("constant", 512, {"warmup_epochs": 0.4}, [0.05, 0.1, 0.15, 0.2, 0.2]),
        # The warm-up may fill the whole training.
        ("warmup_cosine", 512, {"epochs": 1, "warmup_epochs": 1}, WARMUP[1::2]),
        ("warmup_cosine", 512, {"warmup_epochs": 2, "min_lr_ratio": 0.1}, WARMUP + cosine(81, 0.1)),
        ("warmup_linear", 512, {"warmup_epochs": 2, "min_lr_ratio": 0.1}, WARMUP + line(81, 0.1)),
        ("warmup_step", 2048, {"epochs": 90}, GOYAL),
        (f"{TORCHS}.StepLR", 512, {"step_size": 2}, [0.2, 0.2, 0.02]),
    ],
)
def test_rates(name, batch, arguments, expected, caplog):
    assert rates_of(name, len(expected), batch, **arguments) == pytest.approx(expected)
    schedule("constant", build(), epochs=3, warmup_epochs=5)
    assert "warmup_epochs=5 is 50 optimizer steps and training lasts 30" in caplog.text


@pytest.mark.parametrize(
    ("name", "batch"), [("warmup_cosine", 512), ("warmup_cosine", 1024), ("warmup_step", 1024)]
)
def test_a_resumed_schedule_follows_the_curve_of_its_global_batch(name, batch):
    # warmup_step resumes in a warm-up, which begins at another share of another rate.
    step = {"warmup_epochs": 8, "milestones": [9]}
    arguments = step if name == "warmup_step" else {"warmup_epochs": 2}
    ratio = batch // 512
    old = build()
    new = build(global_batch=batch)
    before = schedule(name, old, **arguments)["scheduler"]
    rates({"scheduler": before}, old, 70)  # epoch 7 of 10
    file = io.BytesIO()
    torch.save([old.state_dict(), before.state_dict()], file)
    file.seek(0)
    built = schedule(name, new, epoch_steps=10 // ratio, **arguments)
    for target, state in zip((new, built["scheduler"]), torch.load(file), strict=True):
        target.load_state_dict(state)
    if ratio > 1:
        scales = {"old_lr": 0.2, "new_lr": 0.4, "step_ratio": 0.5}
        optimizers.rescale_schedule(built["scheduler"], new, **scales)
    assert {g["initial_lr"] for g in new.param_groups} == {0.2 * ratio}
    expected = rates_of(name, 90 // ratio, batch, epoch_steps=10 // ratio, **arguments)
    expected = expected[70 // ratio :]
    assert built["scheduler"].get_last_lr()[0] == pytest.approx(expected[0])
    resumed = rates(built, new, len(expected))
    assert resumed == (expected if ratio == 1 else pytest.approx(expected))


def test_torchs_own_schedules():
    """Lightning gets its own keys; rescaling multiplies the rate."""
    built = schedule(f"{TORCHS}.ReduceLROnPlateau", build(), monitor="val/loss", factor=0.5)
    assert built["monitor"] == "val/loss"
    assert built["scheduler"].factor == 0.5
    optimizer = build()
    built = schedule(f"{TORCHS}.StepLR", optimizer, step_size=2)
    rates(built, optimizer, 3)
    optimizers.rescale_schedule(built["scheduler"], optimizer, old_lr=0.2, new_lr=0.4, step_ratio=1)
    assert built["interval"] == "epoch"
    assert rates(built, optimizer, 2) == pytest.approx([0.04, 0.004])


def length(batches, max_epochs=-1, max_steps=-1, accumulate=1):
    """`length_of` a Trainer, computed by Lightning's own property."""
    trainer = SimpleNamespace(num_training_batches=batches, max_epochs=max_epochs)
    trainer.max_steps = max_steps
    trainer.accumulate_grad_batches = accumulate
    trainer.train_dataloader = ()
    trainer.estimated_stepping_batches = Trainer.estimated_stepping_batches.fget(trainer)
    return asdict(length_of(trainer))


LENGTHS = [
    ((1000, 90, 100), 100),
    ((1000, -1, 1500), 1500),
    ((10, 3, 1000), 30),
    ((10, 3, -1, 4), 9),
    ((10, 3, 8, 4), 8),
    ((math.inf, 3, 70), 70),
]
ENDING = [COSINE | {"warmup_epochs": 0}, {"_target_": f"{TORCHS}.OneCycleLR", "max_lr": 0.2}]


@pytest.mark.parametrize("node", ENDING)
def test_a_schedule_ends_with_the_training(node):
    """Whichever comes first of max_epochs and max_steps, also within an epoch."""
    for arguments, steps in LENGTHS:
        optimizer = build()
        built = optimizers.build_schedule(optimizer, node, **length(*arguments))
        result = rates(built, optimizer, steps)
        assert max(result) > 0.17
        assert result[len(result) // 2] > 0.05
        assert result[-1] < 0.01
    for endless in ((10,), (math.inf, 3)):  # then only a constant rate will do
        unknown = length(*endless)
        problem = refusal(optimizers.build_schedule, build(), node, **unknown)
        assert problem.path == "schedule"
        assert "trainer.max_steps=" in problem.remedy
        optimizers.build_schedule(build(), {"_target_": "distdl.optim.constant"}, **unknown)


MUON = {
    "_target_": "timm.optim.Muon",
    "lr": 0.02,
    "nesterov": True,
    "decay_norm_and_bias": False,
    "weight_decay": 0.1,
}


class Reader(nn.Module):
    """Layers of each kind; the head is last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 64)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.position = nn.Parameter(torch.zeros(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        images = self.norm(self.conv(self.words(tokens).unflatten(-1, (4, 4, 4)).mean(1)))
        rows = images.flatten(2).mT + self.position
        return self.head(self.attention(rows, rows, rows)[0].mean(1))


def steps(module, optimizer):
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(0, 16, (6, 3), generator=generator)
        loss = nn.functional.cross_entropy(module(tokens), tokens[:, 0] % 5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_muon_gets_matrices_and_its_fallback_the_rest_as_in_a_bare_loop():
    module = Reader()
    heads = ["head.weight", "head.bias"]
    built = optimizers.build_optimizer(module, MUON, global_batch=1, heads=heads)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [
        ([names[id(p)] for p in g["params"]], g["weight_decay"], g.get("use_fallback", False))
        for g in built.param_groups
    ]
    matrices = ["conv.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    biases = ["conv.bias", "norm.weight", "norm.bias", "attention.in_proj_bias"]
    others = ["position", "words.weight", "head.weight"]
    assert [(sorted(members), *rest) for members, *rest in groups] == [
        (sorted(matrices), 0.1, False),
        (sorted(others), 0.1, True),
        (sorted([*biases, "attention.out_proj.bias", "head.bias"]), 0.0, True),
    ]
    losses = steps(module, built)
    bare = Reader()
    weights = dict(bare.named_parameters())
    by_hand = [
        {"params": [weights[name] for name in members], "weight_decay": decay}
        | ({"use_fallback": True} if fallback else {})
        for members, decay, fallback in groups
    ]
    assert losses == steps(bare, Muon(by_hand, lr=0.02, nesterov=True))
    assert losses[-1] != losses[0]
    moved = {names[id(p)]: built.state[p]["use_muon"] for p in built.state}
    assert {name for name, by_muon in moved.items() if by_muon} == {*matrices}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"conv_mode": "flat"}, "Invalid conv_mode: flat"),
        ({"adjust_lr_fn": "adam"}, "Invalid scaling function"),
        ({"momentum": 2.0}, "momentum"),
        ({"_target_": "torch.optim.AdamW", "betas": [0.9, 2.0]}, "Invalid beta"),
        ({"lr_scaling": "cubic"}, "no rule 'cubic'"),
        ({"_target_": "torch.optim.LBFGS"}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_a_value_that_an_optimizer_refuses_is_found_by_a_step(changed, text):
    node = {"_target_": MUON["_target_"], "lr": 0.1, **changed}
    assert text in " ".join(problem.what for problem in trial.OneStep.check(node))
    assert bool([*trial.OneStep.check(node)]) == bool(text)

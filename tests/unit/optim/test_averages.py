"""Optimizers that exchange the weights for their average, for a validation and a checkpoint."""

import copy

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import nn

from distdl.optim import averages, optimizers, trial

ADAMW = {"_target_": "schedulefree.AdamWScheduleFree", "lr": 0.02, "weight_decay": 0.1}
STRATEGIES = "distdl.strategies."


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))


def steps(module, optimizer, count=4):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(count):
        images = torch.randn(6, 3, 8, 8, generator=generator)
        loss = nn.functional.cross_entropy(module(images), torch.arange(6) % 5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(first, second):
    return all(map(torch.equal, first, second))


def test_losses_are_those_of_a_bare_loop():
    module = network()
    bare = network()
    built = optimizers.build_optimizer(module, ADAMW, global_batch=1)
    decayed = [bare[0].weight, bare[3].weight]
    spared = [bare[0].bias, bare[1].weight, bare[1].bias, bare[3].bias]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    plain = AdamWScheduleFree(groups, lr=0.02, weight_decay=0.1)
    plain.train()
    losses = steps(module, built)
    assert losses == steps(bare, plain)
    assert losses[0] != losses[-1]


@pytest.mark.parametrize("kind", [AdamWScheduleFree, SGDScheduleFree])
def test_the_average_comes_and_the_weights_come_back_bit_for_bit(kind):
    module = network()
    optimizer = kind(module.parameters(), lr=0.1)
    optimizer.train()
    steps(module, optimizer)
    before = weights(module)
    by_package = copy.deepcopy(module)
    copied = kind(by_package.parameters(), lr=0.1)
    copied.load_state_dict(optimizer.state_dict())
    copied.eval()
    averages.to_average(optimizer)
    averages.to_average(optimizer)  # as for a checkpoint inside a validation
    assert equal(weights(module), weights(by_package))
    assert not equal(weights(module), before)
    # As a checkpoint of this moment is loaded.
    saved = copy.deepcopy(optimizer.state_dict())
    loaded = copy.deepcopy(module)
    again = kind(loaded.parameters(), lr=0.1)
    again.load_state_dict(saved)
    for each, where in ((optimizer, module), (again, loaded)):
        averages.to_training(each)
        assert equal(weights(where), before)
    assert steps(module, optimizer) == steps(loaded, again)
    copied.train()
    assert not equal(weights(by_package), before), "the package rounds"


def problems(strategy="DDPStrategy", schedule="distdl.optim.constant", norm="batch", **config):
    model = {"_target_": "tests.unit.optim.test_averages.Model", "norm": norm}
    config = {"strategy": {"_target_": STRATEGIES + strategy}, "model": model, **config}
    config["schedule"] = {"_target_": schedule} if schedule else {}
    return [each.what for each in trial.OneStep.check(ADAMW, {"config": config})]


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layers = network() if norm == "batch" else nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, ""),
        ({"schedule": ""}, ""),
        ({"strategy": "auto"}, ""),
        ({"strategy": "FSDPStrategy"}, ""),
        ({"strategy": "PipelineStrategy", "norm": "group"}, ""),
        ({"strategy": "PipelineStrategy"}, "needs batch norm's statistics of averages"),
        ({"strategy": "DeepSpeedStrategy"}, "DeepSpeedStrategy may hold copies"),
        ({"strategy": "LocalSGDStrategy"}, "ranks would average their weights"),
        ({"schedule": "distdl.optim.warmup_cosine"}, "warmup_cosine"),
        ({"schedule": "torch.optim.lr_scheduler.StepLR"}, "instead of lowering the rate"),
        ({"callbacks": {"ema": {"_target_": "mine.EMAWeightAveraging"}}}, "callbacks.ema would"),
    ],
    ids=str,
)
def test_what_does_not_go_with_averages_is_refused(config, text):
    found = problems(**config)
    assert text in " ".join(found)
    assert len(found) == bool(text)


def test_so_are_thawing_and_averages_of_ranks():
    model = {"_target_": "tests.unit.optim.test_averages.Model", "unfreeze_at": 2}
    config = {"model": model, "strategy": {"_target_": STRATEGIES + "DDPStrategy"}}
    config["strategy"]["comm_hook"] = "post_local_sgd"
    found = [each.what for each in trial.OneStep.check(ADAMW, {"config": config})]
    assert "model.unfreeze_at" in found[0]
    assert "ranks would average" in found[1]
    other = {"_target_": "torch.optim.AdamW", "lr": 0.1}
    assert not [*trial.OneStep.check(other, {"config": config})]


def test_a_value_that_it_refuses_is_found_by_a_step():
    node = {"_target_": "schedulefree.SGDScheduleFree", "momentum": 1.0, "lr": 0.1}
    (problem,) = trial.OneStep.check(node)
    assert "Momentum must be between 0 and 1" in problem.what

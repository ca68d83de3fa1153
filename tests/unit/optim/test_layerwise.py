"""Optimizers that know layers are refused where a strategy shows them parts."""

import pytest
import torch

from distdl.optim import layerwise
from distdl.strategies.deepspeed import DeepSpeedStrategy
from distdl.strategies.pipeline import stage_rules
from distdl.util.errors import UserError

STRATEGIES = {"zero": DeepSpeedStrategy.check, "pipeline": stage_rules.check}


def problems(strategy, **optimizer):
    config = {"trainer": {}, "optimizer": optimizer, "data": {"batch_size": 8}}
    context = {"config": config, "local": False, "accelerator": "cpu", "world_size": 2}
    return [each.what for each in STRATEGIES[strategy]({}, {**context, "refused": ("model",)})]


@pytest.mark.parametrize(
    ("optimizer", "refusing"),
    [
        ({"_target_": "torch.optim.AdamW"}, ()),
        ({"_target_": "timm.optim.Lars"}, ("zero",)),
        ({"_target_": "timm.optim.Lamb"}, ("zero", "pipeline")),
        ({"_target_": "timm.optim.Lamb", "max_grad_norm": None}, ("zero",)),
        ({"_target_": "torch.optim.Muon"}, ("zero",)),
        ({"_target_": "timm.optim.Muon"}, ("zero",)),
        ({"_target_": "torch.optim.LBFGS"}, ("zero", "pipeline")),
    ],
    ids=str,
)
def test_what_a_strategy_would_compute_otherwise_is_refused(optimizer, refusing):
    for strategy in STRATEGIES:
        found = problems(strategy, **optimizer)
        assert bool(found) == (strategy in refusing), found


def test_a_modules_own_is_refused_as_well():
    from timm.optim import Lamb

    own = Lamb([torch.nn.Parameter(torch.zeros(2))])
    name, most = layerwise.of_optimizer(own)
    assert (name, most) == ("Lamb", 1.0)
    with pytest.raises(UserError, match="configure_optimizers: Lamb computes something of whole"):
        layerwise.refuse_own(layerwise.refuse_parts(name, "ZeRO"))
    layerwise.refuse_own(layerwise.refuse_parts("AdamW", "ZeRO"))

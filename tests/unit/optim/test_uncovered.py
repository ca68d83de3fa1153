"""Parameters that no optimizer has are counted, and refused if they were to be trained later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distdl.optim.optimizers import build_optimizer
from distdl.optim.uncovered import look
from tests.prepared import refusal

LATER = frozenset({"0.weight", "0.bias"})


class TrainableOnly(torch.optim.SGD):
    """A user's own optimizer, which takes what is trainable when it is made."""

    def __init__(self, params, lr=0.1):
        kept = [[each for each in group["params"] if each.requires_grad] for group in params]
        super().__init__([{"params": group} for group in kept if group], lr=lr)


@pytest.fixture
def module():
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    return network


def test_what_is_trained_later_must_be_in_an_optimizer(module):
    node = {"_target_": f"{__name__}.TrainableOnly", "lr": 0.1}
    trained = [each for each in module.parameters() if each.requires_grad]
    for made in (
        torch.optim.SGD(trained, lr=0.1),
        build_optimizer(module, node, global_batch=1, later=LATER),
    ):
        module.trained_later = ()
        look(module, [made], speaks=True)
        module.trained_later = LATER
        problem = refusal(look, module, [made], speaks=True)
        assert problem.path == "model.unfreeze_at"
        assert "would train 2 parameters that no optimizer has: 0.weight, 0.bias" in problem.what
        assert "self.parameters()" in problem.remedy
    node["_target_"] = "torch.optim.SGD"
    look(module, [build_optimizer(module, node, global_batch=1, later=LATER)], speaks=True)


def test_what_stays_as_it_is_is_counted(module, caplog):
    module.requires_grad_(True)
    first = torch.optim.SGD(module[0].parameters(), lr=0.1)
    last = torch.optim.Adam(module[1].parameters())
    look(module, [first, last], speaks=True)
    look(module, [first], speaks=False)
    assert not caplog.text
    look(module, [first], speaks=True)
    assert "2 of 4 trainable parameters are in no optimizer" in caplog.text
    assert "1.weight, 1.bias" in caplog.text

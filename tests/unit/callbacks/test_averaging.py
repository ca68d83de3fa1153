"""The average of the weights, beside Lightning's."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from torch import nn

from distdl.callbacks import EMAWeightAveraging


@pytest.mark.parametrize(
    "use_buffers, dtype", [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
def test_the_average_is_lightnings_and_resumes(use_buffers, dtype):
    """Also from a checkpoint that Lightning's own callback wrote."""
    module = LightningModule()
    module.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    callbacks = [k(decay=0.5, use_buffers=use_buffers) for k in (LightningEMA, EMAWeightAveraging)]
    assert callbacks[0].state_key == callbacks[1].state_key
    for callback in callbacks:
        callback.setup(Trainer(logger=False, accelerator="cpu"), module, "fit")
    module.to(dtype)  # precision=bf16-true converts it after the setup
    theirs, ours = (callback._average_model for callback in callbacks)
    for step in range(6):
        if step == 3:
            ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += torch.randn_like(parameter)
        module.layers(torch.randn(5, 4, dtype=dtype))
        for average in theirs, ours:
            average.update_parameters(module)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

"""The fused BatchNorm, addition and ReLU against torch's, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from distdl.errors import UserError
from distdl.models import ImageClassifier
from tests.conftest import ROOT

pytest.importorskip("triton")

# In a process of its own: the variable must be set before the kernels are defined.
AGAINST_TORCH = """
import torch
from torch.nn import functional as F
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock, Bottleneck
from distdl.models import fused_norm, norm_kernels as kernels

kernels.PROGRAMS, kernels.BLOCK = 4, 32  # several splits, blocks that stick out
used = []
apply = kernels.NormAddReLU.apply
kernels.NormAddReLU.apply = lambda *given: used.append(given[1] is not None) or apply(*given)

def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)

for shape in ((2, 3, 5, 7), (3, 16, 2, 2), (1, 5, 3, 3)):
    for adds in (False, True):
        torch.manual_seed(0)
        def images():
            x = torch.randn(shape, dtype=torch.float64) * 2 + 30
            return x.to(memory_format=torch.channels_last)
        x, z = images().requires_grad_(), (images() - 30).requires_grad_() if adds else None
        norms = []
        for _ in range(2):
            norm = torch.nn.BatchNorm2d(shape[1], momentum=0.3, dtype=torch.float64)
            torch.manual_seed(1)
            torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
            norms.append(norm)
        ours = fused_norm.norm_relu(norms[0], x, z)
        plain = norms[1](x)
        reference = F.relu(plain if z is None else plain + z)
        close(ours, reference)
        towards = torch.randn_like(reference)
        inputs = [x] if z is None else [x, z]
        found = torch.autograd.grad(ours, [*inputs, *norms[0].parameters()], towards)
        expected = torch.autograd.grad(reference, [*inputs, *norms[1].parameters()], towards)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
        for one, other in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
            close(one, other)
assert used == [False, True] * 3, used

for kind, width in ((BasicBlock, 4), (Bottleneck, 16)):
    used.clear()
    nets = []
    for fuses in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(kind(width, 4)).double()
        nets.append(net.to(memory_format=torch.channels_last))
        if fuses:
            fused_norm.fuse(nets[-1])
    x = torch.randn(2, width, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    for step in range(2):
        losses = [net(x).square().mean() for net in nets]
        close(*losses)
        for loss in losses:
            loss.backward()
        pairs = zip(*(net.parameters() for net in nets), strict=True)
        for one, other in pairs:
            close(one.grad, other.grad)
    assert list(nets[0].state_dict()) == list(nets[1].state_dict())
    close(list(nets[0].state_dict().values()), list(nets[1].state_dict().values()))
    assert used == {BasicBlock: [False, True], Bottleneck: [False, False, True]}[kind] * 2
    before = len(used)
    close(nets[0].eval()(x), nets[1].eval()(x))
    assert len(used) == before, "evaluation is torch's"
print("equal")
"""


def test_equals_torch_forward_and_backward_in_float64():
    done = subprocess.run(
        [sys.executable, "-c", AGAINST_TORCH],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")},
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter (3.6) does not run with this NumPy")
    assert done.stdout.strip() == "equal", done.stderr


def test_on_a_cpu_the_blocks_do_what_torchvisions_do(caplog):
    caplog.set_level("INFO")
    outputs = []
    for fused in (True, False):
        torch.manual_seed(0)
        module = ImageClassifier(resnet18(num_classes=4), num_classes=4, fused_bn=fused)
        module.configure_model()
        outputs.append((module(torch.ones(2, 3, 32, 32)), list(module.state_dict())))
    assert torch.equal(outputs[0][0], outputs[1][0]) and outputs[0][1] == outputs[1][1]
    assert caplog.text.count("nothing is fused") == 1


def test_where_there_is_nothing_to_fuse_it_is_refused():
    with pytest.raises(UserError, match=r"model.fused_bn: Sequential has no residual block"):
        ImageClassifier(nn.Sequential(nn.Conv2d(3, 4, 1)), fused_bn=True)
    for other in ({"norm": "group"}, {"compile": True}, {"channels_last": False}):
        with pytest.raises(UserError, match=f"model.{next(iter(other))}"):
            ImageClassifier(resnet18(), fused_bn=True, **other)

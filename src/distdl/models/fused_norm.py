"""`model.fused_bn`: torchvision's residual blocks with BatchNorm, addition and ReLU in one kernel.

Names of weights and everything in a checkpoint stay. The kernel (`distdl.models.norm_kernels`) is
for training on a CUDA device in channels_last; elsewhere a block does what torchvision's does.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from distdl.errors import Problem, UserError


def fuse(network: nn.Module) -> None:
    """Changes torchvision's ResNet blocks (ResNeXt and Wide ResNet have the same), in place.

    Raises:
        UserError: It has none.
    """
    found = False
    for module in network.modules():
        # A class of two methods takes the place of another: no module is made anew.
        if type(module) is BasicBlock:
            module.__class__, found = FusedBasicBlock, True
        elif type(module) is Bottleneck:
            module.__class__, found = FusedBottleneck, True
        elif type(module) is ResNet:
            module.__class__ = FusedResNet
    if not found:
        what = f"{type(network).__name__} has no residual block of torchvision's"
        raise UserError(Problem("model.fused_bn", what, "model.fused_bn=false"))


def works_on(device: torch.device) -> bool:
    """Whether the kernel is used on this device (or Triton's interpreter, for tests)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def norm_relu(norm: nn.Module, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """relu(norm(x) + z), by the kernel where it can.

    Args:
        norm: A BatchNorm2d with weights and running statistics, or anything else.
        x: [B, C, H, W].
        z: Like x, or None.
    """
    if not _fits(norm, x, z):
        out = norm(x)
        return F.relu(out if z is None else out + z)
    from distdl.models.norm_kernels import NormAddReLU

    assert isinstance(norm, nn.BatchNorm2d) and norm.momentum is not None
    y, mean, variance = NormAddReLU.apply(x, z, norm.weight, norm.bias, norm.eps)
    with torch.no_grad():
        rows = x.numel() // x.shape[1]
        assert norm.running_mean is not None and norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
        # The running variance is the unbiased one, as torch's.
        unbiased = variance.to(norm.running_var.dtype) * (rows / (rows - 1))
        norm.running_var.lerp_(unbiased, norm.momentum)
    return y


def _fits(norm: nn.Module, x: torch.Tensor, z: torch.Tensor | None) -> bool:
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.numel() > x.shape[1]
        and x.is_contiguous(memory_format=torch.channels_last)
        and (z is None or (z.dtype == x.dtype and z.stride() == x.stride()))
        and works_on(x.device)
    )


class FusedBasicBlock(BasicBlock):
    """Of ResNet-18 and 34."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = norm_relu(self.bn1, self.conv1(x))
        identity = x if self.downsample is None else self.downsample(x)
        return norm_relu(self.bn2, self.conv2(out), identity)


class FusedBottleneck(Bottleneck):
    """Of ResNet-50 and deeper."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = norm_relu(self.bn1, self.conv1(x))
        out = norm_relu(self.bn2, self.conv2(out))
        identity = x if self.downsample is None else self.downsample(x)
        return norm_relu(self.bn3, self.conv3(out), identity)


class FusedResNet(ResNet):
    """Its stem."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(norm_relu(self.bn1, self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

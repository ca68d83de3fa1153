"""What two ranks do with modules that step by hand, or do what FSDP2 cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.fsdp import FSDPStrategy
from distdl.util.errors import UserError
from tests.strategies.small import Small, loader, trainer


class Parts(Small):
    """Calls its parts by themselves, goes backward in between, and steps two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(10))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        scale = self.scale  # of the module itself: before the first backward pass
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            inside = self.network[:5](batch[0])
            answer = self.network[5:](inside.detach() if number else inside)
            loss = nn.functional.cross_entropy(answer * (1 if number else scale), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        first = [*self.network[:5].parameters(), self.scale]
        adam = torch.optim.Adam(self.network[5:].parameters(), 0.01)
        return [torch.optim.SGD(first, 0.05, momentum=0.9), adam]


class Direct(Small):
    """No module at all: weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.ParameterList([torch.ones(192, 10) / 100])

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = nn.functional.cross_entropy(batch[0].flatten(1) @ self.network[0], batch[1])
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.losses.append(float(loss.detach()))


class Penalty(Small):
    """A gradient penalty, through a unit of FSDP2 (the module itself) or inside of it."""

    def __init__(self, through: bool) -> None:
        super().__init__()
        self.through = through

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch[0].requires_grad_()
        answer = self(images) if self.through else self.network(images)
        (gradient,) = torch.autograd.grad(answer.sum(), images, create_graph=True)
        loss = nn.functional.cross_entropy(answer, batch[1]) + gradient.norm() / 10
        self.losses.append(float(loss.detach()))
        return loss


class Target(Small):
    """A moving average of the weights, in the step (BYOL) or after it."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.after = after
        self.target = nn.Linear(160, 10).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.after:
            self.follow()
        return super().training_step(batch, batch_idx) + self.target.bias.sum() * 0

    def on_train_batch_end(self, *_: Any) -> None:
        if self.after:
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        for mean, value in zip(self.target.parameters(), self.network[7].parameters(), strict=True):
            mean.lerp_(value, 0.1)


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    alike = {
        "parts": Parts,
        "direct": Direct,
        "after": lambda: Target(True),
        "inside": lambda: Penalty(False),
    }
    for name, make in alike.items():
        yield f"ddp_{name}", trained(DDPStrategy(find_unused_parameters=True), make(), folder)
        yield f"fsdp_{name}", trained(FSDPStrategy(), make(), folder)
    for name, module in {"penalty": Penalty(True), "during": Target(False)}.items():
        try:
            yield f"fsdp_{name}", trained(FSDPStrategy(), module, folder)
        except UserError as error:
            yield f"fsdp_{name}", str(error)


def trained(strategy: Any, module: Small, folder: Path) -> dict[str, Any]:
    trainer(strategy, 8, folder).fit(module, loader())
    values = (getattr(p, "full_tensor", lambda p=p: p)().detach() for p in module.parameters())
    return {"losses": module.losses, "sums": [float(v.abs().sum()) for v in values]}

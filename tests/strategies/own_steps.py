"""Modules that step by hand, or do what FSDP2 cannot."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.strategies.small import Small


class ByHand(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def step(self, optimizer: Any, answer: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(answer, labels)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss.detach()))


class Parts(ByHand):
    """Calls its parts by themselves, goes backward in between, and steps two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        scale = self.scale  # of the module itself: before the first backward pass
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            inside = self.network[:5](batch[0])
            answer = self.network[5:](inside.detach() if number else inside)
            self.step(optimizer, answer * (1 if number else scale), batch[1])
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first = [*self.network[:5].parameters(), self.scale]
        adam = torch.optim.Adam(self.network[5:].parameters(), 0.01)
        return [torch.optim.SGD(first, 0.05, momentum=0.9), adam]


class Direct(ByHand):
    """No module at all: weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.ParameterList([torch.ones(192, 10) / 100])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.step(self.optimizers(), batch[0].flatten(1) @ self.network[0], batch[1])


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
        self.after, self.target = after, nn.Linear(160, 10).requires_grad_(False)

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


ALIKE = (Parts, Direct, partial(Target, True), partial(Penalty, False))
REFUSED = {
    partial(Penalty, True): "create_graph=True",
    partial(Target, False): "training_step changes weights (target.",
}

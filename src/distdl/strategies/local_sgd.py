"""Local SGD and DiLoCo: many local steps, then one synchronisation.

Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD" (https://arxiv.org/abs/1808.07217,
algorithm 1), and Douillard et al. 2023, "DiLoCo" (https://arxiv.org/abs/2311.08105, algorithm 1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import nn
from torch.optim import Optimizer

from distdl.distributed.traffic import in_words
from distdl.strategies.drifting import DriftingStrategy
from distdl.util.errors import Problem
from distdl.util.ranges import AboveZero, Positive

log = logging.getLogger(__name__)

KEY = "local_sgd"  # in a checkpoint


class LocalSGDStrategy(DriftingStrategy):
    """Ranks train locally and synchronise ("meet") every `sync_every` optimizer steps.

    They also meet before each validation and each checkpoint.

    Args:
        sync_every: Optimizer steps between two meetings (H in both papers).
        outer: "average": all ranks continue from the mean of their weights. "nesterov" (DiLoCo):
            the weights at the last meeting minus that mean are the gradient of an outer SGD with
            Nesterov momentum. It keeps two more copies of the weights.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step. Both defaults are DiLoCo's (section 3.1).
    """

    ends_between_steps = False  # gradients that wait for a step are each rank's own
    unfreezes = False  # what is trained is laid out once, at the start

    def __init__(
        self,
        sync_every: Positive = 32,
        outer: Literal["average", "nesterov"] = "average",
        outer_lr: AboveZero = 0.7,
        outer_momentum: AboveZero = 0.9,
    ) -> None:
        super().__init__()
        self.sync_every = sync_every
        self.outer = outer
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self._outer: torch.optim.SGD | None = None
        self._last: dict[str, nn.Parameter] = {}  # weights at the last meeting
        self._momentum: Mapping[str, torch.Tensor] = {}  # from a checkpoint
        self._steps = self._first_step = self.meetings = 0

    @staticmethod
    def check(config: Mapping[str, Any], context: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of the arguments; paths are relative to the strategy node."""
        for name, default in (("outer_lr", 0.7), ("outer_momentum", 0.9)):
            used = config.get("outer", "average") == "nesterov"
            if not used and config.get(name, default) != default:
                yield Problem(
                    name,
                    what="has no effect with strategy.outer=average",
                    remedy=f"strategy.outer=nesterov, or leave strategy.{name} out",
                    code="conflict",
                )
        if config.get("outer_momentum", 0.9) >= 1:
            yield Problem(
                "outer_momentum",
                what="must be less than 1",
                remedy="strategy.outer_momentum=0.9",
                code="out-of-range",
            )
        trainer = (context.get("config") or {}).get("trainer") or {}
        if trainer.get("sync_batchnorm"):
            yield Problem(
                "",
                what="trainer.sync_batchnorm would send at every step what local_sgd saves",
                remedy="trainer.sync_batchnorm=false",
                code="unsupported",
            )
        if trainer.get("precision") in (16, "16", "16-mixed"):
            yield Problem(
                "",
                what="each rank would scale its loss differently, and a checkpoint keeps one scale",
                remedy="trainer.precision=bf16-mixed",
                code="mismatch",
            )

    def configure_ddp(self) -> None:
        """Broadcasts the initial weights instead of using DistributedDataParallel."""
        assert self.model is not None
        if self.world_size == 1:
            log.warning("strategy=local_sgd: one device has no others to average with")
        _sync_module_states(self.model)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self._steps = int(checkpoint.get("global_step", 0))
        self._momentum = (checkpoint.get(KEY) or {}).get("momentum", {})

    def on_train_start(self) -> None:
        """Keeps the weights, fresh or from a checkpoint, as those of the last meeting."""
        super().on_train_start()
        self._first_step = self._steps
        if self.outer != "nesterov":
            return
        trained = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
        self._last = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
        self._outer = torch.optim.SGD(
            self._last.values(), self.outer_lr, momentum=self.outer_momentum, nesterov=True
        )
        for name, value in self._momentum.items():
            if name in self._last:
                last = self._last[name]
                self._outer.state[last] = {"momentum_buffer": value.to(last.device, last.dtype)}
        self._momentum = {}

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._steps += 1  # the steps of all optimizers
        self.drifted()
        if self._steps % (self.sync_every * len(self.optimizers)) == 0:
            self.meet()
        return output

    def drifted(self) -> None:
        super().drifted()
        # An outer step is useful with one rank too: it is a Lookahead optimizer (DiLoCo).
        self._apart = self._apart or self.outer == "nesterov"

    def meet(self) -> None:
        super().meet()
        self.meetings += 1
        if self._outer is not None:
            self._outer_step()

    @torch.no_grad()
    def _outer_step(self) -> None:
        assert self._outer is not None
        assert self.lightning_module is not None
        pairs = [(p, self._last.get(n)) for n, p in self.lightning_module.named_parameters()]
        trained = [(parameter, last) for parameter, last in pairs if last is not None]
        for mean, last in trained:
            last.grad = last - mean
        self._outer.step()
        self._outer.zero_grad()
        for parameter, last in trained:
            parameter.copy_(last)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None
    ) -> None:
        """Adds the outer momentum by parameter name; other strategies ignore it."""
        if self._outer is not None:
            states = ((name, self._outer.state.get(p, {})) for name, p in self._last.items())
            momentum = {n: s["momentum_buffer"] for n, s in states if "momentum_buffer" in s}
            checkpoint = {**checkpoint, KEY: {"momentum": momentum}}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_train_end(self) -> None:
        super().on_train_end()
        steps = self._steps - self._first_step
        if self.world_size == 1 or not steps:
            return
        trained = (p for p in self.lightning_module.parameters() if p.requires_grad)
        gradients = sum(p.numel() * p.element_size() for p in trained)
        log.info(
            f"local_sgd: {self.meetings} meetings in {steps} steps, those before validations and "
            "checkpoints included; each rank averaged "
            f"{in_words(self.bytes_met / steps)} per step, under DDP {in_words(gradients)} "
            f"({gradients * steps / max(1, self.bytes_met):.1f} times as much)"
        )

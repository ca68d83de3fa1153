"""Evaluates and saves the averages that a schedule-free optimizer keeps of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from distdl.callbacks.lean import LeanCallback
from distdl.callbacks.metrics import steps_of
from distdl.checkpoint import settled as saved
from distdl.data.rebuilding import recent
from distdl.loops.averaged import Averages
from distdl.loops.decides import who_decides
from distdl.loops.generators import rng_state, set_rng_state
from distdl.models.batch_statistics import Measuring, Statistics, set_statistics, statistics_of
from distdl.optim.averages import norms_of, to_average, to_training
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

BATCHES = 50  # of the training, over which the statistics are computed
OF_ANY = frozenset(vars(LightningModule()))  # attributes, of Lightning's and of torch's
STEP = "statistics_step"  # of a module: a forward for these statistics


class AveragedWeights(LeanCallback, Averages):
    """For a config's optimizer that exchanges weights (`optim.averages`).

    A checkpoint has the averages as its weights; what is trained is part of the optimizer's state.
    Batch norms have statistics of what is trained. Before a validation, and for checkpoints but
    those between two steps, they are computed again with the averages, on the batches that were
    trained last, and are put back after it.
    """

    def __init__(self) -> None:
        self._inside = False  # the averages are in the place of the weights
        self._trained: Statistics = {}  # while they are: the statistics of what is trained
        self._fitting: Statistics = {}  # those of the averages,
        self._fits_at = -1  # at this step
        self._settled = True
        self._loaded: Mapping[str, Any] | None = None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(saved.KEY)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._exchange(trainer, to_training)
        norms = norms_of(pl_module)
        if self._loaded is not None:
            known = self._loaded["statistics"].items()
            set_statistics(norms, {name: each for name, each in known if name in norms})
            self._loaded = None
        if self._measured(pl_module):
            _refuse_unmeasurable(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[saved.KEY] = {"settled": self._settled, "statistics": self._trained}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the averages, which are what a trained model is used with."""
        self._exchange(trainer, to_average)
        if self._fits_at == steps_of(trainer):
            set_statistics(self._measured(pl_module), self._fitting)

    @contextmanager
    def averaged(self, trainer: Trainer, *, settled: bool) -> Iterator[None]:
        if self._inside or trainer.state.fn != "fit":
            yield
            return
        module = trainer.lightning_module
        norms = self._measured(module)
        self._inside = True
        self._trained = statistics_of(norms)
        try:
            self._exchange(trainer, to_average)
            step = steps_of(trainer)
            if settled and norms and self._fits_at != step:
                self._fitting = measured(trainer, norms)
                self._fits_at = step
            fits = self._fits_at == step
            self._settled = fits or not norms
            if fits:
                set_statistics(norms, self._fitting)
            yield
        finally:
            set_statistics(norms, self._trained)
            self._exchange(trainer, to_training)
            self._inside = False

    @staticmethod
    def _measured(module: nn.Module) -> dict[str, _BatchNorm]:
        """The norms that follow the training: not those of frozen parts."""
        return {name: norm for name, norm in norms_of(module).items() if norm.training}

    @staticmethod
    def _exchange(trainer: Trainer, exchange: Callable[[Optimizer], None]) -> None:
        for optimizer in trainer.optimizers:
            exchange(optimizer)
        if reshard := getattr(trainer.strategy, "reshard", None):
            reshard()  # what was gathered of the weights is of before


def _refuse_unmeasurable(trainer: Trainer) -> None:
    """Raises a UserError, before the first step, if the statistics cannot be computed."""
    module = trainer.lightning_module
    must = "the statistics of batch norm must be computed again for the averaged weights"
    remedy = "a model without batch norm (model.norm=group), or another optimizer"
    if not module.automatic_optimization and not hasattr(module, STEP):
        forward = f"a method {STEP}(batch, batch_idx) of the module that calls its forward"
        raise UserError.at(
            "optimizer",
            what=f"{must}, and training_step of {type(module).__name__} steps by itself",
            remedy=f"{forward}, or {remedy}",
            code="unsupported",
        )
    if _batches(trainer) is None:
        raise UserError.at(
            "optimizer",
            what=f"{must}, and the training's loader does not give batches again",
            remedy=remedy,
            code="unsupported",
        )


def _batches(trainer: Trainer) -> DataLoader[Any] | None:
    return recent(trainer.train_dataloader, int(min(BATCHES, trainer.num_training_batches)))


def measured(trainer: Trainer, norms: Mapping[str, _BatchNorm]) -> Statistics:
    """The statistics of norms for the weights that the module has. Nothing else changes, and no
    sample counts as trained on. Collective."""
    module = trainer.lightning_module
    batches = _batches(trainer)
    assert batches is not None
    step: Any = getattr(module, STEP, None)
    own = step is None
    step = module.training_step if own else step
    measuring = Measuring(norms)
    with _unchanged(trainer), _eager(module), _silent(module), torch.no_grad():
        trainer.training = True
        for layer in module.modules() if not own else ():
            layer.training = False  # without dropout, as the statistics are used
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        with measuring.watching():
            for index, batch in enumerate(batches):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                with trainer.precision_plugin.train_step_context():
                    if takes_index:
                        step(batch, index)
                    else:
                        step(batch)
    return measuring.result()


@contextmanager
def _unchanged(trainer: Trainer) -> Iterator[None]:
    """Puts back what steps change besides gradients: generators, buffers, modes of layers, and what
    the module counts in plain attributes."""
    module = trainer.lightning_module
    decides = who_decides(trainer)
    held = decides.held if decides else None
    generators = rng_state(held)
    stage = trainer.state.stage
    layers = [(layer, layer.training) for layer in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    counted = [_Attributes(layer) for layer in module.modules()]
    try:
        yield
    finally:
        for attributes in counted:
            attributes.put_back()
        for layer, training in layers:
            layer.training = training
        for buffer, before in buffers:
            buffer.copy_(before)
        trainer.state.stage = stage
        set_rng_state(generators, held)


class _Attributes:
    """Numbers, tensors and lists in a module's own attributes, with which it counts or gathers."""

    def __init__(self, module: nn.Module) -> None:
        self.owner = vars(module)
        own = {name: value for name, value in self.owner.items() if name not in OF_ANY}
        self.plain = {k: v for k, v in own.items() if isinstance(v, int | float | str | NoneType)}
        self.lists = [(value, len(value)) for value in own.values() if isinstance(value, list)]
        tensors = {k: v for k, v in own.items() if isinstance(v, Tensor)}
        self.tensors = {k: (v, v.detach().clone()) for k, v in tensors.items()}

    def put_back(self) -> None:
        self.owner.update(self.plain)
        for gathered, length in self.lists:
            del gathered[length:]
        for name, (value, before) in self.tensors.items():
            value.detach().copy_(before)
            self.owner[name] = value


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """What the module logs inside is dropped: it is no step of the training."""
    module.log = _nothing  # type: ignore[method-assign]
    module.log_dict = _nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        del module.log_dict


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _eager(module: nn.Module) -> AbstractContextManager[object]:
    """Compiled code has no hooks of the norms."""
    if any(layer._compiled_call_impl is not None for layer in module.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()

"""Measures the blocks before the split: the tensors between them, and the time of each."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from distdl.strategies.pipeline.splitting import Block
from distdl.util.errors import UserError

Context = Callable[[], AbstractContextManager[Any]]
# Passes through all blocks; the first one warms up. The fastest pass of each block counts, since a
# disturbance only adds time.
ROUNDS = 6


@dataclass(frozen=True)
class Edge:
    """The tensor between two blocks, without its shape. It is sent between the ranks."""

    dtype: str  # such as "bfloat16"
    channels_last: bool  # 4-D with the channels innermost

    @classmethod
    def through(cls, x: torch.Tensor) -> Edge:
        last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return cls(str(x.dtype).removeprefix("torch."), last and not x.is_contiguous())

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def first_of(loaders: object) -> object:
    """The first loader in the result of a `*_dataloader()`."""
    if isinstance(loaders, CombinedLoader):
        loaders = loaders.iterables
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return first_of(loaders[0]) if isinstance(loaders, (list, tuple)) else loaders


def first_sample(loader: Iterable[Any]) -> object:
    """A batch with a loader's first sample, loaded without worker processes."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return next(iter(loader))
    if isinstance(loader.dataset, IterableDataset):
        return loader.collate_fn([next(iter(loader.dataset))])
    key = next(iter(loader.batch_sampler))[0]
    return loader.collate_fn([loader.dataset[key]])


def check_chain(module: LightningModule, blocks: Sequence[Block], inputs: torch.Tensor) -> None:
    """Runs the first of `inputs` through `forward` and through the blocks, on the CPU.

    Raises:
        UserError: The results differ, so the module's blocks do not compute its forward.
    """
    x = inputs[:1].detach().cpu()
    parameter = next(module.parameters())
    if x.is_floating_point():
        x = x.to(parameter.dtype)
    with torch.no_grad(), _evaluating(module, blocks):
        expected = module(x)
        chained = x
        for part in itertools.chain.from_iterable(block.modules for block in blocks):
            chained = part(chained)
    if not isinstance(expected, torch.Tensor) or not isinstance(chained, torch.Tensor):
        raise UserError.at(
            "strategy", what="the model's forward must return one tensor", code="incomplete"
        )
    if expected.shape != chained.shape or not expected.allclose(chained, rtol=1e-3, atol=1e-5):
        raise UserError.at(
            "strategy",
            what="the blocks that pipeline_blocks() returns compute another result than forward",
            remedy="return everything that forward applies, in the same order",
            code="mismatch",
        )


@contextmanager
def _evaluating(module: nn.Module, blocks: Sequence[Block]) -> Iterator[None]:
    unnamed = [part for block in blocks for name, part in block.parts if name is None]
    before = {m: m.training for top in (module, *unnamed) for m in top.modules()}
    try:
        for top in (module, *unnamed):
            top.eval()
        yield
    finally:
        for each, training in before.items():
            each.training = training


def run_through(
    blocks: Sequence[Block],
    inputs: torch.Tensor,
    *,
    rows: int,
    trains: bool,
    convert: Callable[[nn.Module], nn.Module],
    context: Context,
    measured: bool,
) -> tuple[list[Edge], list[float] | None]:
    """Runs one micro-batch through copies of the blocks, one block after the other.

    Weights, running statistics and random number generators do not change.

    Args:
        inputs: At least one sample, on the device.
        rows: Rows of a micro-batch.
        trains: Run in training mode; otherwise in evaluation mode, with one row.
        convert: Converts a module to the precision of the run; `context` is that of forward.
        measured: Time forward and backward of each block; otherwise run forward only.

    Returns:
        The edge before each block and after the last; and seconds per block, if measured.

    Raises:
        UserError: A micro-batch is too small for a batch norm to train on.
    """
    x = torch.cat([inputs[:1].detach()] * (rows if trains else 1))
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        rounds = [
            _one_round(blocks, x, trains, convert, context, measured)
            for _ in range(ROUNDS if measured else 1)
        ]
    edges = rounds[0][0]
    if not measured:
        return edges, None
    return edges, [min(times) for times in zip(*(times for _, times in rounds[1:]), strict=True)]


def _one_round(
    blocks: Sequence[Block],
    x: torch.Tensor,
    trains: bool,
    convert: Callable[[nn.Module], nn.Module],
    context: Context,
    measured: bool,
) -> tuple[list[Edge], list[float]]:
    """One pass through all blocks. One block is copied at a time: all may not fit."""
    edges, times = [], []
    for number, block in enumerate(blocks):
        edges.append(Edge.through(x))
        copied = convert(nn.Sequential(*(copy.deepcopy(m) for m in block.modules)))
        copied.to(x.device).train(trains)
        try:
            if measured:
                x, seconds = _timed(copied, x, context, first=number == 0)
                times.append(seconds)
            else:
                with torch.no_grad(), context():
                    x = copied(x).detach()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError.at(
                "strategy.micro_batches",
                what=(
                    f"batch norm in {block.name} gets only one value per channel from a "
                    f"micro-batch of {len(x)} sample"
                ),
                remedy=(
                    "model.norm=group, or larger micro-batches: fewer of them, or a larger "
                    "data.batch_size"
                ),
                code="not-enough",
            ) from error
        del copied
    edges.append(Edge.through(x))
    return edges, times


def _timed(
    block: nn.Module, x: torch.Tensor, context: Context, first: bool
) -> tuple[torch.Tensor, float]:
    """The block's output, and the seconds of forward and backward of one micro-batch."""
    trained = any(p.requires_grad for p in block.parameters())
    with torch.inference_mode(False), torch.enable_grad():
        entering = x.detach().clone().requires_grad_(not first)
        _synchronize(x.device)
        started = time.perf_counter()
        with context():
            out = block(entering)
        if trained or not first:
            out.backward(torch.ones_like(out))
        _synchronize(x.device)
        return out.detach(), time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

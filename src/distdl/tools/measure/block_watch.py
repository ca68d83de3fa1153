"""Measures the blocks between which a pipeline can cut, while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from distdl.strategies.pipeline.splitting import blocks_in
from distdl.tools.measure.live_bytes import LiveBytes, bytes_of, tensors_in
from distdl.tools.measure.measured_step import MeasuredBlock, MeasuredStep
from distdl.util.errors import UserError


@contextmanager
def blocks_watched(
    module: LightningModule,
    measured: MeasuredStep,
    before: int,
    live: LiveBytes,
) -> Iterator[None]:
    """Fills `measured.blocks` while the forward runs. `before`: bytes at its start."""
    try:
        stated = blocks_in(module)
    except UserError as error:
        measured.no_blocks = error.problems[0].what
        yield
        return
    seen: list[tuple[int, float]] = [(before, 0.0)]
    going_back: list[tuple[MeasuredBlock, int]] = []

    def end_block() -> None:
        if going_back:
            block, kept = going_back.pop()
            block.transient = max(0, live.most_of_block - kept)

    def watch(block: MeasuredBlock) -> Callable[..., None]:
        def after(_: nn.Module, __: object, output: object) -> None:
            memory = live.now
            block.activations = max(0, memory - seen[-1][0])
            block.flops = live.flops - seen[-1][1]
            block.output = bytes_of(tensors_in(output))
            seen.append((memory, live.flops))

            def goes_back(gradient: Tensor) -> None:
                end_block()
                live.most_of_block = live.now - live.gradients
                going_back.append((block, memory))

            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(goes_back)

        return after

    with ExitStack() as stack:
        for stage in stated:
            tensors = [t for part in stage.modules for t in (*part.parameters(), *part.buffers())]
            trained = [t for t in tensors if t.requires_grad]
            largest = max((bytes_of([t]) for t in trained), default=0)
            block = MeasuredBlock(bytes_of(tensors), bytes_of(trained), largest=largest)
            measured.blocks.append(block)
            # Steps without a name (a flatten) are not modules of the network, so no hook runs.
            last = [part for name, part in stage.parts if name is not None][-1]
            stack.callback(last.register_forward_hook(watch(block)).remove)
        yield
        end_block()

"""`model.compile=measured`: finds which mode of torch.compile is fastest here, if any.

Before the training, it trains a few steps in each mode, with the run's own devices and data, and
freezes the fastest mode like `distdl.worker.autotune`.
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from distdl.config.recipe import BENCHMARK, TRAIN
from distdl.models.compilers import keep_results, refuse_without_compiler
from distdl.worker import autotune
from distdl.worker.rank_context import RankContext

# torch's own names: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
MODES = ("default", "reduce-overhead", "max-autotune")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
# The first steps compile, and record CUDA graphs where the mode uses them.
WARM_UP, STEPS = 5, 10
# A compiled step must be at least this much shorter: a smaller gain may be noise, and compiling
# delays the start.
LEAST_GAIN = 0.03


def way(mode: str | bool) -> autotune.Candidate:
    """One way to run the network: uncompiled (False), or in a mode of torch.compile."""
    return autotune.Candidate({"model.compile": mode}, f"model.compile={str(mode).lower()}")


def chosen(config: DictConfig, context: RankContext) -> DictConfig:
    """The config with the fastest mode instead of "measured". A UserError if the model can train in
    no mode, or if there is no compiler. Collective."""
    if config.task._target_ not in (BENCHMARK, TRAIN):
        return config
    resources, measured = context.resources, []
    refuse_without_compiler(resources.accelerator)
    keep_results()
    for mode in modes(config, resources.accelerator):
        each = autotune.measure(
            *(config, way(mode), context.environment, resources, context.stop),
            warm_up=WARM_UP,
            steps=STEPS,
            survivable=Exception if mode else torch.cuda.OutOfMemoryError,
        )
        torch._dynamo.reset()
        autotune.report(context.environment, "compile: %s", autotune.line(each))
        measured.append(each)
    return autotune.freeze(config, context, fastest(measured), "compile", measured)


def modes(config: DictConfig, accelerator: str) -> list[str | bool]:
    """The modes that can differ here. CUDA graphs keep gradients in memory that the next replay
    overwrites, so they are left out with accumulated batches. On a CPU all modes are alike."""
    accumulates = int(config.trainer.get("accumulate_grad_batches") or 1) > 1
    tried = MODES[:1] if accelerator == "cpu" else MODES
    return [False, *(m for m in tried if not (accumulates and m in CUDA_GRAPHS))]


def fastest(measured: list[autotune.Measured]) -> autotune.Candidate:
    """The uncompiled setting (the first), unless another one is shorter by `LEAST_GAIN`."""
    best = autotune.fastest(measured, "model.compile")
    plain = measured[0].seconds
    if plain is not None and (best.seconds or 0.0) > (1 - LEAST_GAIN) * plain:
        return measured[0].candidate
    return best.candidate

"""`model.compile=measured`: which mode of torch.compile is fastest here, or none.

It trains a few steps in each mode on these very devices, with the run's own data, before the
training; the fastest is written into the attempt's launch.yaml, so that a resume takes it over and
does not measure again (as `strategy.autotune`, see `distdl.worker.autotune`).
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from distdl.config.recipe import BENCHMARK, TRAIN
from distdl.models.compilers import keep_results, refuse_without_compiler
from distdl.util.errors import UserError
from distdl.worker import autotune
from distdl.worker.rank_context import RankContext

# torch's own names: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
MODES = ("default", "reduce-overhead", "max-autotune")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
# The first steps compile, and record the graphs where there are any.
WARM_UP, STEPS = 5, 10
# A compiled step must be so much shorter: below that it may be noise, and it starts later.
LEAST_GAIN = 0.03


def way(mode: str | bool) -> autotune.Candidate:
    """Of running the network: False as it is, or a mode of torch.compile."""
    return autotune.Candidate({"model.compile": mode}, f"model.compile={str(mode).lower()}")


def chosen(config: DictConfig, context: RankContext) -> DictConfig:
    """The config with the fastest mode in place of "measured". Collective.

    Raises:
        UserError: The step does not train as it is, or there is no compiler.
    """
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
    """What can differ here. CUDA graphs keep gradients in memory that the next replay overwrites,
    so with accumulated batches they are left out; on a CPU all modes are nearly one."""
    accumulates = int(config.trainer.get("accumulate_grad_batches") or 1) > 1
    tried = MODES[:1] if accelerator == "cpu" else MODES
    return [False, *(m for m in tried if not (accumulates and m in CUDA_GRAPHS))]


def fastest(measured: list[autotune.Measured]) -> autotune.Candidate:
    """The first (not compiled), unless another is shorter by `LEAST_GAIN`.

    Raises:
        UserError: None can train.
    """
    able = [each for each in measured if each.seconds is not None]
    if not able:
        what = f"the model does not train in any mode; the last one: {measured[-1].why}"
        raise UserError.at("model.compile", what, "a smaller data.batch_size")
    best = min(able, key=lambda each: each.seconds or 0.0)
    plain = measured[0].seconds
    if plain is not None and (best.seconds or 0.0) > (1 - LEAST_GAIN) * plain:
        return measured[0].candidate
    return best.candidate

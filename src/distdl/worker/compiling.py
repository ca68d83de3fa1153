"""`model.compile=measured`: finds the mode of torch.compile that is fastest here, if any.

Before the training, each mode trains a few steps with the run's devices and data. The fastest mode
is frozen as by `distdl.worker.kept_choices`.
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from distdl.config import task_facts
from distdl.config.schema import TrainerArguments
from distdl.models.compilers import keep_results, refuse_without_compiler
from distdl.worker import autotune, kept_choices
from distdl.worker.rank_context import RankContext

# torch's names: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
MODES = ("default", "reduce-overhead", "max-autotune")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
# The first steps compile and, in some modes, record CUDA graphs.
WARM_UP, STEPS = 5, 10
# A compiled step must be shorter by at least this share: a smaller gain may be noise, and compiling
# delays the start.
LEAST_GAIN = 0.03


def candidate(mode: str | bool) -> autotune.Candidate:
    """One way to run the network: uncompiled (False), or in a mode of torch.compile."""
    return autotune.Candidate({"model.compile": mode}, f"model.compile={str(mode).lower()}")


def tuned(config: DictConfig, context: RankContext) -> DictConfig:
    """Returns the config with the fastest mode instead of "measured". Raises a UserError if the
    model cannot train in any mode, or if there is no compiler. Collective."""
    if "training_step" not in task_facts.of(config).calls:
        return config
    resources = context.resources
    measured = []
    refuse_without_compiler(resources.accelerator)
    keep_results()
    for mode in modes(config, resources.accelerator):
        each = autotune.measure(
            config,
            candidate(mode),
            context.environment,
            resources,
            context.stop,
            warm_up=WARM_UP,
            steps=STEPS,
            survivable=Exception if mode else torch.cuda.OutOfMemoryError,
        )
        torch._dynamo.reset()
        kept_choices.report(context.environment, "compile: %s", autotune.line(each))
        measured.append(each)
    lines = [*map(autotune.line, measured)]
    best = fastest(measured)
    return kept_choices.freeze(config, context, "compile", best.changes, best.name, lines)


def modes(config: DictConfig, accelerator: str) -> list[str | bool]:
    """The modes to measure. On a CPU all modes are alike. CUDA graphs are left out if batches are
    accumulated: a replay would overwrite the gradients of the batch before."""
    accumulates = TrainerArguments.of(config.trainer).accumulate_grad_batches > 1
    distinct = MODES[:1] if accelerator == "cpu" else MODES
    return [False, *(m for m in distinct if not (accumulates and m in CUDA_GRAPHS))]


def fastest(measured: list[autotune.Measured]) -> autotune.Candidate:
    """The fastest mode, if it beats the uncompiled network (the first) by `LEAST_GAIN`."""
    best = autotune.fastest(measured, "model.compile")
    plain = measured[0].seconds
    if plain is not None and (best.seconds or 0.0) > (1 - LEAST_GAIN) * plain:
        return measured[0].candidate
    return best.candidate

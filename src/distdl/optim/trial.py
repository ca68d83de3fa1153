"""Whether an optimizer and a schedule fit their config, found before anything starts."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distdl.optim import averages
from distdl.optim.optimizers import build_optimizer, clock_problem
from distdl.util.errors import Problem, UserError
from distdl.validation.meta import on_meta, targets_own

SIZE = 8  # of the matrix that is stepped; Muon leaves smaller ones than 4 to its fallback


class OneStep:
    """What the validation asks of the optimizer, whatever its class is."""

    @staticmethod
    def check(
        node: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterator[Problem]:
        """Steps the optimizer for a small layer, since some arguments are read only there.

        Yields:
            A problem, if the class refuses the value of an argument, or does not go with the rest
            of the config (`averages.refused`).
        """
        target = str(node.get("_target_"))
        name = target.rpartition(".")[2]
        config = (context or {}).get("config") or {}
        if averages.exchanges(pydoc.locate(target)):
            module = on_meta(targets_own(config["model"])) if config.get("model") else None
            yield from averages.refused(name, config, module)
        # Without a bias: some optimizers take matrices alone, or one group, as a model may have.
        layer = nn.Linear(SIZE, SIZE, bias=False)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            optimizer = build_optimizer(layer, node, global_batch=1, fuse=False)
            optimizer.step(lambda: 0.0)
        except (ValueError, AssertionError, KeyError) as error:
            yield Problem(
                "",
                what=f"{name} refuses a value: {str(error) or type(error).__name__}",
                remedy=f"a value that the documentation of {name} allows",
                code="wrong-choice",
            )
        except UserError as error:
            yield from (replace(p, path=p.path.removeprefix("optimizer.")) for p in error.problems)
        except Exception:  # it needs more than a layer: a process group, a device
            return


class ByClock:
    """What the validation asks of the schedule, whatever its class is."""

    @staticmethod
    def check(
        node: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterator[Problem]:
        """Yields a problem, if `trainer.max_time` is set and the schedule cannot follow it."""
        trainer = ((context or {}).get("config") or {}).get("trainer") or {}
        target: Any = pydoc.locate(str(node.get("_target_")))
        if trainer.get("max_time") is None:
            return
        if problem := clock_problem(node, target):
            yield problem

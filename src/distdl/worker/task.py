"""What a worker does: the interface of tasks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from omegaconf import DictConfig

from distdl.util.errors import Problem
from distdl.worker.build import Built
from distdl.worker.needs import missing_methods
from distdl.worker.rank_context import RankContext


@dataclass(frozen=True)
class Unbuilt:
    """What a task receives that needs no built run."""

    config: DictConfig
    context: RankContext


Received = TypeVar("Received", Built, Unbuilt)
Metrics = dict[str, float]


class Task(ABC, Generic[Received]):
    """What a worker does, on every rank: trains, validates, predicts, ...

    The `task` node of a config names a subclass of it; the other keys of the node are the arguments
    of its `__init__`. The attributes below are needed before anything is imported, and are read
    from the source (`config.task_facts`). So a subclass assigns literals to them, in its body:

        class Count(Task[Built]):
            evaluates = True

            def run(self, context: Built) -> dict[str, float]:
                return {"parameters": float(sum(p.numel() for p in context.module.parameters()))}

    A plain function that takes the built run and the node's arguments, and returns metrics, is a
    task with the values below.
    """

    # It trains the run: leaves checkpoints that a resume continues, and is done once it succeeds.
    trains: ClassVar[bool] = False
    # It examines a checkpoint (its argument `checkpoint`, if it has one), and leaves the training
    # as it is. So its attempt may change keys that would make a training another one.
    evaluates: ClassVar[bool] = False
    # It examines the hosts from the start, before the ranks connect (`preflight=true`).
    examines: ClassVar[bool] = False
    # `run` receives the built run (`Built`); False: nothing is built, and it receives `Unbuilt`.
    needs_build: ClassVar[bool] = True
    # The methods of the user's classes that it calls: the model's step, and the loader of the data.
    calls: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
        """Problems of the task's node, with paths relative to it, and notes; before anything
        starts. Here: methods of `calls` that the user's classes do not define.

        Args:
            node: The task's node, resolved.
            context: "config", resolved; "refused", the components that must not be imported;
                "local"; "world_size" (see `validation.own_checks`).
        """
        yield from missing_methods(cls.calls, context)

    @abstractmethod
    def run(self, context: Received) -> Metrics | None:
        """Performs the task, on every rank, and returns the metrics to print and to record."""


class FunctionTask(Task[Built]):
    """A task that is a plain function of the user's."""

    def __init__(self, function: Callable[..., Metrics | None], arguments: dict[str, Any]) -> None:
        self.function = function
        self.arguments = arguments

    def run(self, context: Built) -> Metrics | None:
        return self.function(context, **self.arguments)


def make_task(named: object, arguments: dict[str, Any]) -> Task[Any]:
    """The task that a node names, a subclass of Task or a function, with the node's arguments. Not
    by Hydra's `instantiate`, which would wrap its exceptions."""
    if inspect.isclass(named) and issubclass(named, Task):
        return named(**arguments)
    assert callable(named)  # as validation has found
    return FunctionTask(named, arguments)

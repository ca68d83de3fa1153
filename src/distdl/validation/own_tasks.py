"""Whether a task is what the reading of its source has said (`config.task_facts`)."""

from __future__ import annotations

import inspect
import sys

from distdl.config import task_facts
from distdl.util.errors import Problem


def problem(called: object, target: str) -> Problem | None:
    """What is wrong with the class that `task._target_` names; None if nothing is, or if it is a
    function.

    Args:
        called: The target, imported but not called.
    """
    if not inspect.isclass(called):
        return None
    base = task_facts.BASE.rpartition(".")
    task = getattr(sys.modules.get(base[0]), base[2], object())
    if task not in called.__mro__:
        return Problem(
            "task._target_",
            what=f"{target} is a class, but not a Task",
            remedy="derive it from distdl.tasks.Task, or name a function",
            code="wrong-kind",
        )
    read = task_facts.of_target(target)
    for name in task_facts.NAMES:
        real, said = getattr(called, name), getattr(read, name)
        if real != said:
            remedy = f"write {name} = {real!r} in the body of the class, and its module's name in "
            return Problem(
                "task._target_",
                what=(
                    f"{target} has {name} = {real!r}, and its source, which is read before it is "
                    f"imported, says {said!r}"
                ),
                remedy=f"{remedy}task._target_",
                code="mismatch",
            )
    return None

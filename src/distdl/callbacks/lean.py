"""The base of distdl's callbacks in every run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback


class LeanCallback(Callback):
    """Lightning's Callback without its four empty hooks around backward and optimizer step.

    Lightning (2.6) calls each empty hook of each callback in each step, which takes about 1 us.
    What is not callable, it skips. A subclass that defines one of these hooks gets its calls, and
    must not call `super()`'s.
    """

    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None

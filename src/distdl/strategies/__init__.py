"""Strategies that Lightning does not have, or not in this form."""

import importlib
from typing import Any

# The module of each class, imported on first use: some imports take long.
_MODULES = {
    "DDPStrategy": "ddp",
    "LocalSGDStrategy": "local_sgd",
    "FSDPStrategy": "fsdp",
    "DeepSpeedStrategy": "deepspeed",
    "ModelParallelStrategy": "model_parallel",
    "PipelineStrategy": "pipeline.strategy",
}


def auto() -> str:
    """Lightning's choice: plain training in one process, DDP over several."""
    return "auto"


def single() -> str:
    """One process on one device; validation refuses more."""
    return "auto"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of one of the modules
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Strategies that are not simply a class of Lightning's."""

import importlib
from typing import Any

# Where a class is; imported when it is asked for, since some of them take long.
_WHERE = {
    "DDPStrategy": "distdl.strategies.ddp",
    "LocalSGDStrategy": "distdl.strategies.local_sgd",
    "FSDPStrategy": "distdl.strategies.fsdp",
    "DeepSpeedStrategy": "distdl.strategies.deepspeed",
    "PipelineStrategy": "distdl.strategies.pipeline.strategy",
}


def auto() -> str:
    """Lightning's choice: one process alone, DDP over several."""
    return "auto"


def single() -> str:
    """One process on one device; validation refuses more."""
    return "auto"


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

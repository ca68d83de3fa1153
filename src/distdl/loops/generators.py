"""The random generators of a process: torch's, numpy's, Python's, and those that the parts of a
training hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distdl.data.held_generators import HeldGenerators


def rng_state(held: HeldGenerators | None = None) -> dict[str, Any]:
    """The state of this rank's random generators, in types that `weights_only` loads."""
    numpy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
        "held": {} if held is None else held.states(),
    }


def set_rng_state(state: Mapping[str, Any], held: HeldGenerators | None = None) -> None:
    """Sets the generators to what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if held is not None:
        held.restore(state.get("held") or {})

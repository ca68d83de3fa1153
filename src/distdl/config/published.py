"""Weights by the name under which timm or torchvision publishes them: `timm:resnet18.a1_in1k`.

The word before the colon keeps a name apart from a file; a file of that name is `./timm:...`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

KEY = "model.weights"
TIMM, TORCHVISION = "timm:", "torchvision:"
# What people write elsewhere: torchvision's enum, the names of repositories and of timm's loaders.
_ENUM = re.compile(r"(?:torchvision\.models\.)?(\w+_Weights\.\w+)")
_TIMMS = re.compile(r"(?:hf[-_]hub:)?timm/([\w.-]+)")


def is_name(weights: object) -> bool:
    """Whether the value of `model.weights` is a name, and no file."""
    return isinstance(weights, str) and weights.startswith((TIMM, TORCHVISION))


def name_in(config: DictConfig | Mapping[str, object]) -> str | None:
    """The name that a config's `model.weights` holds; None: it holds none."""
    if isinstance(config, DictConfig):
        weights = OmegaConf.select(config, KEY, throw_on_resolution_failure=False)
    else:
        model = config.get("model")
        weights = model.get("weights") if isinstance(model, Mapping) else None
    return str(weights) if is_name(weights) else None


def instead_of(file: object) -> str:
    """What to write instead of a file that does not exist."""
    text = str(file)
    for pattern, source in ((_ENUM, TORCHVISION), (_TIMMS, TIMM)):
        if found := pattern.fullmatch(text):
            return f"{KEY}={source}{found[1]}"
    return (
        "a .pth, .safetensors or .ckpt file, the folder of a run, or a name: timm:NAME or "
        "torchvision:NAME"
    )

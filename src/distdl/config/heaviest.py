"""A run's config as it is when the run needs most memory."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import recipe as configs


def heaviest(config: DictConfig) -> DictConfig:
    """With all weights that the run will train (`model.unfreeze_at`), and with its largest images
    (`data.resize`), from the first step on."""
    changes: dict[str, Any] = {}
    if OmegaConf.select(config, "model.unfreeze_at") is not None:
        changes |= {"model.freeze": [], "model.unfreeze_at": None}
    if resize := configs.plain(OmegaConf.select(config, "data.resize")):
        largest = max(resize["from"], resize["to"])
        changes["data.resize"] = {**resize, "from": largest, "to": largest}
    return configs.merge(config, OmegaConf.create({}), changes)

"""For pytorch_tabular: a generated table, and a module built from settings."""

import numpy as np
import pandas as pd
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModel, CategoryEmbeddingModelConfig
from pytorch_tabular.tabular_datamodule import TabularDatamodule
from torch.utils.data import DataLoader


def settings(batch_size: int) -> DictConfig:
    parts = (
        DataConfig(target=["y"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
        CategoryEmbeddingModelConfig(task="regression", layers="16-8"),
        TrainerConfig(batch_size=batch_size),
        OptimizerConfig(),
    )
    return OmegaConf.merge(*(OmegaConf.to_container(OmegaConf.structured(p)) for p in parts))


def table(count: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    a = random.normal(size=count)
    b = random.normal(size=count)
    kind = random.integers(3, size=count)
    return pd.DataFrame({"a": a, "b": b, "kind": kind.astype(str), "y": a * kind + b})


class Rows(TabularDatamodule):
    def __init__(self, batch_size: int) -> None:
        super().__init__(table(96, 1), settings(batch_size), table(32, 2))

    def setup(self, stage: str | None = None) -> None:
        if not self._fitted:  # TabularDatamodule prepares data only for training
            super().setup("fit")

    def test_dataloader(self) -> DataLoader:
        return self.prepare_inference_dataloader(table(32, 3))


def embedding(batch_size: int = 8) -> LightningModule:
    data = Rows(batch_size)
    config = settings(batch_size)
    inferred = OmegaConf.structured(data.update_config(config))
    return CategoryEmbeddingModel(config, inferred_config=inferred)

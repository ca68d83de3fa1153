"""For gluonts: noisy sines, and the module and loaders that its DeepAR estimator makes."""

from collections.abc import Iterable

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from lightning.pytorch import LightningDataModule, LightningModule


def estimator(batch_size: int = 8, batches: int = 20) -> DeepAREstimator:
    return DeepAREstimator(
        "D", 7, hidden_size=16, batch_size=batch_size, num_batches_per_epoch=batches
    )


def deepar() -> LightningModule:
    return estimator().create_lightning_module()


class Series(LightningDataModule):
    def __init__(self, batch_size: int, count: int = 12) -> None:
        super().__init__()
        self.maker = estimator(batch_size)
        self.count = count

    def _data(self) -> Iterable:
        noise = np.random.default_rng(1).normal(0, 0.1, (self.count, 200))
        waves = np.sin(np.arange(200) / 5 + np.arange(self.count)[:, None]) + noise
        data = ListDataset([{"start": "2020-01-01", "target": wave} for wave in waves], "D")
        return self.maker.create_transformation().apply(data, is_train=True)

    def train_dataloader(self) -> Iterable:
        return self.maker.create_training_data_loader(self._data(), deepar())

    def val_dataloader(self) -> Iterable:
        return self.maker.create_validation_data_loader(self._data(), deepar())

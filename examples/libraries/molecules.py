"""For chemprop: alkanes and alcohols. The property to learn is the number of their atoms."""

import numpy as np
from chemprop.data import MoleculeDatapoint, MoleculeDataset, build_dataloader
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


class Molecules(LightningDataModule):
    def __init__(self, batch_size: int, train: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train = train

    def _loader(self, count: int, shuffle: bool = False) -> DataLoader:
        smiles = ["C" * (1 + n % 12) + "O" * (n % 2) for n in range(count)]
        points = [MoleculeDatapoint.from_smi(s, np.array([float(len(s))])) for s in smiles]
        return build_dataloader(MoleculeDataset(points), self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(24)

    def test_dataloader(self) -> DataLoader:
        return self._loader(20)

"""Every way to give Lightning a learning rate over time."""

from typing import Any

import torch
from points import Regression
from torch.optim import lr_scheduler


class Scheduled(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        kind, total = self.hparams.kind, self.trainer.estimated_stepping_batches
        given: dict[str, Any] = {"interval": "step"}
        if kind == "step":
            given |= {"scheduler": lr_scheduler.StepLR(optimizer, 3), "frequency": 2}
        elif kind == "epoch":
            given |= {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
        elif kind == "plateau":
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            given = {"scheduler": plateau, "monitor": "val_loss"}
        elif kind == "onecycle":
            given |= {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(total))}
        else:
            assert kind == "sequential"
            parts = [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
                lr_scheduler.CosineAnnealingLR(optimizer, int(total) - 6),
            ]
            given |= {"scheduler": lr_scheduler.SequentialLR(optimizer, parts, milestones=[6])}
        return {"optimizer": optimizer, "lr_scheduler": given}

"""What a project of two years does by hand."""

import copy
from typing import Any

import torch
from points import Regression
from torch import Tensor, nn


class ByHand(Regression):
    """A teacher that follows after each batch, a layer that is trained from the second epoch on, a
    plateau in the middle of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        said = self.teacher(batch["x"])
        return super().training_step(batch, batch_idx) + nn.functional.mse_loss(
            self(batch["x"]), said
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mine, followed in zip(
            self.teacher.parameters(), self.network.parameters(), strict=True
        ):
            mine.data.lerp_(followed.data, 0.1)

    def on_train_epoch_start(self) -> None:
        groups = self.optimizers().param_groups
        if self.current_epoch == 1 and len(groups) == 1:
            self.optimizers().add_param_group({"params": self.network[-1].parameters()})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.state.fn == "fit":  # validated by itself, Lightning starts at step 0
            self.log("val_up_to_ten", float(min(self.global_step, 10)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.network[:-1].parameters(), 0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        schedule = {"interval": "step", "frequency": 2, "monitor": "val_loss"}
        return [optimizer], [{"scheduler": plateau, **schedule}]

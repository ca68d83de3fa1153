"""What test_campaign trains; copied into a project's folder as mine.py. Each rank counts the points
that it passes, by phase, and sends a signal at one of them.

`$DISTURB`: a JSON object with `phase`, `at` (the number of the point, from 1), `rank`, `signal`,
`to` ("rank", or "command" above it) and `flag`, a file that is made then: it happens once.
`$COUNTS`: where each rank writes how many points it has passed.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, GLOBAL_BATCH, VALIDATION_STEPS = 6, 6, 3
PLAN = json.loads(os.environ.get("DISTURB", "{}"))
passed: Counter[str] = Counter()


def point(phase):
    passed[phase] += 1
    chosen = (PLAN.get("phase"), PLAN.get("at"), PLAN.get("rank")) == (phase, passed[phase], RANK)
    if chosen and not Path(PLAN["flag"]).exists():
        Path(PLAN["flag"]).touch()
        above = RANKS > 1 and PLAN["to"] == "command"
        os.kill(os.getppid() if above else os.getpid(), PLAN["signal"])


def writes(event, arguments):
    """While a checkpoint is written, in whatever thread."""
    if event in ("open", "os.rename") and "/checkpoints/" in str(arguments[0]):
        point("checkpoint")


sys.addaudithook(writes)
point("set-up")


class Points(pl.Callback):
    """Passes a point in each hook. First of all callbacks, and the module passes more."""

    def on_fit_start(self, *_):
        point("set-up")

    def on_train_start(self, *_):
        point("set-up")

    def on_train_batch_start(self, *_):
        point("training")

    def on_before_optimizer_step(self, *_):
        point("training")

    def on_train_batch_end(self, *_):
        point("training")

    def on_validation_start(self, *_):
        point("validation")

    def on_validation_epoch_start(self, *_):
        point("validation")

    def on_validation_batch_start(self, *_):
        point("validation")

    def on_validation_batch_end(self, *_, **__):
        point("validation")

    def on_validation_epoch_end(self, *_):
        point("validation")

    def on_validation_end(self, *_):
        point("validation")

    def on_save_checkpoint(self, *_):
        point("checkpoint")

    def on_train_end(self, *_):
        point("end")

    def on_fit_end(self, *_):
        point("end")

    def teardown(self, *_, stage):
        point("end")
        if "COUNTS" in os.environ:
            Path(f"{os.environ['COUNTS']}-{RANK}.json").write_text(
                json.dumps(passed), encoding="utf-8"
            )


class Noisy(Dataset):
    """Augmented: each view of a sample differs."""

    def __init__(self, size):
        self.rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"x": row + 0.1 * torch.randn(4), "y": row.sum(0, keepdim=True), "index": index}


class Data(pl.LightningDataModule):
    def __init__(self, workers=0, loaders=1):
        super().__init__()
        self.workers = workers
        self.loaders = loaders

    def setup(self, stage):
        point("set-up")

    def train_dataloader(self):
        point("set-up")
        return self._loader(STEPS, shuffle=True)

    def val_dataloader(self):
        loaders = [self._loader(VALIDATION_STEPS) for _ in range(self.loaders)]
        return loaders if self.loaders > 1 else loaders[0]

    def _loader(self, steps, **options):
        data = Noisy(steps * GLOBAL_BATCH)
        size = GLOBAL_BATCH // RANKS
        return DataLoader(data, size, num_workers=self.workers, **options)


class Net(pl.LightningModule):
    norm: type[nn.Module] = nn.BatchNorm1d

    def __init__(self):
        super().__init__()
        point("set-up")
        # Batch norm's statistics differ between the ranks of DDP.
        first = (nn.Linear(4, 8), self.norm(8), nn.Dropout(0.2))
        self.layers = nn.Sequential(*first, nn.ReLU(), nn.Linear(8, 1))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        point("training")
        return nn.functional.mse_loss(self.layers(batch["x"]), batch["y"])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        """Draws, as a generative model does."""
        point("validation")
        x = batch["x"] + torch.randn_like(batch["x"])
        loss = nn.functional.mse_loss(self.layers(x), batch["y"])
        self.outputs.append(loss.reshape(1))
        self.log("val_loss", loss, sync_dist=True, add_dataloader_idx=dataloader_idx > 0)

    def on_validation_epoch_end(self):
        outputs = torch.cat(self.outputs)
        self.outputs = []
        point("validation")
        return outputs.mean()

    def configure_optimizers(self):
        point("set-up")
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Plain(Net):
    """Without batch norm, for which SWA trains an epoch more."""

    norm = nn.Identity


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class ByHand(Plateau):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_validation_epoch_end(self):
        self.lr_schedulers().step(float(self.all_gather(super().on_validation_epoch_end()).mean()))


class Swaps(pl.Callback):
    """A moving average of somebody's own, measured in each validation."""

    def __init__(self):
        self.mean = []

    def on_train_batch_end(self, trainer, module, *_):
        weights = [p.detach() for p in module.parameters()]
        self.mean = self.mean or [torch.zeros_like(p) for p in weights]
        torch._foreach_lerp_(self.mean, weights, 0.1)

    def exchange(self, trainer, module):
        for mean, weight in zip(self.mean, module.parameters(), strict=True):
            kept = weight.detach().clone()
            weight.data.copy_(mean)
            mean.copy_(kept)

    on_validation_start = on_validation_end = exchange

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def normed(num_classes):
    """As below, with batch norm, whose statistics belong to some weights."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(16, num_classes),
    )


def network(num_classes):
    """For images of 8 x 8 pixels; every strategy can train it."""
    layers = [nn.Linear(192, 16), nn.GroupNorm(4, 16), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(
        nn.Flatten(), *layers, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, num_classes)
    )

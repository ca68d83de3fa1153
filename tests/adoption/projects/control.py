"""Trains the project in this folder with Lightning alone, then validates and tests it.

Its arguments, as YAML: the sections of the experiment, and the ids of the samples in each batch of
each epoch.
"""

import json
import sys

import lightning
import lightning.pytorch as pl
import yaml
from hydra.utils import instantiate
from lightning.pytorch.loggers import TensorBoardLogger
from points import Points
from torch.utils.data import DataLoader

# As if Lightning's other package were installed.
sys.modules["pytorch_lightning"] = sys.modules["lightning.pytorch"]
sys.modules["lightning_fabric"] = lightning.fabric
sections, order = map(yaml.safe_load, sys.argv[1:])


class Order:
    """A sampler of batches, as many as the epoch has in which it is made."""

    def __init__(self):
        self.length = len(order[trainer.current_epoch])

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(order[trainer.current_epoch])


pl.seed_everything(sections["seed"], workers=True, verbose=False)
model, *data = [instantiate(sections[name]) for name in ("model", "data") if name in sections]
source = data[0] if data else model
points = getattr(source, "points", Points)
source.train_dataloader = lambda: DataLoader(points(), batch_size=None, sampler=Order())
sections["trainer"].pop("limit_train_batches", None)  # the order has it
shown = dict.fromkeys(("checkpointing", "progress_bar", "model_summary"), False)
trainer = pl.Trainer(
    **instantiate(sections["trainer"]),
    **{f"enable_{name}": value for name, value in shown.items()},
    callbacks=[instantiate(node) for node in sections["callbacks"].values()],
    logger=TensorBoardLogger("."),
)
trainer.fit(model, *data)
metrics = {"fit": {k: float(v) for k, v in trainer.callback_metrics.items()}}
metrics["validate"] = trainer.validate(model, *data, verbose=False)
metrics["test"] = trainer.test(model, *data, verbose=False)
with open("control.json", "w", encoding="utf-8") as file:
    json.dump(metrics, file)

"""What test_image_workers trains; copied into a project's folder as mine.py."""

import multiprocessing
import os
import threading
from pathlib import Path

import lightning.pytorch as pl
from torch import Tensor, nn

RANK = int(os.environ.get("RANK", 0))

MEASURED = os.environ.get("MEASURED")
if MEASURED:
    # In place of the storage's rates, by which two runs may choose differently: the first
    # measurement of a run chooses windows, and each further one would choose otherwise.
    from distdl.data.reading_order import NodeRates
    from distdl.worker import reading_order

    def measured(node, ranks):
        with Path(MEASURED).open("a+", encoding="utf-8") as lines:
            lines.write("measured\n")
            lines.seek(0)
            further = len(lines.readlines()) > 1
        return NodeRates(5000 if further else 120, 20000, 900, 2)

    reading_order.measure = measured


class Small(nn.Module):
    """Its dropout draws from the process's generators, which threads beside it must leave alone."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Workers(pl.Callback):
    """Writes which processes and threads load, in the third batch of each epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            processes = sorted(each.pid for each in multiprocessing.active_children())
            named = [each for each in threading.enumerate() if each.name.startswith("loader-")]
            threads = sorted(each.native_id for each in named)
            file = Path(trainer.default_root_dir, "logs", f"workers-{RANK}")
            file.parent.mkdir(exist_ok=True)
            line = f"{os.getpid()};{processes};{threads}\n"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(line)

"""Plain Lightning: the same project, trained without distdl."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.adoption.table import IDIOMS, experiment


def train(name: str, order: Sequence[Sequence[Sequence[int]]] | None = None) -> int:
    """Trains an idiom in the current folder, validates and tests it; writes what it found.

    Args:
        name: Which one.
        order: The samples of each batch of each epoch; None: as the project's loaders say.
    """
    import json

    import lightning
    import lightning.pytorch as pl
    from hydra.utils import instantiate
    from lightning.pytorch.loggers import TensorBoardLogger

    # As if Lightning's other package were installed.
    sys.modules["pytorch_lightning"] = sys.modules["lightning.pytorch"]
    sys.modules["lightning_fabric"] = lightning.fabric
    sys.path.insert(0, str(Path.cwd()))
    sections = experiment(IDIOMS[name])
    pl.seed_everything(sections["seed"], workers=True, verbose=False)
    module = instantiate(sections["model"], _convert_="all")
    data = instantiate(sections["data"], _convert_="all") if "data" in sections else None
    source = data or module
    if order is not None:
        loader = source.train_dataloader()
        source.train_dataloader = lambda: again(loader, order, trainer)
    trainer = pl.Trainer(
        **sections["trainer"],
        callbacks=[instantiate(node) for node in sections["callbacks"].values()],
        logger=TensorBoardLogger(".") if IDIOMS[name].tracking != "none" else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    found = {
        "fit": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "validate": trainer.validate(module, data, verbose=False),
        "test": trainer.test(module, data, verbose=False),
    }
    Path("control.json").write_text(json.dumps(found))
    return 0


def again(loader: Any, order: Sequence[Sequence[Sequence[int]]], trainer: Any) -> Any:
    """The same loader, whose samples come in a given order."""
    from torch.utils.data import DataLoader, Sampler

    class Again(Sampler[list[int]]):
        def __len__(self) -> int:
            return len(order[0])

        def __iter__(self) -> Iterator[list[int]]:
            return iter(order[trainer.current_epoch])

    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, sampler=Again(), batch_size=None)
    return DataLoader(
        loader.dataset,
        batch_sampler=Again(),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )

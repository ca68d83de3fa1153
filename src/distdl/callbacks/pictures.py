"""Draws what the domain of a module shows of a validation, for the report and for MLflow."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from distdl.callbacks.lean import LeanCallback
from distdl.data.encoded import EncodedData
from distdl.data.keyed import KeyedDataset
from distdl.datasets.image_headers import DamagedImage
from distdl.domains.domain import domain_of
from distdl.domains.drawing import Drawing, DrawnImage, DrawnSection
from distdl.domains.metric import sum_over
from distdl.loops.fit import fit_loop_of
from distdl.runs.directory import PICTURES, PICTURES_FILE
from distdl.runs.files import write_json
from distdl.tracking.run_logger import RunLogger
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import UserError

log = logging.getLogger(__name__)


class Pictures(LeanCallback):
    """After each validation of a training, `RUN/pictures` shows it; the pictures of an evaluation
    are in the folder of its attempt. Only a module that has a `drawing` (`distdl.domains.drawing`)
    is drawn. The file `pictures.json`, written last, names the images.

    Args:
        run, attempt: Their folders.
    """

    def __init__(self, run: Path, attempt: Path) -> None:
        self.run = run
        self.attempt = attempt

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._draw(trainer, pl_module, "validate", trainer.val_dataloaders)
        elif not trainer.sanity_checking and not fit_loop_of(trainer).epoch_loop.val_loop.was_cut:
            self._draw(trainer, pl_module, "val", trainer.val_dataloaders)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module, "test", trainer.test_dataloaders)

    def _draw(self, trainer: Trainer, module: LightningModule, stage: str, loader: object) -> None:
        drawing = getattr(module, "drawing", None)
        if not isinstance(drawing, Drawing) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return

        drawing.gather(sum_over(trainer.strategy))
        if not trainer.is_global_zero:
            return
        data = getattr(trainer, "datamodule", None)
        names = domain_of(data, module).names(data) or ()
        shown = Shown(loader)
        sections = drawing.sections(shown if shown.data is not None else None, names)
        folder = (self.run if stage == "val" else self.attempt) / PICTURES
        head = {"stage": stage, "epoch": trainer.current_epoch, "step": trainer.global_step}
        try:
            write(folder, head, sections)
        except OSError as error:  # pictures must not end a training
            log.warning("%s: %s", folder, error)
            return
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.send_folder(folder, folder.relative_to(self.run).as_posix())


class Shown:
    """Reads samples of a loader's data set again.

    Args:
        loader: As Lightning has it. `data` is None if its data set cannot show a sample.
    """

    def __init__(self, loader: object) -> None:
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, KeyedDataset):
            dataset = dataset.dataset
        self.data = dataset if isinstance(dataset, EncodedData) else None

    def __call__(self, index: int) -> tuple[bytes, str] | None:
        assert self.data is not None
        try:
            return self.data.read(index), self.data.sample_name(index)
        except (DamagedImage, OSError, UserError) as error:
            log.warning("sample %d cannot be drawn: %s", index, error)
            return None


def write(folder: Path, head: dict[str, object], sections: Sequence[DrawnSection]) -> None:
    """Replaces the pictures in a folder. Raises OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {PICTURES_FILE}
    described = []
    for section in sections:
        images = []
        for each in section.images:
            name, data = encoded(each)
            write_bytes(folder / name, data, durable=False)
            written.add(name)
            images.append({"file": name, "caption": each.caption})
        described.append(
            {
                "title": section.title,
                "note": section.note,
                "images": images,
                "head": [*section.head],
                "rows": [[*row] for row in section.rows],
                "axes": [*section.axes],
                "curves": {label: [*points] for label, points in section.curves.items()},
            }
        )
    write_json(folder / PICTURES_FILE, {**head, "sections": described})
    for path in folder.iterdir():
        if path.name not in written:
            path.unlink()


def encoded(drawn: DrawnImage) -> tuple[str, bytes]:
    """The name of the file of a picture, and its bytes."""
    buffer = io.BytesIO()
    if drawn.photograph:
        drawn.image.save(buffer, "JPEG", quality=85)
        return f"{drawn.name}.jpg", buffer.getvalue()
    drawn.image.save(buffer, "PNG", optimize=True)
    return f"{drawn.name}.png", buffer.getvalue()

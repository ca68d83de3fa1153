"""A model folder for tests of what uses one: a tiny network that tells colours apart."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

CLASSES = ("red", "green", "blue")
SIZE = 16
TRAVELLING = (
    *("distdl.datasets.image_files", "distdl.data.decoding", "distdl.data.crop"),
    *("distdl.serving.scorer", "distdl.serving.requests"),
)
SCRIPTS = ("distdl.serving.score", "distdl.serving.batch_score")


def jpeg(color: str, size: int = 24) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (size, size), color).save(file, "JPEG", quality=95)
    return file.getvalue()


def source(module: str) -> str:
    """The text of a module as it travels: its imports of others are from `distdl_scoring`."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    text = Path(spec.origin).read_text()
    for other in TRAVELLING:
        text = re.sub(
            rf"from {re.escape(other)} import",
            f"from distdl_scoring.{other.rpartition('.')[2]} import",
            text,
        )
    return text


@functools.cache
def network() -> bytes:
    """A program of torch.export: uint8 [B, 3, S, S] to the probabilities of CLASSES."""
    import torch

    class Colours(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.softmax(images.float().mean((2, 3)) / 64, dim=1)

    batch = torch.export.Dim("batch", min=1, max=64)
    images = torch.zeros(2, 3, SIZE, SIZE, dtype=torch.uint8)
    exported = torch.export.export(Colours(), (images,), dynamic_shapes={"images": {0: batch}})
    exported._example_inputs = None  # they would be saved as a pickle
    torch.export.save(exported, file := io.BytesIO())
    return file.getvalue()


def model_folder(folder: Path, card: str = "# Colours", **more: Any) -> Path:
    """Writes a model folder. With another card it is another model to `distdl deploy`."""
    (folder / "distdl_scoring").mkdir(parents=True)
    (folder / "model.pt2").write_bytes(network())
    (folder / "README.md").write_text(card)
    (folder / "distdl_scoring/__init__.py").write_text("")
    for module in TRAVELLING:
        (folder / "distdl_scoring" / f"{module.rpartition('.')[2]}.py").write_text(source(module))
    for module in SCRIPTS:
        (folder / f"{module.rpartition('.')[2]}.py").write_text(source(module))
    (folder / "requirements.txt").write_text("torch==2.9.0\nnumpy==2.3.4\npydantic==2.12.0\n")
    (folder / "example.jpg").write_bytes(jpeg("green"))
    digest = hashlib.sha256((folder / "model.pt2").read_bytes()).hexdigest()
    description = {"format": 1, "kind": "pt2", "classes": CLASSES, "image_size": SIZE}
    examples = [{"file": "example.jpg", "class": "green"}]
    description |= {"short_side": SIZE, "verification": {"examples": examples}}
    description |= {"files": {"model.pt2": digest}, **more}
    (folder / "model.json").write_text(json.dumps(description))
    return folder

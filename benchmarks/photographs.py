"""The photographs that benchmarks decode."""

from __future__ import annotations

import os
from pathlib import Path

from distdl.data.synthetic_jpeg import jpegs


def folder(generated: Path) -> Path:
    """The folder of photographs, with a folder per class; without one, generated JPEGs."""
    if chosen := os.environ.get("DISTDL_PHOTOGRAPHS"):
        return Path(chosen)
    for number, data in enumerate(jpegs(100, 10, 500, 375, 110_000, seed=0)):
        path = generated / f"class{number % 10}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return generated

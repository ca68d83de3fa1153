"""How results are written down."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """One ratio against a named competitor."""

    title: str
    competitor: str
    goal: str
    ratio: float
    rows: list[str]
    command: str
    notes: str = ""
    extra: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        parts = [
            f"## {self.title}",
            f"Competitor: {self.competitor}. Ratio of medians **{self.ratio:.3f}** "
            f"(goal: {self.goal}).",
            "| | median | min | max | unit | repeats |\n|---|---|---|---|---|---|\n"
            + "\n".join(self.rows),
            *([self.notes] if self.notes else []),
            f"`{self.command}`",
        ]
        return "\n\n".join(parts)


def row(name: str, values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    middle = statistics.median(values)
    return f"| {name} | {middle:.4g} | {low:.4g} | {high:.4g} | {unit} | {len(values)} |"


def machine() -> str:
    """The machine and the versions, as they belong beside every number."""
    import os

    import torch

    names = ("torch", "torchvision", "lightning", "hydra-core", "mlflow")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {gpu}, "
        f"Python {platform.python_version()}, {versions}"
    )

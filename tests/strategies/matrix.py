"""Every strategy against every other: what is trained, and how two checkpoints are compared.

All train the same thing: resnet18 with GroupNorm at 32 px, SGD with momentum and two parameter
groups (decayed weights; norms and biases), a global batch of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conftest import TINY
from tests.strategies import ranks
from tests.strategies.ranks import Case, Seen

STEPS = 6
HALF = STEPS // 2
GLOBAL_BATCH = 8

COMMON = (
    *(o for o in TINY if not o.startswith(("data.batch_size", "trainer.max_epochs", "callbacks"))),
    "callbacks=[]",
    "trainer.max_epochs=1",
    f"trainer.max_steps={STEPS}",
    "+trainer.enable_model_summary=false",
    f"checkpoint.every_n_steps={HALF}",
    "checkpoint.keep_last=9",
    "checkpoint.monitor=null",
)


@dataclass(frozen=True)
class Topology:
    """Ranks, and what they do."""

    ranks: int
    overrides: tuple[str, ...]


def batch(size: int, accumulate: int = 1) -> tuple[str, str]:
    return f"data.batch_size={size}", f"trainer.accumulate_grad_batches={accumulate}"


PIPELINE = ("strategy=pipeline", "strategy.stages=2", "strategy.balance=parameters")

TOPOLOGIES = {
    # Two micro-batches of 4, as two ranks have them.
    "single": Topology(1, ("strategy=single", *batch(4, 2))),
    "ddp x2": Topology(2, ("strategy=ddp", *batch(4))),
    "fsdp x2": Topology(2, ("strategy=fsdp", *batch(4))),
    "zero1 x2": Topology(2, ("strategy=deepspeed_zero1", *batch(4))),
    "zero3 x2": Topology(2, ("strategy=deepspeed_zero3", *batch(4))),
    "pipeline x2": Topology(2, (*PIPELINE, "strategy.micro_batches=2", *batch(8))),
    "PP2xDP2": Topology(4, (*PIPELINE, "strategy.micro_batches=2", *batch(4))),
}

# Ten times the largest difference that was seen (four ranks add up in another order than two).
SAME_TO = 4e-6


class Runs:
    """Trainings that are done once and then compared with many; ranks are started when needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Seen] = {}

    def train(self, name: str, topology: Topology, *more: str, **options: Any) -> Path:
        """Trains, once per name; returns the folder of its checkpoints.

        Args:
            options: `resume`, `stop_after`, ... of a Case.
        """
        folder = self.folder / name.replace(" ", "-")
        if name not in self.seen:
            case = Case([*COMMON, *topology.overrides, *more], folder, **options)
            self.seen[name] = ranks.shared(topology.ranks).train(case)
        return folder / "checkpoints"

    def whole(self, name: str) -> Path:
        """All steps under one topology."""
        return self.train(name, TOPOLOGIES[name])

    def resumed(self, before: str, after: str) -> Path:
        """The second half under `after`, from the checkpoint of `before` in the middle."""
        middle = step(self.whole(before), HALF)
        return self.train(f"{before} then {after}", TOPOLOGIES[after], resume=middle)


def step(checkpoints: Path, number: int) -> Path:
    """The checkpoint of a step of the first epoch."""
    return checkpoints / f"epoch_000_step_{number:08d}.ckpt"


def difference(one: Path, other: Path) -> float:
    """The largest difference between two checkpoints' weights, buffers and optimizer states.

    Raises:
        AssertionError: They hold different things, or other hyperparameters.
    """
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    largest = apart(first["state_dict"], second["state_dict"])
    assert len(first["optimizer_states"]) == len(second["optimizer_states"])
    for a, b in zip(first["optimizer_states"], second["optimizer_states"], strict=True):
        assert len(a["param_groups"]) == 2, "two parameter groups"
        assert [sorted_group(g) for g in a["param_groups"]] == [
            sorted_group(g) for g in b["param_groups"]
        ]
        assert a["state"].keys() == b["state"].keys()
        assert a["state"], "there is momentum"
        for name in a["state"]:
            largest = max(largest, apart(a["state"][name], b["state"][name]))
    assert first["lr_schedulers"] == second["lr_schedulers"]
    assert first["global_step"] == second["global_step"]
    return largest


def sorted_group(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": sorted(group["params"])}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(
        float((torch.as_tensor(one[k]).double() - torch.as_tensor(other[k]).double()).abs().max())
        for k in one
    )


def by_position(file: Path, made: Path, keep: bool = False) -> Path:
    """The checkpoint with its optimizer state by position.

    Args:
        keep: distdl's own entry as well, as distdl 0.1 wrote it; else as Lightning writes it.
    """
    found = torch.load(file, weights_only=True)
    if not keep:
        del found["distdl"]
    for state in found["optimizer_states"]:
        names = [name for group in state["param_groups"] for name in group["params"]]
        state["state"] = {names.index(name): held for name, held in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [names.index(name) for name in group["params"]]
    torch.save(found, made)
    return made


def read_by_lightning(file: Path, single: Path) -> None:
    """Reads a checkpoint as a script does that knows nothing of distdl.

    Its optimizer takes state by position, so the names must be in the order of one process.

    Raises:
        AssertionError: They are not.
    """
    import torchvision

    from distdl.models import ImageClassifier

    network = torchvision.models.resnet18(num_classes=10)
    arguments = {"network": network, "num_classes": 10, "norm": "group"}
    module = ImageClassifier.load_from_checkpoint(file, map_location="cpu", **arguments)
    found, one = (torch.load(path, weights_only=True) for path in (file, single))
    assert list(found["state_dict"]) == list(module.state_dict()) == list(one["state_dict"])
    own, (state,) = dict(module.named_parameters()), found["optimizer_states"]
    groups = [g["params"] for g in one["optimizer_states"][0]["param_groups"]]
    assert [g["params"] for g in state["param_groups"]] == groups
    optimizer = torch.optim.SGD([{"params": [own[n] for n in g]} for g in groups], momentum=0.9)
    optimizer.load_state_dict(state)
    assert all(optimizer.state[own[n]].keys() == kept.keys() for n, kept in state["state"].items())

"""Every strategy against every other: what is trained, and how two checkpoints are compared.

All train the same thing: a small network (under `make matrix`: resnet18) with GroupNorm at 32 px,
SGD with momentum and two parameter groups (decayed weights; norms and biases), a global batch of 8.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision

from tests.conftest import RESNET18
from tests.strategies import ranks, small
from tests.strategies.ranks import Case

MATRIX = "DISTDL_MATRIX" in os.environ  # `make matrix`
STEPS = 6
HALF = STEPS // 2
# Several times the largest difference that was seen (four ranks add up in another order than two).
SAME_TO = 4e-6 if MATRIX else 2e-5

WIDE = "model.network._target_=tests.strategies.small.Wide"
LEFT_OUT = ("data.batch_size", "trainer.max_epochs", "callbacks")
COMMON = (
    *(setting for setting in RESNET18 if not setting.startswith(LEFT_OUT)),
    "callbacks=[]",
    "trainer.max_epochs=1",
    f"trainer.max_steps={STEPS}",
    "+trainer.enable_model_summary=false",
    f"checkpoint.every_n_steps={HALF}",
    "checkpoint.keep_last=9",
    "checkpoint.monitor=null",
    *([] if MATRIX else [WIDE]),
)


@dataclass(frozen=True)
class Topology:
    """Ranks, and what they do."""

    ranks: int
    overrides: tuple[str, ...]

    def plus(self, *overrides):
        return Topology(self.ranks, (*self.overrides, *overrides))


def batch(size, accumulate=1):
    return f"data.batch_size={size}", f"trainer.accumulate_grad_batches={accumulate}"


def two(strategy, *overrides):
    units = ("strategy.min_parameters=500",) if strategy == "fsdp" else ()  # more than one
    return Topology(2, (f"strategy={strategy}", *units, *(overrides or batch(4))))


def staged(count, rows, micro_batches, *overrides, repeat=1):
    """`count` ranks in pipelines of two stages; `repeat` batches before the optimizer steps."""
    pipeline = ("strategy=pipeline", "strategy.stages=2", "strategy.balance=parameters")
    micro = f"strategy.micro_batches={micro_batches}"
    return Topology(count, (*pipeline, micro, *batch(rows, repeat), *overrides))


MESHED = "model._target_=tests.strategies.small.Meshed"


def mesh(groups, ranks, *overrides):
    """Groups of ranks that divide layers among them."""
    sizes = f"strategy.data_parallel_size={groups}", f"strategy.tensor_parallel_size={ranks}"
    own = ("strategy=model_parallel", *sizes, MESHED, WIDE)
    return Topology(groups * ranks, (*own, *(overrides or batch(8 // groups))))


TOPOLOGIES = {
    # Two micro-batches of 4, as two ranks have them.
    "single": Topology(1, ("strategy=single", *batch(4, 2))),
    "ddp x2": two("ddp"),
    "fsdp x2": two("fsdp"),
    "zero1 x2": two("deepspeed_zero1"),
    "zero3 x2": two("deepspeed_zero3"),
    "pipeline x2": staged(2, 8, 2),
    "PP2xDP2": staged(4, 4, 2),
}


class Runs:
    """Trainings that are done once and then compared with many; ranks are started when needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = {}

    def train(self, name, topology=None, **options):
        """Trains, once per name; returns the folder of its checkpoints. `options` are a Case's."""
        folder = self._folder(name)
        topology = topology or TOPOLOGIES[name]
        if name not in self.seen:
            case = Case([*COMMON, *topology.overrides], folder, **options)
            self.seen[name] = ranks.shared(topology.ranks).train(case)
        return folder / "checkpoints"

    def end_file(self):
        """Deletes what only the tests of one file compare: `make matrix` has 45 GB of it."""
        for name in self.seen.keys() - TOPOLOGIES.keys():
            del self.seen[name]
            shutil.rmtree(self._folder(name))

    def _folder(self, name):
        return self.folder / name.replace(" ", "-")


def step(checkpoints, number=STEPS):
    """The checkpoint of a step of the first epoch."""
    return checkpoints / f"epoch_000_step_{number:08d}.ckpt"


def read(path):
    return torch.load(path, weights_only=True)


def difference(one, other):
    """The largest between weights, averages and optimizer states; all else must be equal, and names
    in the same order: Lightning alone takes optimizer state by position."""
    first, second = read(one), read(other)
    assert list(first["state_dict"]) == list(second["state_dict"])
    parts = [(first[key], second[key]) for key in ("state_dict", "current_model_state")
             if key in first or key in second]  # fmt: skip
    for a, b in zip(first["optimizer_states"], second["optimizer_states"], strict=True):
        assert len(a["param_groups"]) == 2, "two parameter groups"
        assert a["param_groups"] == b["param_groups"]
        assert a["state"].keys() == b["state"].keys()
        assert a["state"], "there is momentum"
        parts += [(a["state"][name], b["state"][name]) for name in a["state"]]
    for key in ("lr_schedulers", "global_step"):
        assert first[key] == second[key]
    return max(apart(a, b) for a, b in parts)


def apart(one, other):
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    pairs = ((torch.as_tensor(one[k]).double(), torch.as_tensor(other[k]).double()) for k in one)
    return max(float((a - b).abs().max()) for a, b in pairs)


def by_position(file, target, keep):
    """The checkpoint with its optimizer state by position, as Lightning writes it, or (`keep`)
    distdl 0.1 with its own entry."""
    saved = read(file)
    if not keep:
        del saved["distdl"]
    for state in saved["optimizer_states"]:
        names = [name for group in state["param_groups"] for name in group["params"]]
        state["state"] = {names.index(name): held for name, held in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [names.index(name) for name in group["params"]]
    torch.save(saved, target)
    return target


def network(classes=10):
    kind = torchvision.models.resnet18 if MATRIX else small.Wide
    return kind(num_classes=classes, zero_init_residual=False)

"""`python -m distdl convert CHECKPOINT --to STRATEGY|weights`: a checkpoint in another form.

Every strategy reads and writes one portable file (docs/strategies/checkpoints.md), so a resume
under another strategy needs no conversion. This makes that file out of the folders that FSDP and
DeepSpeed write, or weights for other programs, and compares what it wrote with what it read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distdl import checkpoint as checkpoints
from distdl import formats, portable
from distdl.errors import Problem, UserError

WEIGHTS = "weights"
STRATEGIES = (
    *("single", "ddp", "fsdp", "pipeline", "deepspeed_zero1", "deepspeed_zero2"),
    *("deepspeed_zero3", "deepspeed_offload", "local_sgd"),
)
# What of a checkpoint is neither weights nor optimizer state, and how people call it.
PARTS = {
    "lr_schedulers": "schedulers",
    "loops": "loops",
    "callbacks": "callbacks (EMA)",
    "current_model_state": "weights behind the average (EMA)",
    "distdl": "position in the data",
}


def main(argv: Sequence[str]) -> int:
    """Writes one file, and says what in it is equal to the source.

    Raises:
        UserError: The source cannot be read, or the target is there already.
    """
    parser = argparse.ArgumentParser("python -m distdl convert", description=__doc__)
    parser.add_argument("checkpoint", help="a file, a run directory, FSDP's or DeepSpeed's folder")
    parser.add_argument("--to", required=True, choices=(*STRATEGIES, WEIGHTS))
    parser.add_argument("--world-size", type=int, help="check that the batch divides by it")
    parser.add_argument("--output", type=Path, help=".ckpt; of weights .pth or .safetensors")
    options = parser.parse_args(argv)
    source = checkpoints.find(options.checkpoint)
    target = options.output or default_target(source, options.to)
    if target.exists():
        raise UserError(Problem("--output", f"{target} exists", "name another: --output FILE"))
    found = formats.read(source)
    if options.to == WEIGHTS:
        weights = plain_weights(found["state_dict"])
        write_weights(weights, target)
        compared = {"weights": compare(weights, formats.read(target)["state_dict"], WEIGHTS)}
    else:
        fits(found, source, options.world_size)
        store = checkpoints.CheckpointStore(target.parent)
        torch.save(found, store.temporary(target.name))
        store.publish(target.name, step=found.get("global_step"), converted_from=str(source))
        compared = compare_all(found, formats.read(target))
    print(f"{source} -> {target}")
    for part, count in compared.items():
        print(f"  equal: {part}{f', {count} tensors' if count else ''}")
    if options.to != WEIGHTS:
        print_use(found, target, options.to, options.world_size)
    return 0


def default_target(source: Path, to: str) -> Path:
    """In the current folder: among a run's checkpoints it would be taken for one of the run's."""
    named = source.name.removesuffix(source.suffix) or source.name
    return Path(f"{named}.pth" if to == WEIGHTS else f"{named}-{to}.ckpt")


def fits(found: Mapping[str, Any], source: Path, world_size: int | None) -> None:
    """Refuses what no training can go on from.

    Raises:
        UserError: It holds weights only, or the global batch does not divide by `world_size`.
    """
    if "optimizer_states" not in found:
        raise UserError(
            Problem(
                str(source),
                "holds weights and no state of a training",
                f"start a training from them: model.weights={source}",
            )
        )
    batch = (found.get("distdl") or {}).get("global_batch_size")
    if world_size is not None and (world_size < 1 or (batch and batch % world_size)):
        raise UserError(
            Problem(
                "--world-size",
                f"the global batch of {batch} does not divide by {world_size}",
                "choose one that divides it, or resume with another data.batch_size",
            )
        )


def print_use(found: Mapping[str, Any], target: Path, to: str, world_size: int | None) -> None:
    states = found["optimizer_states"]
    if not all(portable.is_named(state) for state in states):
        print(
            "  note: its optimizer state is keyed by position, as distdl 0.1 and Lightning write "
            "it: it fits a model with the same parameter groups"
        )
    size = f" trainer.devices={world_size}" if world_size else ""
    print(f"  use: python -m distdl ... strategy={to}{size} checkpoint.resume_from={target}")


def plain_weights(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The network's own weights: without the name that our classifier has put before them."""
    prefix = "network."
    if all(name.startswith(prefix) for name in state):
        return {name.removeprefix(prefix): value for name, value in state.items()}
    return dict(state)


def write_weights(weights: dict[str, torch.Tensor], target: Path) -> None:
    if target.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in weights.items()}, target)
    else:
        torch.save(weights, target)


def compare_all(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """How many tensors of each part are equal, after making sure that all of it is."""
    weights, statistics = split(before["state_dict"])
    compared = {"weights": compare(weights, split(after["state_dict"])[0], "weights")}
    if statistics:
        label = "batch norm statistics"
        compared[label] = compare(statistics, split(after["state_dict"])[1], label)
    label = "optimizer state"
    compared[label] = compare(before["optimizer_states"], after["optimizer_states"], label)
    for key, label in PARTS.items():
        if key in before:
            compared[label] = compare(before[key], after[key], label)
    rest = before.keys() - {"state_dict", "optimizer_states", *PARTS}
    compared["everything else"] = sum(compare(before[k], after[k], k) for k in sorted(rest))
    return compared


def split(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, and the running statistics of batch norm."""
    last = ("running_mean", "running_var", "num_batches_tracked")
    statistics = {k: v for k, v in state.items() if k.rpartition(".")[2] in last}
    return {k: v for k, v in state.items() if k not in statistics}, statistics


def compare(before: Any, after: Any, path: str) -> int:
    """Counts the tensors in two nested containers that are equal in every bit.

    Raises:
        RuntimeError: Something differs; says where.
    """
    if isinstance(before, torch.Tensor):
        same = isinstance(after, torch.Tensor) and before.dtype == after.dtype
        # By their bytes: NaN equals itself, and 0.0 is not -0.0.
        if not same or before.shape != after.shape or not torch.equal(raw(before), raw(after)):
            raise RuntimeError(f"what was written differs from what was read: {path}")
        return 1
    if isinstance(before, Mapping):
        if not isinstance(after, Mapping) or before.keys() != after.keys():
            raise RuntimeError(f"what was written has other keys: {path}")
        return sum(compare(before[k], after[k], f"{path}.{k}") for k in before)
    if isinstance(before, list | tuple):
        if not isinstance(after, list | tuple) or len(before) != len(after):
            raise RuntimeError(f"what was written has another length: {path}")
        pairs = enumerate(zip(before, after, strict=True))
        return sum(compare(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
    if before != after and not (before is after or before != before):
        raise RuntimeError(f"what was written differs from what was read: {path}")
    return 0


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

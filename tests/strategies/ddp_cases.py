"""What two ranks do under ddp and local_sgd; four tests of this folder look at it."""

from __future__ import annotations

import copy
import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from distdl.callbacks.count_traffic import CountTraffic
from distdl.callbacks.trace import Trace
from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.drifting import average_
from distdl.strategies.local_sgd import LocalSGDStrategy
from tests.strategies import own_steps
from tests.strategies.small import (
    Small,
    bytes_of,
    checksum,
    flat,
    loader,
    shard,
    trainer,
)

SMALL_BUCKETS = 0.03  # MiB: several of them


class Saves(Callback):
    """Writes a checkpoint after one step, as our Checkpointer does."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Thawed(Small):
    """Trains its convolution from the fourth batch on, as BackboneFinetuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.network[0].requires_grad_(True)


class Written(Callback):
    """What the kernel saw this process write in the counted steps: gloo's sockets."""

    def __init__(self, skip: int) -> None:
        self.skip, self.bytes, self.batches = skip, 0, 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        torch.distributed.barrier()
        self.before = written()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step > self.skip:
            self.bytes += written() - self.before
            self.batches += 1


def written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    logging.disable(logging.WARNING)
    yield from ddp(folder)
    yield from local(folder)
    yield from own_steps.cases(folder)


def ddp(folder: Path) -> Iterator[tuple[str, Any]]:
    hooks: dict[str, dict[str, Any]] = {
        "none": {},
        "none_again": {"bucket_cap_mb": SMALL_BUCKETS},
        "bf16": {"comm_hook": "bf16"},
        "fp16": {"comm_hook": "fp16"},
        "powersgd": {
            "comm_hook": "powersgd",
            "hook_start_step": 2,
            "bucket_cap_mb": SMALL_BUCKETS,
        },
        "post_local_sgd": {
            "comm_hook": "post_local_sgd",
            "hook_start_step": 2,
            "average_every": 3,
        },
        "static_graph": {"static_graph": True, "gradient_as_bucket_view": True},
    }
    for name, options in hooks.items():
        yield f"ddp_{name}", train(DDPStrategy(**options), folder)
    yield "ddp_thawed", train(DDPStrategy(), folder, Thawed())
    yield "ddp_batch_norm", train(DDPStrategy(), folder, Small(batch_norm=True))
    yield "search", search(folder)
    yield "trace", traced(folder)
    # post_local_sgd: a checkpoint between two averages.
    for name in ("post_local_sgd", "powersgd"):
        yield f"resume_{name}", resumed(lambda name=name: DDPStrategy(**hooks[name]), folder)


def train(
    strategy: Any, folder: Path, module: Small | None = None, steps: int = 8, counted: bool = True
) -> dict[str, Any]:
    module = module or Small()
    traffic, wire = CountTraffic(skip_steps=2), Written(skip=2)
    # Lightning calls them in this order: the barrier of the second comes before the first counts.
    fitted = trainer(strategy, steps, folder, [wire, traffic] if counted else [])
    fitted.fit(module, loader())
    parameters, buffers = bytes_of(module)
    return {
        "losses": module.losses,
        "weights": flat(module)[:2000].tolist(),
        "checksum": checksum(module),
        "parameters": parameters,
        "buffers": buffers,
        "traffic": traffic.per_step() if counted else None,
        "written": wire.bytes / max(1, wire.batches),
        "finite": bool(flat(module).isfinite().all()),
    }


def traced(folder: Path) -> list[str]:
    """Names of the collectives in this rank's Chrome trace."""
    trainer(DDPStrategy(), 5, folder, [Trace(skip_batches=2, batches=2)]).fit(Small(), loader())
    rank = torch.distributed.get_rank()
    text = gzip.decompress((folder / "logs" / f"trace-rank{rank}.json.gz").read_bytes())
    events = json.loads(text)["traceEvents"]
    return [e["name"] for e in events if e["name"].startswith("gloo:") and e.get("ph") == "X"]


def search(folder: Path) -> dict[str, Any]:
    """Sizes that fit the small network, and few steps each."""
    from distdl.strategies import bucket_search

    with (
        patch.object(bucket_search, "SIZES_MB", (SMALL_BUCKETS,)),
        patch.object(bucket_search, "STEPS", 3),
    ):
        strategy = DDPStrategy(bucket_cap_mb="auto")
        found = train(strategy, folder, steps=8, counted=False)
    assert strategy._search is not None
    return {**found, "tried": list(strategy._search.seconds), "chosen": strategy._search.size}


def local(folder: Path) -> Iterator[tuple[str, Any]]:
    yield "every_step", train(LocalSGDStrategy(sync_every=1), folder, Small(momentum=0.0))
    yield "ddp_plain_sgd", train(DDPStrategy(), folder, Small(momentum=0.0))
    for outer in ("average", "nesterov"):
        make = {"sync_every": 3, "outer": outer}
        yield f"local_{outer}", train(LocalSGDStrategy(**make), folder, steps=8)
        yield f"by_hand_{outer}", by_hand(outer, steps=8, every=3)
        yield f"resume_{outer}", resumed(lambda make=make: LocalSGDStrategy(**make), folder)
    yield (
        "local_every_2",
        train(LocalSGDStrategy(sync_every=2), folder, Small(batch_norm=True), steps=10),
    )
    yield (
        "local_every_4",
        train(LocalSGDStrategy(sync_every=4), folder, Small(batch_norm=True), steps=10),
    )
    yield "validation", validated(folder)
    yield "to_ddp", to_another(folder)
    yield "average", averaged()


def by_hand(outer: str, steps: int, every: int) -> dict[str, Any]:
    """Two workers in one process, as in algorithm 1 of the papers, and no distdl."""
    workers = [Small(), Small()]
    last = copy.deepcopy(workers[0])
    inner = [worker.configure_optimizers() for worker in workers]
    momentum = [torch.zeros_like(p) for p in last.parameters()]
    for step in range(steps):
        for rank, worker in enumerate(workers):
            images, labels = shard(rank)[step * 4 : (step + 1) * 4]
            loss = nn.functional.cross_entropy(worker.network(images), labels)
            inner[rank].zero_grad()
            loss.backward()
            inner[rank].step()
        if (step + 1) % every and step + 1 < steps:
            continue
        with torch.no_grad():
            for i, old in enumerate(last.parameters()):
                mine = [list(worker.parameters())[i] for worker in workers]
                mean = (mine[0] + mine[1]) / 2
                new = mean
                if outer == "nesterov":
                    delta = old - mean
                    momentum[i] = 0.9 * momentum[i] + delta
                    new = old - 0.7 * (delta + 0.9 * momentum[i])
                old.copy_(new)
                for parameter in mine:
                    parameter.copy_(new)
    return {"weights": flat(last)[:2000].tolist(), "checksum": checksum(last)}


def resumed(make: Any, folder: Path) -> dict[str, Any]:
    """Seven steps with a checkpoint after the fourth, and three steps that go on from it."""
    path = folder / "middle.ckpt"
    whole = Small()
    fitted = trainer(make(), 7, folder, [Saves(4, path)])
    fitted.fit(whole, loader())
    torch.distributed.barrier()
    saved = torch.load(path, weights_only=True)
    rest = Small()
    again = trainer(make(), 7, folder)
    again.fit(rest, loader(skip=4), ckpt_path=path, weights_only=True)
    return {
        "whole": whole.losses[4:],
        "rest": rest.losses,
        "whole_checksum": checksum(whole),
        "rest_checksum": checksum(rest),
        "keys": sorted(saved),
        "named": sorted(saved["optimizer_states"][0]["state"])[:1],
        "momentum": sorted((saved.get("local_sgd") or {}).get("momentum", {})),
        "names": sorted(name for name, _ in rest.named_parameters()),
    }


def validated(folder: Path) -> dict[str, Any]:
    """A validation between two meetings, with a moving average of the weights."""
    module, ema = Small(batch_norm=True), EMAWeightAveraging(decay=0.5)
    options = {"limit_val_batches": 1, "val_check_interval": 5, "check_val_every_n_epoch": None}
    fitted = trainer(LocalSGDStrategy(sync_every=4), 6, folder, [ema], **options)
    # The same sample everywhere: only the weights may differ.
    fitted.fit(module, loader(), loader(rank=0))
    return {"seen": module.seen_in_validation, "end": checksum(module)}


def to_another(folder: Path) -> dict[str, Any]:
    """A checkpoint of local_sgd, with its outer momentum, opened under ddp."""
    path = folder / "local.ckpt"
    first = Small()
    strategy = LocalSGDStrategy(sync_every=3, outer="nesterov")
    trainer(strategy, 4, folder, [Saves(4, path)]).fit(first, loader())
    torch.distributed.barrier()
    second = Small()
    fitted = trainer(DDPStrategy(), 6, folder)
    fitted.fit(second, loader(skip=4), ckpt_path=path, weights_only=True)
    return {"steps": fitted.global_step, "losses": second.losses, "end": checksum(second)}


def averaged() -> dict[str, Any]:
    """Tensors of several types and layouts, more than a bucket holds."""
    from distdl.strategies import drifting

    rank = torch.distributed.get_rank()
    images = torch.full((2, 3, 4, 4), float(rank)).contiguous(memory_format=torch.channels_last)
    half, single = torch.full((5,), 2.0 * rank, dtype=torch.bfloat16), torch.tensor(float(rank))
    before, drifting.BUCKET_BYTES = drifting.BUCKET_BYTES, 100
    try:
        handed = average_([images, half, single])
    finally:
        drifting.BUCKET_BYTES = before
    return {
        "values": [images.unique().tolist(), half.unique().tolist(), float(single)],
        "channels_last": images.is_contiguous(memory_format=torch.channels_last),
        "handed": handed,
    }

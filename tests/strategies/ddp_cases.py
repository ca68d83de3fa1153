"""What two ranks do under ddp and local_sgd; test_ddp and test_traffic look at it."""

import copy
import gzip
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging

from distdl.callbacks.count_traffic import CountTraffic
from distdl.callbacks.trace import Trace
from distdl.strategies import bucket_search, drifting
from distdl.strategies.ddp import DDPStrategy
from distdl.strategies.local_sgd import LocalSGDStrategy
from tests.strategies import own_steps
from tests.strategies.small import Small, checksum, flat, loader, shard, trainer

SMALL_BUCKETS = 0.03  # MiB: several of them
HOOKS: dict[str, dict[str, Any]] = {
    "none": {},
    "none_again": {"bucket_cap_mb": SMALL_BUCKETS},
    "bf16": {"comm_hook": "bf16"},
    "fp16": {"comm_hook": "fp16"},
    "powersgd": {"comm_hook": "powersgd", "hook_start_step": 2, "bucket_cap_mb": SMALL_BUCKETS},
    "post_local": {"comm_hook": "post_local_sgd", "hook_start_step": 2, "average_every": 3},
    "static_graph": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Saves(Callback):
    """Writes a checkpoint after one step, as our Checkpointer does."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Thawed(Small):
    """Trains its convolution from the fourth batch on, as BackboneFinetuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx) -> None:
        if batch_idx == 3:
            self.network[0].requires_grad_(True)


class Written(Callback):
    """What the kernel saw this process write in the counted steps: gloo's sockets."""

    def __init__(self, skip: int) -> None:
        self.skip, self.bytes, self.batches = skip, 0, 0

    def now(self) -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["wchar"])

    def on_train_batch_start(self, *args) -> None:
        torch.distributed.barrier()
        self.before = self.now()

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step > self.skip:
            self.bytes += self.now() - self.before
            self.batches += 1


def cases(folder):
    logging.disable(logging.WARNING)
    for name, options in HOOKS.items():
        yield f"ddp_{name}", train(DDPStrategy(**options), folder)
    yield "ddp_thawed", train(DDPStrategy(), folder, Thawed())
    yield "ddp_batch_norm", train(DDPStrategy(), folder, Small(batch_norm=True))
    yield "search", search(folder)
    yield "trace", traced(folder)
    for name in ("post_local", "powersgd"):  # post_local: a checkpoint between two averages
        yield f"resume_{name}", resumed(partial(DDPStrategy, **HOOKS[name]), folder)
    yield "every_step", train(LocalSGDStrategy(sync_every=1), folder, Small(momentum=0.0))
    yield "ddp_plain_sgd", train(DDPStrategy(), folder, Small(momentum=0.0))
    for outer in ("average", "nesterov"):
        make = partial(LocalSGDStrategy, sync_every=3, outer=outer)
        yield f"local_{outer}", train(make(), folder)
        yield f"by_hand_{outer}", by_hand(outer, steps=8, every=3)
        yield f"resume_{outer}", resumed(make, folder)
    for every in (2, 4):
        strategy = LocalSGDStrategy(sync_every=every)
        yield f"local_{every}", train(strategy, folder, Small(batch_norm=True), steps=10)
    yield "validation", validated(folder)
    yield "to_ddp", to_ddp(folder)
    yield "average", averaged()
    yield from own_steps.cases(folder)


def train(strategy, folder, module=None, steps=8, counted=True):
    module = module or Small()
    traffic, wire = CountTraffic(skip_steps=2), Written(skip=2)
    # Lightning calls them in this order: the barrier of the second comes before the first counts.
    trainer(strategy, steps, folder, [wire, traffic] if counted else []).fit(module, loader())
    weights = flat(module)
    return {
        "losses": module.losses,
        "weights": weights[:2000].tolist(),
        "checksum": checksum(module),
        "parameters": 4 * len(weights),
        "buffers": sum(b.numel() * b.element_size() for b in module.buffers()),
        "traffic": traffic.per_step() if counted else None,
        "written": wire.bytes / max(1, wire.batches),
        "finite": bool(weights.isfinite().all()),
    }


def traced(folder):
    """Names of the collectives in this rank's Chrome trace."""
    trainer(DDPStrategy(), 5, folder, [Trace(skip_batches=2, batches=2)]).fit(Small(), loader())
    rank = torch.distributed.get_rank()
    text = gzip.decompress((folder / "logs" / f"trace-rank{rank}.json.gz").read_bytes())
    events = json.loads(text)["traceEvents"]
    return [e["name"] for e in events if e["name"].startswith("gloo:") and e.get("ph") == "X"]


def search(folder):
    """Sizes that fit the small network, and few steps each."""
    strategy = DDPStrategy(bucket_cap_mb="auto")
    with patch.multiple(bucket_search, SIZES_MB=(SMALL_BUCKETS,), STEPS=3):
        result = train(strategy, folder, counted=False)
    return {**result, "tried": list(strategy.search.seconds), "chosen": strategy.search.size}


@torch.no_grad()
def by_hand(outer, steps, every):
    """Two workers in one process, as in algorithm 1 of the papers, and no distdl."""
    workers = [Small(), Small()]
    last = copy.deepcopy(workers[0])
    inner = [worker.configure_optimizers() for worker in workers]
    momentum = [torch.zeros_like(p) for p in last.parameters()]
    for step in range(steps):
        for rank, worker in enumerate(workers):
            images, labels = shard(rank)[step * 4 : (step + 1) * 4]
            inner[rank].zero_grad()
            with torch.enable_grad():
                torch.nn.functional.cross_entropy(worker.network(images), labels).backward()
            inner[rank].step()
        if (step + 1) % every and step + 1 < steps:
            continue
        parameters = zip(last.parameters(), *(w.parameters() for w in workers), strict=True)
        for i, (old, one, two) in enumerate(parameters):
            new = (one + two) / 2
            if outer == "nesterov":
                delta = old - new
                momentum[i] = 0.9 * momentum[i] + delta
                new = old - 0.7 * (delta + 0.9 * momentum[i])
            for parameter in (old, one, two):
                parameter.copy_(new)
    return {"weights": flat(last)[:2000].tolist(), "checksum": checksum(last)}


def saved_after_four(strategy, steps, path):
    module = Small()
    trainer(strategy, steps, path.parent, [Saves(4, path)]).fit(module, loader())
    torch.distributed.barrier()
    return module


def continued(strategy, steps, path):
    module = Small()
    fitted = trainer(strategy, steps, path.parent)
    fitted.fit(module, loader(skip=4), ckpt_path=path, weights_only=True)
    return module, fitted.global_step


def resumed(make, folder):
    """Seven steps with a checkpoint after the fourth, and three steps that resume from it."""
    path = folder / "middle.ckpt"
    whole = saved_after_four(make(), 7, path)
    saved = torch.load(path, weights_only=True)
    rest, _ = continued(make(), 7, path)
    return {
        "whole": [whole.losses[4:], checksum(whole)],
        "rest": [rest.losses, checksum(rest)],
        "keys": sorted(saved),
        "named": sorted(saved["optimizer_states"][0]["state"])[:1],
        "momentum": sorted((saved.get("local_sgd") or {}).get("momentum", {})),
        "names": sorted(name for name, _ in rest.named_parameters()),
    }


def validated(folder):
    """A validation between two meetings, with a moving average of the weights."""
    module, ema = Small(batch_norm=True), EMAWeightAveraging(decay=0.5)
    options = {"limit_val_batches": 1, "val_check_interval": 5, "check_val_every_n_epoch": None}
    fitted = trainer(LocalSGDStrategy(sync_every=4), 6, folder, [ema], **options)
    # The same sample everywhere: only the weights may differ.
    fitted.fit(module, loader(), loader(rank=0))
    return {"seen": module.validated, "end": checksum(module)}


def to_ddp(folder):
    """A checkpoint of local_sgd, with its outer momentum, opened under ddp."""
    path = folder / "local.ckpt"
    saved_after_four(LocalSGDStrategy(sync_every=3, outer="nesterov"), 4, path)
    module, steps = continued(DDPStrategy(), 6, path)
    return {"steps": steps, "losses": module.losses, "end": checksum(module)}


def averaged():
    """Tensors of several types and layouts, more than a bucket holds."""
    rank = float(torch.distributed.get_rank())
    images = torch.full((2, 3, 4, 4), rank).contiguous(memory_format=torch.channels_last)
    half, single = torch.full((5,), 2 * rank, dtype=torch.bfloat16), torch.tensor(rank)
    with patch.object(drifting, "BUCKET_BYTES", 100):
        handed = drifting.average_([images, half, single])
    return {
        "values": [images.unique().tolist(), half.unique().tolist(), float(single)],
        "channels_last": images.is_contiguous(memory_format=torch.channels_last),
        "handed": handed,
    }

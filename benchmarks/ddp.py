"""DDP of two gloo ranks: `strategy=ddp` against a loop as one writes it for torchrun.

A ResNet-18 on synthetic images of 32 px, SGD with momentum, one thread a rank. Three arms in turn,
in one pair of processes: the loop by hand, the same once more (A/A), and distdl's real worker with
its metrics, log lines, journal and checkpoints. What is timed are the training steps after the
warm-up, with fetching their batches. It needs a core per rank that does nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.nn import functional as F

from benchmarks import pair, runs
from benchmarks.pair import RANKS
from benchmarks.table import Result, against_itself, row

BATCH, SIZE, CLASSES, POOL = 8, 32, 10, 256
WARM_UP, STEPS, REPEATS, LOG_EVERY = 2, 10, 7, 5
HAND, AGAIN, OURS = "by hand", "by hand, again", "distdl"


class Clock(Callback):
    """Seconds from the end of the warm-up to the end of the last step."""

    seconds = 0.0

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.started = warm_up, 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if batch_idx + 1 == self.warm_up:
            self.started = now
        Clock.seconds = now - self.started


def by_hand(steps: int, warm_up: int = WARM_UP, batch: int = BATCH) -> float:
    """Seconds of `steps` steps of the usual script: sampler, loader, DDP, SGD, a line now and then.

    Needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from torchvision.models import resnet18

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES, zero_init_residual=True)
    model = model.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.randint(0, 256, (POOL, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (POOL,))
    # As many as the steps take, from the pool, as distdl's synthetic images do.
    places = torch.arange((warm_up + steps) * batch * dist.get_world_size()) % POOL
    dataset = TensorDataset(images[places], labels[places])
    loader = DataLoader(dataset, batch, sampler=DistributedSampler(dataset))
    mean = torch.tensor([123.675, 116.28, 103.53]).view(1, 3, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375]).view(1, 3, 1, 1)
    ddp.train()
    started = 0.0
    for step, (x, y) in enumerate(loader, 1):
        x = ((x.float() - mean) / std).contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step == warm_up:
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    return seconds


def lay_out(folder: Path, steps: int) -> Path:
    """A run of distdl that does the same, for the ranks to work on."""
    run = runs.lay_out(
        folder,
        *("model=resnet18", "data=synthetic", f"data.image_size={SIZE}", f"data.pool_size={POOL}"),
        *(f"data.num_classes={CLASSES}", f"data.batch_size={BATCH}", "schedule.warmup_epochs=0"),
        f"data.train_samples={(WARM_UP + steps) * BATCH * RANKS}",
        *("strategy=ddp", "trainer.accelerator=cpu", f"trainer.devices={RANKS}"),
        *("trainer.max_epochs=1", "trainer.limit_val_batches=0", "tracking=none"),
        f"trainer.log_every_n_steps={LOG_EVERY}",
        *("+callbacks.clock._target_=benchmarks.ddp.Clock", f"+callbacks.clock.warm_up={WARM_UP}"),
    )
    return run.path


def by_distdl(path: str) -> float:
    """The rank's share of a run that `lay_out` made."""
    from distdl.run_directory import RunDirectory

    runs.work(RunDirectory(Path(path)))
    return Clock.seconds


def rank_main(path: str) -> None:
    """One rank: all arms in turn, each in a process group of its own."""
    plan = json.loads(Path(path).read_text())
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ports = iter(plan["ports"])
    arms: dict[str, Callable[[str], float]] = {
        HAND: lambda _: by_hand(plan["steps"]),
        AGAIN: lambda _: by_hand(plan["steps"]),
        OURS: by_distdl,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number, run in enumerate(plan["runs"]):
        for name, arm in arms.items():
            os.environ["MASTER_PORT"] = str(next(ports))
            seconds = arm(run)
            if number:  # the first imports and fills caches
                times[name].append(BATCH * RANKS * plan["steps"] / seconds)
    if os.environ["RANK"] == "0":
        Path(plan["result"]).write_text(json.dumps(times))


def measured(repeats: int, steps: int) -> dict[str, list[float]]:
    """Images per second of both ranks, for each arm and round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        plan = {
            "runs": [str(lay_out(folder / "runs", steps)) for _ in range(repeats + 1)],
            "ports": pair.free_ports(3 * (repeats + 1)),
            "steps": steps,
            "result": str(folder / "times.json"),
        }
        pair.start("import sys; from benchmarks import ddp; ddp.rank_main(sys.argv[1])", plan)
        found: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
        return found


def main(repeats: int = REPEATS, steps: int = STEPS) -> Result:
    rates = measured(repeats, steps)
    hand, ours = (statistics.median(rates[name]) for name in (HAND, OURS))
    return Result(
        title=f"DDP of {RANKS} gloo ranks, ResNet-18 at {SIZE} px, {BATCH} images a rank (img/s)",
        what="DDP of 2 gloo ranks, resnet18, img/s against a hand-written torchrun DDP loop",
        competitor="a DDP loop as one writes it for torchrun, same model, batch and optimizer",
        goal="at least 0.99",
        ratio=ours / hand,
        same=against_itself(rates[HAND], rates[AGAIN]),
        rows=[row(name, values, "img/s") for name, values in rates.items()],
        command="python -m benchmarks.run ddp",
        notes=f"Both log every {LOG_EVERY} steps; distdl averages the loss over the ranks then, "
        "and the loop prints that of rank 0.",
    )

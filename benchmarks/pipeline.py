"""Two stages against one process, and against an equal-layer split by hand.

Three arms, interleaved in one pair of processes with one thread each: a plain loop over the
micro-batches on rank 0 alone; `torch.distributed.pipelining` by hand, half of the residual blocks
on each rank, 1F1B; `strategy=pipeline` under Lightning's Trainer, cut by measured cost, 1F1B. All
train the same ResNet-50 on the same batch with SGD, in torch's default memory format, since what is
sent by hand must be contiguous. It needs a core per stage that does nothing else.

Two sizes, since one cannot show both. At 128 px the residual blocks cost about the same, a split
into equal halves exists, and the step can be held against the ideal (by hand the halves are the
same ones). At 64 px the last blocks, bound by their weights, cost most: an equal-layer split waits
for them, and no cut between blocks is better than about 57 : 43, so that nobody reaches the ideal.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.table import Goal, Result, row

STAGES, MICRO_BATCHES, ROWS, CLASSES = 2, 8, 32, 1000
EVEN, UNEVEN = 128, 64  # pixels
STEPS, WARM_UP, REPEATS = 2, 1, 5


def network() -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    return resnet50()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, size, size, generator=generator)
    return images, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def timed(step: Callable[[], Any]) -> list[float]:
    taken = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        step()
        taken.append(time.perf_counter() - started)
    return taken[WARM_UP:]


def one_process(rank: int, size: int) -> list[float]:
    """Rank 0 alone; the other rank is idle."""
    if rank:
        return []
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, labels = batch(size)

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            (F.cross_entropy(model(x), y) / MICRO_BATCHES).backward()
        optimizer.step()

    return timed(step)


def by_hand(rank: int, size: int) -> list[float]:
    """As torch's tutorial has it: the layers in two halves, stage and schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    net: Any = network()
    residual = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    half = len(residual) // 2
    halves = (
        nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, *residual[:half]),
        nn.Sequential(*residual[half:], net.avgpool, nn.Flatten(1), net.fc),
    )
    optimizer = torch.optim.SGD(halves[rank].parameters(), 0.01, momentum=0.9)
    stage = PipelineStage(halves[rank], rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    images, labels = batch(size)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(images) if rank == 0 else schedule.step(target=labels)
        optimizer.step()

    return timed(step)


def by_distdl(rank: int, size: int) -> list[float]:
    """`strategy=pipeline` as a worker runs it, logging and metrics left out on all sides."""
    from lightning.pytorch import Callback, LightningDataModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from distdl import cluster, environment
    from distdl.models import ImageClassifier
    from distdl.strategies import PipelineStrategy

    class Classifier(ImageClassifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            images, labels = batch(size)
            rows = TensorDataset(images, labels)
            copies = torch.utils.data.ConcatDataset([rows] * (WARM_UP + STEPS))
            return DataLoader(copies, ROWS)

    class Clock(Callback):
        def __init__(self) -> None:
            self.taken: list[float] = []

        def on_train_epoch_start(self, *_: Any) -> None:
            self.last = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            now = time.perf_counter()
            self.taken.append(now - self.last)
            self.last = now

    clock = Clock()
    here = environment.resolve()
    trainer = Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=PipelineStrategy(micro_batches=MICRO_BATCHES),
        plugins=[cluster.LaunchedEnvironment(here)],
        callbacks=[clock],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Classifier(network(), CLASSES, channels_last=False), datamodule=Data())
    return clock.taken[WARM_UP:]


ARMS = {"one process": one_process, "by hand": by_hand, "distdl": by_distdl}


def named(arm: str, size: int) -> str:
    return f"{arm}, {size} px"


def rank_main(path: str) -> None:
    """One rank: all arms, one after the other, several times."""
    import torch.distributed as dist

    from distdl import cluster, environment

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    here = environment.resolve()
    cluster.connect(here, "cpu")
    times: dict[str, list[float]] = {named(a, s): [] for s in (EVEN, UNEVEN) for a in ARMS}
    for _ in range(REPEATS):
        for size in (EVEN, UNEVEN):
            for name, arm in ARMS.items():
                dist.barrier()
                taken = arm(here.rank, size)
                if taken:
                    times[named(name, size)].append(statistics.median(taken))
    if here.rank == 0:
        Path(path).write_text(json.dumps(times))
    cluster.disconnect()


def measured() -> dict[str, list[float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        ranks = []
        for rank in range(STAGES):
            own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
            size = {"WORLD_SIZE": STAGES, "LOCAL_WORLD_SIZE": STAGES, "MASTER_ADDR": "127.0.0.1"}
            more = {k: str(v) for k, v in {**own, **size}.items()}
            more |= {"DISTDL_LAUNCHER": "local", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.pipeline", str(path)]
            quiet = subprocess.PIPE
            ranks.append(
                subprocess.Popen(
                    command, env={**os.environ, **more}, stdout=quiet, stderr=subprocess.STDOUT
                )
            )
        said = [rank.communicate()[0].decode() for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), said[0][-4000:]
        return json.loads(path.read_text())


def main() -> Result:
    times = measured()
    middle = {name: statistics.median(values) for name, values in times.items()}
    ideal = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)

    def of_ideal(arm: str, size: int) -> float:
        return middle[named("one process", size)] / middle[named(arm, size)] / ideal

    def over_hand(size: int) -> float:
        return middle[named("by hand", size)] / middle[named("distdl", size)]

    return Result(
        title=f"Pipeline of {STAGES} stages, ResNet-50, {MICRO_BATCHES} micro-batches (s per step)",
        competitor="torch.distributed.pipelining by hand, half of the residual blocks each, 1F1B; "
        f"at {UNEVEN} px, where the halves cost unequally",
        goal="at least 1.1",
        ratio=over_hand(UNEVEN),
        rows=[row(name, values, "s") for name, values in times.items()],
        command="python -m benchmarks.run pipeline",
        what=f"pipeline of {STAGES} stages, speed against an equal-layer split by hand",
        more=[
            Goal(
                "the same, share of the ideal speed-up m / (m + p - 1)",
                "at least 0.92",
                of_ideal("distdl", EVEN),
            )
        ],
        notes=f"The ideal speed-up over one process is stages x m / (m + p - 1) = {ideal:.2f}. "
        f"At {EVEN} px, where a cut into equal halves exists: "
        f"{of_ideal('distdl', EVEN):.2f} of it (by hand "
        f"{of_ideal('by hand', EVEN):.2f}, with the same cut: ratio "
        f"{over_hand(EVEN):.2f}). At {UNEVEN} px, where none does: "
        f"{of_ideal('distdl', UNEVEN):.2f} (by hand {of_ideal('by hand', UNEVEN):.2f}).",
    )


if __name__ == "__main__":
    rank_main(sys.argv[1])

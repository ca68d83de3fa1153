"""Two stages against one process, and against an equal-layer split by hand.

Three arms take turns (benchmarks.turns), in processes of one thread: a plain loop over the
micro-batches in one process; `torch.distributed.pipelining` by hand, half of the residual blocks on
each rank, 1F1B; `strategy=pipeline` under Lightning's Trainer, cut by measured cost, 1F1B. All
train the same ResNet-50 on the same batch with SGD. They use torch's default memory format, since
tensors sent by hand must be contiguous, and keep freed memory, as distdl's worker does. Each stage
needs an idle core.

Two image sizes show two things. At 128 px the residual blocks cost about the same, so a split into
equal halves exists (by hand the halves are the same ones), and the step is compared with the ideal.
At 64 px the last blocks, bound by their weights, cost most. An equal-layer split waits for them,
and the best cut between blocks is about 57 : 43, so no arm can reach the ideal. The plain loop does
not run at this size.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import stops, turns
from benchmarks.table import Goal, Result, paired, row

STAGES, MICRO_BATCHES, ROWS, CLASSES = 2, 8, 32, 1000
EVEN, UNEVEN = 128, 64  # pixels
STEPS, WARM_UP, REPEATS = 1, 1, 5
ALONE, HAND, OURS = "one process", "by hand", "distdl"


def network() -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    return resnet50()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, size, size, generator=generator)
    return images, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def one_process(size: int, total: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, labels = batch(size)
    for step in range(total):
        turns.stop_before(step, WARM_UP, STEPS)
        optimizer.zero_grad()
        for x, y in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            (F.cross_entropy(model(x), y) / MICRO_BATCHES).backward()
        optimizer.step()


def by_hand(rank: int, size: int, total: int) -> None:
    """The form of torch's tutorial: the layers in two halves, stage and schedule."""
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
    for step in range(total):
        turns.stop_before(step, WARM_UP, STEPS)
        optimizer.zero_grad()
        schedule.step(images) if rank == 0 else schedule.step(target=labels)
        optimizer.step()


def by_distdl(rank: int, size: int, total: int) -> None:
    """`strategy=pipeline` as a worker runs it, but without logging and metrics, as in all arms."""
    from lightning.pytorch import LightningDataModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from distdl.distributed import process_group
    from distdl.models import ImageClassifier
    from distdl.ranks import environment
    from distdl.strategies import PipelineStrategy

    class Classifier(ImageClassifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            images, labels = batch(size)
            rows = TensorDataset(images, labels)
            copies = torch.utils.data.ConcatDataset([rows] * total)
            return DataLoader(copies, ROWS)

    env = environment.resolve()
    trainer = Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=PipelineStrategy(micro_batches=MICRO_BATCHES),
        plugins=[process_group.LaunchedEnvironment(env)],
        callbacks=[stops.Stops(WARM_UP, STEPS)],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Classifier(network(), CLASSES, channels_last=False), datamodule=Data())


def named(arm: str, size: int) -> str:
    return f"{arm}, {size} px"


def arm_main(arm: str, size: str, total: str) -> None:
    """A process that takes turns: a rank of a pipeline, or the plain loop."""
    from distdl.distributed import process_group
    from distdl.ranks import environment
    from distdl.worker import allocator

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    allocator.keep_freed_memory()
    if arm == ALONE:
        one_process(int(size), int(total))
        return
    env = environment.resolve()
    process_group.connect(env, "cpu")
    {HAND: by_hand, OURS: by_distdl}[arm](env.rank, int(size), int(total))
    process_group.disconnect()


def measured(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, for each arm, size and round."""
    total = str(turns.steps_in_all(WARM_UP, STEPS, rounds))
    arms = {
        named(arm, size): turns.Arm(
            arm_main, [arm, str(size), total], 1 if arm == ALONE else STAGES
        )
        for size, names in ((EVEN, (ALONE, HAND, OURS)), (UNEVEN, (HAND, OURS)))
        for arm in names
    }
    with tempfile.TemporaryDirectory() as logs:
        blocks, _ = turns.take(arms, rounds, Path(logs))
    return {name: [s / STEPS for s in seconds] for name, seconds in blocks.items()}


def main(rounds: int = REPEATS) -> Result:
    times = measured(rounds)
    ideal = STAGES * MICRO_BATCHES / (MICRO_BATCHES + STAGES - 1)

    def of_ideal(arm: str) -> float:
        return paired(times[named(ALONE, EVEN)], times[named(arm, EVEN)]) / ideal

    def over_hand(size: int) -> float:
        return paired(times[named(HAND, size)], times[named(OURS, size)])

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
                of_ideal(OURS),
            )
        ],
        notes=f"The ideal speed-up over one process is stages x m / (m + p - 1) = {ideal:.2f}. "
        f"At {EVEN} px, where a cut into equal halves exists: "
        f"{of_ideal(OURS):.2f} of it (by hand {of_ideal(HAND):.2f}, with the same cut: ratio "
        f"{over_hand(EVEN):.2f}).",
    )

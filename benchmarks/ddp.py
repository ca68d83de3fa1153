"""DDP of two gloo ranks: `strategy=ddp` against a loop as one writes it for torchrun.

Both train a ResNet-18 on synthetic images of 32 px by SGD with momentum, one thread per rank. These
arms take turns (benchmarks.turns): the loop by hand, the same loop again (A/A), and distdl's real
worker with its metrics, log lines, journal and checkpoints. In every second round, the loop by hand
also runs with distdl's allocator settings, to show their part of the ratio. Training steps are
timed, including the fetch of their batches. Each rank needs an idle core.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks import runs, stops, turns
from benchmarks.pair import RANKS
from benchmarks.table import Result, against_itself, paired, row

BATCH, SIZE, CLASSES, POOL = 8, 32, 10, 256
# Blocks of five steps; the second one of each is logged.
WARM_UP, STEPS, REPEATS, LOG_EVERY = 3, 5, 24, 5
HAND, AGAIN, OURS = "by hand", "by hand, again", "distdl"
KEEPING = "by hand, memory kept"
SOMETIMES = 2


def by_hand(total: int) -> None:
    """`total` steps of the usual script: sampler, loader, DDP, SGD, and a log line now and then.

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
    # As many samples as the steps take, repeated from the pool, like distdl's synthetic images.
    positions = torch.arange(total * BATCH * dist.get_world_size()) % POOL
    dataset = TensorDataset(images[positions], labels[positions])
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
    mean = torch.tensor([123.675, 116.28, 103.53]).view(1, 3, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375]).view(1, 3, 1, 1)
    ddp.train()
    for step, (x, y) in enumerate(loader):
        turns.stop_before(step, WARM_UP, STEPS)
        x = ((x.float() - mean) / std).contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0 and dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


def create_run(folder: Path, total: int) -> Path:
    """A run of distdl that trains the same, for its ranks to execute."""
    run = runs.create_run(
        folder,
        "model=resnet18",
        "data=synthetic",
        f"data.image_size={SIZE}",
        f"data.pool_size={POOL}",
        f"data.num_classes={CLASSES}",
        f"data.batch_size={BATCH}",
        "schedule.warmup_epochs=0",
        f"data.train_samples={total * BATCH * RANKS}",
        "strategy=ddp",
        "trainer.accelerator=cpu",
        f"trainer.devices={RANKS}",
        "trainer.max_epochs=1",
        "trainer.limit_val_batches=0",
        "tracking=none",
        f"trainer.log_every_n_steps={LOG_EVERY}",
        *stops.overrides(WARM_UP, STEPS),
    )
    return run.path


def rank_main(total: str, keep: str = "") -> None:
    """A rank of the loop by hand; `keep`: with distdl's settings of malloc."""
    if keep:
        from distdl.worker.allocator import keep_freed_memory

        keep_freed_memory()
    torch.set_num_threads(1)
    by_hand(int(total))


def measured(repeats: int) -> dict[str, list[float]]:
    """Images per second of both ranks, for each arm and round."""
    total = turns.steps_in_all(WARM_UP, STEPS, repeats)
    fewer = turns.steps_in_all(WARM_UP, STEPS, repeats, SOMETIMES)
    hand = turns.Arm(rank_main, [str(total)], RANKS)
    with tempfile.TemporaryDirectory() as name:
        logs, folder = Path(name) / "logs", Path(name) / "runs"
        logs.mkdir(), folder.mkdir()
        ours = turns.Arm(runs.rank_main, [str(create_run(folder, total))], RANKS)
        keeping = turns.Arm(rank_main, [str(fewer), "keep"], RANKS, SOMETIMES)
        arms = {HAND: hand, AGAIN: hand, OURS: ours, KEEPING: keeping}
        blocks, _ = turns.take(arms, repeats, logs)
    return {arm: [BATCH * RANKS * STEPS / s for s in seconds] for arm, seconds in blocks.items()}


def main(repeats: int = REPEATS) -> Result:
    rates = measured(repeats)
    kept = paired(rates[KEEPING], rates[HAND][::SOMETIMES])
    return Result(
        title=f"DDP of {RANKS} gloo ranks, ResNet-18 at {SIZE} px, {BATCH} images a rank (img/s)",
        what="DDP of 2 gloo ranks, resnet18, img/s against a hand-written torchrun DDP loop",
        competitor="a DDP loop as one writes it for torchrun, same model, batch and optimizer",
        goal="at least 0.99",
        ratio=paired(rates[OURS], rates[HAND]),
        same=against_itself(rates[HAND], rates[AGAIN]),
        rows=[row(name, rates[name], "img/s") for name in rates],
        command="python -m benchmarks.run ddp",
        notes=f"In turn, {STEPS} steps each. Both log every {LOG_EVERY} steps; distdl averages the "
        "loss over the ranks then, and the loop prints that of rank 0. On a CPU distdl keeps the "
        "memory that a step frees (docs/fast.md): with the same setting, the loop by hand reaches "
        f"{kept:.3f} of its own speed.",
    )

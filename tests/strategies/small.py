"""A small network, its data and its training, for tests of strategies on two ranks."""

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from distdl.checkpoint import portable
from distdl.distributed.process_group import LaunchedEnvironment
from distdl.ranks.environment import Environment

BATCH = 4  # per rank


class Small(LightningModule):
    """23,000 weights: a convolution, batch norm on request, a matrix worth compressing."""

    def __init__(self, batch_norm: bool = False, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
        convolution = nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        head = nn.Flatten(), nn.Linear(128, 160), nn.ReLU(), nn.Linear(160, 10)
        self.network = nn.Sequential(*convolution, *head)
        self.momentum = momentum
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(checksum(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 1e-3}, {"params": others}]
        return torch.optim.SGD(groups, 0.05, momentum=self.momentum)


class Chain(nn.Module):
    """For pipelines, with what a real network has: norms, an in-place ReLU, a flattening."""

    def __init__(self, num_classes: int, zero_init_residual: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.body(self.act(self.stem(x)))), 1))


def shard(rank: int, steps: int = 16) -> TensorDataset:
    """A rank's own samples, in the order they are trained on."""
    generator = torch.Generator().manual_seed(100 + rank)
    images = torch.randn(BATCH * steps, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (BATCH * steps,), generator=generator))


def loader(rank: int | None = None, skip: int = 0) -> DataLoader[Any]:
    """A rank's batches, the first `skip` of which were trained on before."""
    samples = shard(torch.distributed.get_rank() if rank is None else rank)
    return DataLoader(TensorDataset(*(t[skip * BATCH :] for t in samples.tensors)), BATCH)


def trainer(
    strategy: Strategy | str, steps: int, folder: Path, callbacks: Any = (), **more: Any
) -> Trainer:
    """A Trainer as distdl.worker.build makes it, on the process group that there is."""
    warnings.filterwarnings("ignore")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if isinstance(strategy, Strategy):
        portable.use_names(strategy)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    more = {"limit_val_batches": 0, "num_sanity_val_steps": 0, **dict.fromkeys(off, False), **more}
    result = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=[LaunchedEnvironment(Environment("test", rank, world, rank, world))],
        callbacks=list(callbacks),
        max_steps=steps,
        max_epochs=100,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **more,
    )
    result._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return result


def checksum(module: nn.Module) -> float:
    """One number that hardly two different sets of weights share."""
    values = torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])
    return float((values * torch.arange(1, len(values) + 1)).sum())


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])

"""A small network, its data and its training, for tests of strategies on two ranks; and modules
that step by hand, or do what FSDP2 cannot."""

from functools import partial, wraps

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from distdl.checkpoint import portable
from distdl.distributed.process_group import LaunchedEnvironment
from distdl.models import ImageClassifier
from distdl.ranks.environment import Environment
from tests.prepared import quiet_trainer

BATCH = 4  # per rank


class Small(LightningModule):
    """23,000 weights: a convolution, batch norm on request, a matrix worth compressing."""

    def __init__(self, batch_norm=False):
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            norm,
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 160),
            nn.ReLU(),
            nn.Linear(160, 10),
        )
        self.losses = []
        self.validated = []

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated.append(checksum(self))

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 1e-3}, {"params": others}]
        return torch.optim.SGD(groups, 0.05, momentum=0.9)


class Thawed(Small):
    """Trains its convolution from the fourth batch on, as BackboneFinetuning does."""

    def __init__(self):
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            self.network[0].requires_grad_(True)


class ByHand(Small):
    """Calls its parts by themselves, goes backward in between, and steps two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(10))

    def training_step(self, batch, batch_idx):
        scale = self.scale  # of the module itself: before the first backward pass
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            inside = self.network[:5](batch[0])
            answer = self.network[5:](inside.detach() if number else inside)
            loss = cross_entropy(answer * (1 if number else scale), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(float(loss.detach()))
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        first = [*self.network[:5].parameters(), self.scale]
        adam = torch.optim.Adam(self.network[5:].parameters(), 0.01)
        return [torch.optim.SGD(first, 0.05, momentum=0.9), adam]


class Penalty(Small):
    """A gradient penalty through a unit of FSDP2: the module itself."""

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, batch_idx):
        images = batch[0].requires_grad_()
        answer = self(images)
        (gradient,) = torch.autograd.grad(answer.sum(), images, create_graph=True)
        loss = cross_entropy(answer, batch[1]) + gradient.norm() / 10
        self.losses.append(float(loss.detach()))
        return loss


class Target(Small):
    """A moving average of the weights, in the step (BYOL) or after it."""

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.target = nn.Linear(160, 10).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if not self.after:
            self.follow()
        return super().training_step(batch, batch_idx) + self.target.bias.sum() * 0

    def on_train_batch_end(self, *_):
        if self.after:
            self.follow()

    @torch.no_grad()
    def follow(self):
        for mean, value in zip(self.target.parameters(), self.network[7].parameters(), strict=True):
            mean.lerp_(value, 0.1)


def decorated(step):
    """As a user's timer or retry would do it."""

    @wraps(step)
    def call(*args, **kwargs):
        return step(*args, **kwargs)

    return call


class OwnArguments(Small):
    """Its steps take a batch without its index, and two of them are decorated."""

    def __init__(self, by_hand):
        super().__init__()
        self.automatic_optimization = not by_hand

    @decorated
    def training_step(self, batch):
        loss = super().training_step(batch, None)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    @decorated
    def validation_step(self, batch):
        self.validated.append(len(batch[0]))

    def predict_step(self, batch):
        return self.network(batch[0])


class OwnIterator(Small):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class TensorParallel(ImageClassifier):
    """As Lightning's example: one matrix by columns, the next by rows; the loss is a DTensor."""

    def configure_model(self):
        if not isinstance(self.network.fc.weight, DTensor):
            plan = {"wide": ColwiseParallel(), "fc": RowwiseParallel()}
            parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch):
        loss = super().training_step(batch, 0)["loss"]
        return DTensor.from_local(loss, self.device_mesh["tensor_parallel"], [Replicate()])


class Meshed(ImageClassifier):
    """Divides its last two layers, and everything over the groups; whole without a mesh."""

    averages = True
    style = "columns and rows"

    def configure_model(self):
        mesh = self.device_mesh
        if mesh is None or isinstance(self.network.fc.weight, DTensor):
            return
        if self.style == "columns and rows":
            plan = {"wide": ColwiseParallel(), "fc": RowwiseParallel()}
        else:  # the layer between them gets a part of the features, and is not told so
            plan = {"fc": RowwiseParallel(input_layouts=Shard(-1))}
            self.network.wide.register_forward_hook(self.own_part)
        parallelize_module(self.network, mesh["tensor_parallel"], plan)
        if self.averages:
            fully_shard(self.network.wide, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def own_part(self, layer, inputs, output):
        mesh = self.device_mesh["tensor_parallel"]
        return output.chunk(mesh.size(), -1)[mesh.get_local_rank()]


class Undivided(Meshed):
    """Its groups do not average their gradients."""

    averages = False


class Untold(Meshed):
    """Its ranks have other gradients of a layer that they all hold."""

    style = "in parts"


class OwnBatches(Meshed):
    """Takes other samples on each rank of a group."""

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        batch["image"] += torch.distributed.get_rank()


class Numbered(ImageClassifier):
    """Its step takes the batch alone, and calls the forward by name; its inputs need the number."""

    def forward(self, pixels):
        return super().forward(pixels)

    def pipeline_inputs(self, batch, batch_idx):
        images, targets = super().pipeline_inputs(batch, batch_idx)
        return images * (1 + batch_idx), targets

    def training_step(self, batch, **more):
        number = 0
        if self._trainer:  # none while a step is measured
            loop = self._trainer.fit_loop.epoch_loop
            number = loop.batch_idx // self._trainer.accumulate_grad_batches
        images, targets = self.pipeline_inputs(batch, number)
        return {"loss": self.pipeline_loss(self(pixels=images), targets)}


UNDER_FSDP = (ByHand, partial(Target, after=True))
NOT_UNDER_FSDP = {
    Penalty: "create_graph=True",
    partial(Target, after=False): "training_step changes weights (target.",
}


class Chain(nn.Module):
    """With what a real network has: norms, an in-place ReLU, a flattening."""

    width = 0  # of a layer before the last one

    def __init__(self, num_classes, zero_init_residual):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.wide = nn.Linear(32, self.width) if self.width else nn.Identity()
        self.fc = nn.Linear(self.width or 32, num_classes)

    def forward(self, x):
        x = self.pool(self.body(self.act(self.stem(x))))
        return self.fc(self.wide(torch.flatten(x, 1)))


class Wide(Chain):
    """With 130,000 weights in one layer: ZeRO-3 keeps small ones whole."""

    width = 4096


class Dropping(Chain):
    """Draws in both halves: each stage of a pipeline has generators of its own."""

    def __init__(self, num_classes, zero_init_residual):
        super().__init__(num_classes, zero_init_residual)
        self.act = nn.Dropout(0.5)
        self.wide = nn.Dropout(0.5)


def shard(rank, steps=16):
    """A rank's own samples, in the order they are trained on."""
    generator = torch.Generator().manual_seed(100 + rank)
    images = torch.randn(BATCH * steps, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (BATCH * steps,), generator=generator))


def loader(rank=None, skip=0):
    """A rank's batches, the first `skip` of which were trained on before."""
    samples = shard(torch.distributed.get_rank() if rank is None else rank)
    return DataLoader(TensorDataset(*(t[skip * BATCH :] for t in samples.tensors)), BATCH)


def trainer(strategy, steps, folder, callbacks=(), **more):
    """A Trainer as distdl.worker.build makes it, on the process group that there is."""
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    if isinstance(strategy, Strategy):
        portable.use_names(strategy)
    here = LaunchedEnvironment(Environment("test", rank, world, rank, world))
    more = {
        "limit_val_batches": 0,
        "devices": world,
        "plugins": [here],
        **more,
        "strategy": strategy,
        "callbacks": [*callbacks],
        "max_steps": steps,
    }
    return quiet_trainer(folder, max_epochs=100, **more)


def checksum(module):
    """One number that hardly two different sets of weights share."""
    values = torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])
    return float((values * torch.arange(1, len(values) + 1)).sum())


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class SavesFirst(Callback):
    """Saves before the first step, what a strategy has loaded."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.path:
            trainer.save_checkpoint(self.path)
        self.path = ""


class Ends(Callback):
    """Asks for the end of the training after a batch, as a time limit does."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.after:
            trainer.should_stop = True

"""The idioms: what each project's experiment file contains, and what is special about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Node = dict[str, Any]


def of(target: str, **arguments: Any) -> Node:
    return {"_target_": target, **arguments}


def theirs(name: str, **arguments: Any) -> Node:
    return of(f"lightning.pytorch.callbacks.{name}", **arguments)


@dataclass(frozen=True)
class Idiom:
    """Some ways to write Lightning code, together."""

    model: Node = field(default_factory=lambda: of("modules.Regression"))
    data: str | None = "plain"  # of `points.LOADERS`; None: the module brings its loaders
    # Further keys of sections.
    trainer: Node = field(default_factory=dict)
    checkpoint: Node = field(default_factory=dict)
    callbacks: Node = field(default_factory=dict)
    beside: Node = field(default_factory=dict)  # further callbacks, of our run alone
    tracking: str = "none"
    # Optimizer steps between checkpoints, one of which is due at batch 10; None: epochs' ends only.
    every: int | None = 5
    batches: int = 24
    evaluated: bool = True  # its last checkpoint is what plain Lightning validates and tests
    two: tuple[str, ...] | None = None  # two ranks add something, with these overrides
    quick: bool = False  # also outside the matrix

    @property
    def experiment(self) -> dict[str, Any]:
        """What its experiment file contains, without `defaults` and what is beside."""
        trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "log_every_n_steps": 1}
        # In the foreground: a kill a few steps later finds it.
        checkpoint = {"monitor": "val_loss", "mode": "min", "background": False}
        data = {"data": of("points.PointsData", kind=self.data)} if self.data else {}
        return {
            "trainer": trainer | self.trainer,
            "checkpoint": checkpoint | {"every_n_steps": self.every} | self.checkpoint,
            "callbacks": {"watch": of("watch.Watch"), **self.callbacks},
            "model": self.model,
            **data,
            "seed": 3,
        }


def partials(scheduler: str, arguments: Node, **options: Any) -> Node:
    """As lightning-hydra-template's users write it."""
    adam = of("torch.optim.Adam", _partial_=True, lr=0.05, weight_decay=0.01)
    schedule = of(scheduler, _partial_=True, **arguments)
    net = of("modules.network")
    return of("modules.Partial", net=net, optimizer=adam, scheduler=schedule, **options)


SCHEDULERS = "torch.optim.lr_scheduler"
STEP = partials(f"{SCHEDULERS}.StepLR", {"step_size": 3}, interval="step", frequency=2)
EXPONENTIAL = partials(f"{SCHEDULERS}.ExponentialLR", {"gamma": 0.5})
PLATEAU = partials("modules.plateau_of", {}, monitor="val_loss")
SEQUENTIAL = partials("modules.sequential", {}, interval="step")
GAN, BY_HAND, CONTRASTIVE = (of(f"modules.{name}") for name in ("GAN", "ByHand", "Contrastive"))
UNUSED = ("strategy=ddp", "strategy.find_unused_parameters=true")
# It begins in the epoch that is killed.
SWA = theirs("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
FIRST_SET = {"monitor": "val_loss/dataloader_idx_0"}
BAR = {"bar": theirs("TQDMProgressBar"), "timer": theirs("Timer", duration={"hours": 1})}
BESIDE = ("RichProgressBar", "LearningRateMonitor", "DeviceStatsMonitor", "ModelSummary")
OFTEN = {"val_check_interval": 2}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}

IDIOMS = {
    "template": Idiom(STEP, "subclass", CLIPPED, two=()),
    "exponential": Idiom(EXPONENTIAL, "unbatched", {"precision": "bf16-mixed"}),
    "plateau": Idiom(PLATEAU, "weighted", every=None, two=()),
    "sequential": Idiom(SEQUENTIAL, "torchs batches", {"precision": "16-mixed"}, two=()),
    "gan": Idiom(GAN, two=UNUSED),
    # At the end of an epoch Lightning and the module do more after the hooks of callbacks.
    "gan-of-a-stream": Idiom(GAN, "stream", every=None, two=UNUSED, quick=True),
    "vae": Idiom(of("modules.VAE"), "batches", tracking="tensorboard", two=()),
    "contrastive": Idiom(CONTRASTIVE, two=()),
    "in-the-module": Idiom(of("modules.Complete", batch_size=4), None, quick=True),
    "several-validations": Idiom(data="two sets", checkpoint=FIRST_SET, two=()),
    # A validation is due where checkpoints are written: before the plateau's step, and after it.
    "by-hand": Idiom(BY_HAND, "plain", OFTEN, {"monitor": None}, two=UNUSED, quick=True),
    # The last epoch is that of the batch norm.
    "swa": Idiom(callbacks={"swa": SWA}, beside=BAR, batches=32, two=()),
    # Its average is not in the last checkpoint.
    "swa-without-batch-norm": Idiom(CONTRASTIVE, callbacks={"swa": SWA}, evaluated=False),
    "ema": Idiom(callbacks={"ema": theirs("EMAWeightAveraging", decay=0.5)}),
    "callbacks": Idiom(
        trainer={
            "max_time": of("datetime.timedelta", hours=1),
            "profiler": of("lightning.pytorch.profilers.SimpleProfiler"),
        },
        callbacks={
            "stop": theirs("EarlyStopping", monitor="val_loss", patience=1, min_delta=10.0),
            "accumulate": theirs("GradientAccumulationScheduler", scheduling={0: 1, 1: 2}),
            "unfreeze": theirs("BackboneFinetuning", unfreeze_backbone_at_epoch=1),
        },
        beside={
            **{name.lower(): theirs(name) for name in BESIDE},
            "throughput": of("modules.Throughput"),
            "gone": None,
        },
        tracking="csv",
        every=9,
        batches=16,  # it is stopped after two epochs
        quick=True,
    ),
}


def stops(monitor: str, patience: int) -> Node:
    return theirs("EarlyStopping", monitor=monitor, patience=patience, min_delta=10.0)


RELOADED = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 4}
PLATEAU_OF_STEPS = partials(
    "modules.plateau_of", {}, monitor="val_loss", interval="step", frequency=7
)
PLATEAU_OF_EPOCHS = partials("modules.plateau_of", {}, monitor="val_loss", frequency=2)
IN_PARTS = {"limit_train_batches": 0.7, "limit_val_batches": 0.7, "val_check_interval": 0.5}
AVERAGED, SKIPPING, SEVERAL_SCHEDULES, ACCUMULATING_BY_HAND = (
    of(f"modules.{name}")
    for name in ("Averaged", "Skipping", "SeveralSchedules", "AccumulatingByHand")
)

# How a training goes: its epochs, validations, steps and schedules.
JOURNEYS = {
    "loaders of each epoch": Idiom(AVERAGED, "new points", RELOADED, batches=32),
    "epochs of changing length": Idiom(AVERAGED, "more points", RELOADED, batches=38),
    "early stopping": Idiom(
        AVERAGED,
        "subclass",
        {"max_epochs": 9},
        callbacks={"stop": stops("val_loss", 2), "mean": stops("mean_loss", 3)},
    ),
    # Two ranks would wait for each other: Lightning refuses it.
    "None from training_step": Idiom(
        SKIPPING,
        "subclass",
        {"accumulate_grad_batches": 2},
        two=("model._target_=modules.SkippingByHand", "trainer.accumulate_grad_batches=1"),
    ),
    "validation after 7 steps": Idiom(
        PLATEAU_OF_STEPS, "subclass", {"val_check_interval": 7, "check_val_every_n_epoch": None}
    ),
    "validation in each second epoch": Idiom(
        PLATEAU_OF_EPOCHS, "subclass", {"check_val_every_n_epoch": 2, "max_epochs": 4}, batches=32
    ),
    "accumulation, limits in parts": Idiom(
        AVERAGED, trainer={"accumulate_grad_batches": 3, "max_epochs": 5, **IN_PARTS}, batches=25
    ),
    "schedules of steps": Idiom(
        SEVERAL_SCHEDULES, "subclass", {"max_steps": 21, "max_epochs": -1}, batches=21
    ),
    "accumulation by epoch": Idiom(
        STEP,
        "subclass",
        callbacks={"more": theirs("GradientAccumulationScheduler", scheduling={0: 1, 1: 3, 2: 2})},
    ),
    "accumulation by hand": Idiom(ACCUMULATING_BY_HAND, "subclass"),
}

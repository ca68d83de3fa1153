"""The idioms: what each project's experiment file says, and what is special about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LIGHTNING = "lightning.pytorch"


@dataclass(frozen=True)
class Idiom:
    """One way to write Lightning code.

    Args:
        model, data: Nodes of the experiment; no data: the module brings its loaders.
        trainer, callbacks: What the experiment adds.
        more: Further sections of the experiment.
        tracking: Which loggers.
        every: A checkpoint every so many optimizer steps; one of batch 10 must be among them. None:
            at the end of an epoch only.
        random_order: The order of the samples is drawn: the control is given the run's own.
        drawn: Samples come with replacement.
        two: Two ranks add something.
        across: Overrides for two ranks.
        evaluated: Validation and test are not those of another idiom.
    """

    model: dict[str, Any]
    data: dict[str, Any] | None = field(default_factory=lambda: {"_target_": "points.PointsData"})
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    tracking: str = "none"
    every: int | None = 5
    random_order: bool = False
    drawn: bool = False
    two: bool = False
    across: tuple[str, ...] = ()
    evaluated: bool = False

    @property
    def halved(self) -> tuple[str, ...]:
        """Overrides with which two ranks take the global batches of one."""
        return ("data.batch_size=2" if self.data else "model.batch_size=2", *self.across)


REGRESSION = {"_target_": "points.Regression"}
UNUSED = ("strategy=ddp", "strategy.find_unused_parameters=true")


def of(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


def loaders(kind: str) -> dict[str, Any]:
    return of("loaders.Loaders", kind=kind)


IDIOMS: dict[str, Idiom] = {
    "shuffled": Idiom(
        REGRESSION, of("points.PointsData", shuffle=True), random_order=True, evaluated=True
    ),
    "gan": Idiom(of("gan.GAN"), two=True, across=UNUSED, evaluated=True),
    "partials": Idiom(
        of(
            "hyperparameters.Partial",
            net=of("points.network"),
            optimizer=of("torch.optim.Adam", _partial_=True, lr=0.05, weight_decay=0.01),
            scheduler=of("torch.optim.lr_scheduler.StepLR", _partial_=True, step_size=1),
        ),
        evaluated=True,
    ),
    "namespace": Idiom(of("hyperparameters.FromNamespace", lr=0.05, momentum=0.9), evaluated=True),
    "vae": Idiom(of("vae.VAE"), tracking="tensorboard", evaluated=True),
    "contrastive": Idiom(of("contrastive.Contrastive"), two=True, evaluated=True),
    "stream": Idiom(REGRESSION, loaders("stream"), every=None, two=True),
    # At the end of an epoch Lightning and the module do more after the hooks of callbacks.
    "gan-of-an-epoch": Idiom(of("gan.GAN"), every=None, across=UNUSED),
    "plateau-of-an-epoch": Idiom(of("schedules.Scheduled", kind="plateau"), every=None),
    "weighted": Idiom(REGRESSION, loaders("weighted"), random_order=True, drawn=True, two=True),
    "counting": Idiom(REGRESSION, loaders("counting"), random_order=True, two=True),
    "torchs-batches": Idiom(REGRESSION, loaders("torchs batches"), random_order=True),
    "unbatched": Idiom(REGRESSION, loaders("unbatched"), random_order=True),
    "batches": Idiom(REGRESSION, loaders("batches"), random_order=True, two=True),
    "subclass": Idiom(REGRESSION, loaders("subclass"), random_order=True, two=True),
    "in-the-module": Idiom(
        of("loaders.WithLoaders", batch_size=4), None, random_order=True, evaluated=True
    ),
    "several-validations": Idiom(
        of("loaders.OnTwoSets"),
        of("loaders.TwoSets"),
        more={"checkpoint": {"monitor": "val_loss/dataloader_idx_0"}},
        two=True,
        evaluated=True,
    ),
    **{
        f"schedule-{kind}": Idiom(of("schedules.Scheduled", kind=kind))
        for kind in ("step", "epoch", "plateau", "onecycle", "sequential")
    },
    "compiled": Idiom(of("compiled.Compiled", backend="aot_eager"), evaluated=True),
    "swa": Idiom(
        REGRESSION,
        callbacks={
            "swa": of(
                f"{LIGHTNING}.callbacks.StochasticWeightAveraging",
                swa_lrs=0.01,
                swa_epoch_start=1,
                annealing_epochs=1,
            )
        },
        evaluated=True,
    ),
    "bf16": Idiom(REGRESSION, trainer={"precision": "bf16-mixed"}, evaluated=True),
    "16-bit": Idiom(REGRESSION, trainer={"precision": "16-mixed"}),
    "accumulated-and-clipped": Idiom(
        REGRESSION, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ),
    # A validation is due where checkpoints are written: before the plateau's step, and after it.
    "by-hand": Idiom(
        of("years.ByHand"),
        trainer={"val_check_interval": 2},
        more={"checkpoint": {"monitor": None}},
        two=True,
        across=UNUSED,
    ),
    "by-hand-best": Idiom(
        of("years.ByHand"),
        trainer={"val_check_interval": 2},
        more={"checkpoint": {"monitor": "val_up_to_ten", "mode": "max"}},
    ),
}


def experiment(idiom: Idiom) -> dict[str, Any]:
    """What its experiment file says, without `defaults`."""
    checkpoint = {"monitor": "val_loss", "mode": "min", "every_n_steps": idiom.every}
    # Written at once: a kill a few steps later finds it.
    checkpoint |= {"background": False, **idiom.more.get("checkpoint", {})}
    sections = {
        "model": idiom.model,
        "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 3, **idiom.trainer},
        "callbacks": {"watch": of("watch.Watch"), **idiom.callbacks},
        "checkpoint": checkpoint,
        "seed": 3,
    }
    if idiom.data is not None:
        sections["data"] = idiom.data
    return sections

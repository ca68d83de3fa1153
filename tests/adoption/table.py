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
        two: Two ranks add something, with these overrides.
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
    two: tuple[str, ...] | None = None

    @property
    def halved(self) -> tuple[str, ...]:
        """Overrides with which two ranks take the global batches of one."""
        return ("data.batch_size=2" if self.data else "model.batch_size=2", *(self.two or ()))


REGRESSION = {"_target_": "points.Regression"}


def of(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


def loaders(kind: str) -> dict[str, Any]:
    return of("loaders.Loaders", kind=kind)


IDIOMS: dict[str, Idiom] = {
    "shuffled": Idiom(REGRESSION, of("points.PointsData", shuffle=True), random_order=True),
    "gan": Idiom(of("gan.GAN"), two=("strategy=ddp", "strategy.find_unused_parameters=true")),
    "partials": Idiom(
        of(
            "hyperparameters.Partial",
            net=of("points.network"),
            optimizer=of("torch.optim.Adam", _partial_=True, lr=0.05, weight_decay=0.01),
            scheduler=of("torch.optim.lr_scheduler.StepLR", _partial_=True, step_size=1),
        )
    ),
    "namespace": Idiom(of("hyperparameters.FromNamespace", lr=0.05, momentum=0.9)),
    "vae": Idiom(of("vae.VAE"), tracking="tensorboard"),
    "contrastive": Idiom(of("contrastive.Contrastive"), two=()),
    "stream": Idiom(REGRESSION, loaders("stream"), every=None, two=()),
    # At the end of an epoch Lightning and the module do more after the hooks of callbacks.
    "gan-of-an-epoch": Idiom(of("gan.GAN"), every=None),
    "plateau-of-an-epoch": Idiom(of("schedules.Scheduled", kind="plateau"), every=None),
    "weighted": Idiom(REGRESSION, loaders("weighted"), random_order=True, drawn=True, two=()),
    "counting": Idiom(REGRESSION, loaders("counting"), random_order=True, two=()),
    "torchs-batches": Idiom(REGRESSION, loaders("torchs batches"), random_order=True),
    "unbatched": Idiom(REGRESSION, loaders("unbatched"), random_order=True),
    "batches": Idiom(REGRESSION, loaders("batches"), random_order=True, two=()),
    "subclass": Idiom(REGRESSION, loaders("subclass"), random_order=True, two=()),
    "in-the-module": Idiom(of("loaders.WithLoaders", batch_size=4), None, random_order=True),
    "several-validations": Idiom(
        of("loaders.OnTwoSets"),
        of("loaders.TwoSets"),
        more={"checkpoint": {"monitor": "val_loss/dataloader_idx_0"}},
        two=(),
    ),
    **{
        f"schedule-{kind}": Idiom(of("schedules.Scheduled", kind=kind))
        for kind in ("step", "epoch", "plateau", "onecycle", "sequential")
    },
    "compiled": Idiom(of("compiled.Compiled", backend="aot_eager")),
    "swa": Idiom(
        REGRESSION,
        trainer={"max_epochs": 3},
        callbacks={
            "swa": of(
                f"{LIGHTNING}.callbacks.StochasticWeightAveraging",
                swa_lrs=0.01,
                swa_epoch_start=1,
                annealing_epochs=1,
            )
        },
    ),
    "bf16": Idiom(REGRESSION, trainer={"precision": "bf16-mixed"}),
    "16-bit": Idiom(REGRESSION, trainer={"precision": "16-mixed"}),
    "accumulated-and-clipped": Idiom(
        REGRESSION, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ),
}


def experiment(idiom: Idiom) -> dict[str, Any]:
    """What its experiment file says, without `defaults`."""
    checkpoint = {"monitor": "val_loss", "mode": "min", "every_n_steps": idiom.every}
    # Written at once: a kill a few steps later finds it.
    checkpoint |= {"background": False, **idiom.more.get("checkpoint", {})}
    sections = {
        "model": idiom.model,
        "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **idiom.trainer},
        "callbacks": {"watch": of("watch.Watch"), **idiom.callbacks},
        "checkpoint": checkpoint,
        "seed": 3,
    }
    if idiom.data is not None:
        sections["data"] = idiom.data
    return sections

"""The idioms: what each project's experiment file contains, and what is special about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def of(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


REGRESSION = of("points.Regression")
UNUSED = ("strategy=ddp", "strategy.find_unused_parameters=true")


@dataclass(frozen=True)
class Idiom:
    """One way to write Lightning code."""

    model: dict[str, Any] = field(default_factory=lambda: REGRESSION)
    # A node, or a kind of `points.LOADERS`; None: the module brings its loaders.
    data: dict[str, Any] | str | None = "plain"
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # further keys of sections
    tracking: str = "none"
    # Optimizer steps between checkpoints, one of which is due at batch 10; None: epochs' ends only.
    every: int | None = 5
    random_order: bool = False  # the control is given the run's order of the samples
    drawn: bool = False  # with replacement
    two: bool = False  # two ranks add something
    across: tuple[str, ...] = ()  # overrides for two ranks
    evaluated: bool = False  # validation and test are not those of another idiom

    @property
    def halved(self) -> tuple[str, ...]:
        """Overrides with which two ranks take the global batches of one."""
        return ("data.batch_size=2" if self.data else "model.batch_size=2", *self.across)

    @property
    def experiment(self) -> dict[str, Any]:
        """What its experiment file contains, without `defaults`."""
        sections: dict[str, Any] = {
            "model": self.model,
            "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 3},
            "callbacks": {"watch": of("watch.Watch")},
            # In the foreground: a kill a few steps later finds it.
            "checkpoint": {"monitor": "val_loss", "mode": "min", "background": False},
        }
        sections["checkpoint"]["every_n_steps"] = self.every
        for name, more in self.sections.items():
            sections[name] = sections[name] | more
        if self.data is not None:
            data = self.data
            sections["data"] = of("points.PointsData", kind=data) if isinstance(data, str) else data
        return {**sections, "seed": 3}


def drawn(kind: str, **options: Any) -> Idiom:
    """A loader that draws an order."""
    return Idiom(data=kind, random_order=True, **options)


def scheduled(kind: str, **options: Any) -> Idiom:
    return Idiom(of("modules.Scheduled", kind=kind), **options)


GAN = of("modules.GAN")
BY_HAND, OFTEN = of("modules.ByHand"), {"val_check_interval": 2}
PARTIALS = of(
    "modules.Partial",
    net=of("points.network"),
    optimizer=of("torch.optim.Adam", _partial_=True, lr=0.05, weight_decay=0.01),
    scheduler=of("torch.optim.lr_scheduler.StepLR", _partial_=True, step_size=1),
)
SWA = of(
    "lightning.pytorch.callbacks.StochasticWeightAveraging",
    swa_lrs=0.01,
    swa_epoch_start=1,
    annealing_epochs=1,
)
BEST = {"monitor": "val_up_to_ten", "mode": "max"}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
TWO_SETS = {"checkpoint": {"monitor": "val_loss/dataloader_idx_0"}}
WITH_LOADERS = of("modules.WithLoaders", batch_size=4)

IDIOMS: dict[str, Idiom] = {
    "shuffled": drawn("shuffled", evaluated=True),
    "gan": Idiom(GAN, two=True, across=UNUSED, evaluated=True),
    "partials": Idiom(PARTIALS, evaluated=True),
    "namespace": Idiom(of("modules.FromNamespace", lr=0.05, momentum=0.9), evaluated=True),
    "vae": Idiom(of("modules.VAE"), tracking="tensorboard", evaluated=True),
    "contrastive": Idiom(of("modules.Contrastive"), two=True, evaluated=True),
    "stream": Idiom(data="stream", every=None, two=True),
    # At the end of an epoch Lightning and the module do more after the hooks of callbacks.
    "gan-of-an-epoch": Idiom(GAN, every=None, across=UNUSED),
    "plateau-of-an-epoch": scheduled("plateau", every=None),
    "weighted": drawn("weighted", drawn=True, two=True),
    "counting": drawn("counting", two=True),
    "torchs-batches": drawn("torchs batches"),
    "unbatched": drawn("unbatched"),
    "batches": drawn("batches", two=True),
    "subclass": drawn("subclass", two=True),
    "in-the-module": Idiom(WITH_LOADERS, None, random_order=True, evaluated=True),
    "several-validations": Idiom(
        data=of("points.TwoSets"), sections=TWO_SETS, two=True, evaluated=True
    ),
    **{
        f"schedule-{k}": scheduled(k)
        for k in ("step", "epoch", "plateau", "onecycle", "sequential")
    },
    "compiled": Idiom(of("modules.Compiled", backend="aot_eager"), evaluated=True),
    "swa": Idiom(sections={"callbacks": {"swa": SWA}}, evaluated=True),
    "bf16": Idiom(sections={"trainer": {"precision": "bf16-mixed"}}, evaluated=True),
    "16-bit": Idiom(sections={"trainer": {"precision": "16-mixed"}}),
    "accumulated-and-clipped": Idiom(sections={"trainer": CLIPPED}),
    # A validation is due where checkpoints are written: before the plateau's step, and after it.
    "by-hand": Idiom(
        BY_HAND,
        sections={"trainer": OFTEN, "checkpoint": {"monitor": None}},
        two=True,
        across=UNUSED,
    ),
    "by-hand-best": Idiom(BY_HAND, sections={"trainer": OFTEN, "checkpoint": BEST}),
}

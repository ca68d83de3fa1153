"""Image classification with any network: loss, exact validation, mixup, compile."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn import functional as F

from distdl.domains.classification.domain import Classification
from distdl.domains.classification.metric import Labelled, labels_of
from distdl.models import compilers, freezing, start_checks
from distdl.models.blocks import MemoryLayout, NamedBlock, blocks_of
from distdl.models.evaluated import Evaluated
from distdl.models.mixing import mix
from distdl.models.parts import heads_of
from distdl.models.weights import load_weights
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import NotNegative, Positive
from distdl.util.seeds import stable_seed

log = logging.getLogger(__name__)

Compile = bool | Literal["auto", "default", "reduce-overhead", "max-autotune", "measured"]
Precision = Literal["highest", "high", "medium"]


class ImageClassifier(Evaluated):
    """A network that maps images to logits, trained by cross-entropy.

    A batch is a dict with "image" [B, 3, H, W] and "label" int64 [B]. In validation, "weight"
    float32 [B] is 1 for rows that count and 0 for fillers. A pair (image, label) also works.

    Validation logs `val/loss` (cross-entropy without label smoothing), `val/acc1`, `val/acc5` (0 to
    1) and `val/samples`; a test logs the same as `test/...`. They are the same at any world size
    (`distdl.domains.classification.metric`). The class defines no optimizer (the optimizer node is
    attached to it) and logs nothing in training.

    Args:
        network: [B, 3, H, W] to logits [B, num_classes].
        num_classes: Labels are below it.
        norm: "batch" does not change the network; "group" replaces every BatchNorm2d with a
            GroupNorm (32 groups, Wu and He 2018; fewer if 32 does not divide the channels), so
            that results do not depend on the batch size per device.
        label_smoothing: From 0 to below 1 (Szegedy et al. 2016).
        mixup: Its alpha (Zhang et al. 2018); 0: off.
        cutmix: Its alpha (Yun et al. 2019); 0: off. With both, one is chosen for each batch.
        channels_last: Memory layout of images and weights; the fast one on tensor cores.
        compile: torch.compile the network, in the default mode (true) or in the given one;
            "auto": in the default mode, to train on a GPU, where a compiler is found;
            "measured": in the fastest one, chosen before the training (`distdl.worker.compiling`).
        matmul_precision: Of float32 matrix products (torch.set_float32_matmul_precision, for the
            whole process): "highest" is exact; "high" rounds inputs to TF32's 11 bits on GPUs
            that support it, "medium" to bf16's 8. torch uses TF32 for convolutions there anyway.
        fused_bn: Accepted for frozen runs of earlier versions, without effect.
        weights: File of initial weights: torchvision's or timm's `.pth`, `.safetensors`, or a
            checkpoint. In a config also a name (`distdl.config.published`).
        head: "new": the layer that gives the logits is not taken from `weights`; None: only if the
            file has another number of classes.
        freeze: Modules and parameters of the network that are not trained: names, or patterns such
            as "layer[12]"; "backbone" is all but the head. Their batch norms keep their statistics.
        unfreeze_at: The epoch (the first is 0) from which on what `freeze` names is trained, too;
            None: never.
        seed: Of mixup and cutmix, whose draws depend only on (seed, epoch, batch, rank).

    Raises:
        UserError: If an argument is out of its range.
    """

    domain = Classification()

    def __init__(
        self,
        network: nn.Module,
        num_classes: Positive = 1000,
        norm: str = "batch",
        label_smoothing: NotNegative = 0.0,
        mixup: NotNegative = 0.0,
        cutmix: NotNegative = 0.0,
        channels_last: bool = True,
        compile: Compile = False,
        matmul_precision: Precision = "highest",
        fused_bn: bool = False,
        weights: str | None = None,
        head: Literal["new"] | None = None,
        freeze: Sequence[str] = (),
        unfreeze_at: Positive | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        node = {"norm": norm, "label_smoothing": label_smoothing, "mixup": mixup, "cutmix": cutmix}
        problems = [each for each in self.check(node) if isinstance(each, Problem)]
        if problems:
            raise UserError(*(replace(p, path=f"model.{p.path}") for p in problems))
        if weights is not None:
            load_weights(network, weights, head, num_classes)
        if norm == "group":
            network = with_group_norm(network)
        if freeze:
            self.frozen = freezing.freeze(network, freeze, heads_of(network, num_classes))
            self.unfreeze_at = unfreeze_at
        if fused_bn:
            log.warning("model.fused_bn=true has no effect; use model.compile=true instead")
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.network = network.to(memory_format=self._layout)
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.mixup = mixup
        self.cutmix = cutmix
        self._seed = seed
        self._compile = compile
        self._matmul_precision = matmul_precision

    @staticmethod
    def check(
        config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem | str]:
        """Problems of the arguments, and notes; paths are relative to the model node."""
        yield from start_checks.problems(config, context, classifies=True)
        if config.get("norm", "batch") not in ("batch", "group"):
            yield Problem(
                "norm",
                what=f"is {config['norm']!r}",
                remedy="model.norm=batch or model.norm=group",
                code="wrong-choice",
            )
        for name in ("mixup", "cutmix"):
            alpha = config.get(name, 0)
            if alpha < 0:
                yield Problem(
                    name,
                    what=f"is {alpha}, below 0",
                    remedy=f"model.{name}=0 switches it off",
                    code="out-of-range",
                )
        if not 0 <= (smoothing := config.get("label_smoothing", 0)) < 1:
            yield Problem(
                "label_smoothing",
                what=f"is {smoothing}, not from 0 to below 1",
                remedy="model.label_smoothing=0.1",
                code="out-of-range",
            )

    def configure_model(self) -> None:
        torch.set_float32_matmul_precision(self._matmul_precision)
        if self.network._compiled_call_impl is not None:
            return
        device = self._trainer.strategy.root_device if self._trainer else self.device
        mode = compilers.mode_of(self._compile, device.type, self._why_not_compiled())
        if mode is not None:
            compilers.keep_results()
            compilers.compile_in_place(self.network, mode)

    def _why_not_compiled(self) -> str:
        """Why `compile="auto"` would gain nothing; empty: it may."""
        if self._trainer is None or self._trainer.state.fn != TrainerFn.FITTING:
            return "nothing is trained"
        if not getattr(self._trainer.strategy, "compiles", True):
            return "the stages of a pipeline are not compiled"
        return ""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] to logits [B, num_classes]."""
        return self.network(images.contiguous(memory_format=self._layout))

    def training_step(self, batch: Labelled, batch_idx: int) -> dict[str, torch.Tensor]:
        images, targets = self.pipeline_inputs(batch, batch_idx)
        return {"loss": self.pipeline_loss(self(images), targets)}

    def statistics_step(self, batch: Labelled, batch_idx: int) -> None:
        """A forward for the statistics of batch norms: of images that are not mixed."""
        self(_images(batch))

    # The interface for strategy=pipeline (docs/strategies/pipeline.md).

    def pipeline_blocks(self) -> list[NamedBlock]:
        """The network's blocks: called one after the other, they compute `forward`."""
        named = [(n if n is None else f"network.{n}", b) for n, b in blocks_of(self.network)]
        return [(None, MemoryLayout(self._layout)), *named]

    def pipeline_inputs(self, batch: Labelled, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, H, W] and labels int64 [B], or mixed ones and float32 [B, num_classes]."""
        images = _images(batch)
        targets, _ = labels_of(batch)
        if self.mixup or self.cutmix:
            seed = stable_seed(self._seed, self.current_epoch, batch_idx, self._data_rank())
            images, targets = mix(
                images, targets, self.num_classes, mixup=self.mixup, cutmix=self.cutmix, seed=seed
            )
        return images, targets

    def pipeline_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of logits [B, num_classes]."""
        return F.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)

    def _data_rank(self) -> int:
        """Rank among the processes that take different data: pipeline stages share it."""
        shares = self._trainer.distributed_sampler_kwargs if self._trainer else None
        return (shares or {}).get("rank", self.global_rank)

    def validation_step(self, batch: Labelled, batch_idx: int) -> None:
        self.evaluated(batch, self(_images(batch)).float())

    def predict_step(self, batch: Labelled, batch_idx: int) -> torch.Tensor:
        """Logits [B, num_classes], filler rows (weight 0) included."""
        return self(_images(batch))


def _images(batch: Labelled) -> torch.Tensor:
    return batch["image"] if isinstance(batch, Mapping) else batch[0]


def with_group_norm(module: nn.Module) -> nn.Module:
    """Replaces every BatchNorm2d in `module` with a GroupNorm, and keeps scale, shift, and the
    activation of timm's BatchNorm2d."""
    if not isinstance(module, nn.BatchNorm2d):
        for name, child in module.named_children():
            setattr(module, name, with_group_norm(child))
        return module
    channels, affine = module.num_features, module.affine
    norm = nn.GroupNorm(math.gcd(32, channels), channels, eps=module.eps, affine=affine)
    if affine:
        norm.weight = module.weight
        norm.bias = module.bias
    after = [layer for layer in module.children() if not isinstance(layer, nn.Identity)]
    return nn.Sequential(norm, *after) if after else norm

"""Image classification with any network: loss, exact validation, mixup, compile."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from distdl.models import compilers
from distdl.models.blocks import MemoryLayout, NamedBlock, blocks_of
from distdl.models.mixing import mix
from distdl.models.weights import load_weights
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import NotNegative, Positive
from distdl.util.seeds import stable_seed

log = logging.getLogger(__name__)

Compile = bool | Literal["default", "reduce-overhead", "max-autotune", "measured"]
Precision = Literal["highest", "high", "medium"]
Batch: TypeAlias = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


class ImageClassifier(LightningModule):
    """A network that maps images to logits, trained by cross-entropy.

    A batch is a dict with "image" [B, 3, H, W] and "label" int64 [B]. In validation, "weight"
    float32 [B] is 1 for rows that count and 0 for fillers. A pair (image, label) also works.

    Validation logs `val/loss` (cross-entropy without label smoothing), `val/acc1`, `val/acc5` (0 to
    1) and `val/samples`; a test logs the same as `test/...`. Sums over all samples are all-reduced
    once at the end, and then divided, so the values are the same at any world size. The class
    defines no optimizer (the optimizer node is attached to it) and logs nothing in training.

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
            "measured": in the fastest one, chosen before the training (`distdl.worker.compiling`).
        matmul_precision: Of float32 matrix products (torch.set_float32_matmul_precision, for the
            whole process): "highest" is exact; "high" rounds inputs to TF32's 11 bits on GPUs
            that support it, "medium" to bf16's 8. torch uses TF32 for convolutions there anyway.
        fused_bn: Accepted for frozen runs of earlier versions, without effect.
        weights: File of initial weights: torchvision's or timm's `.pth`, `.safetensors`, or a
            checkpoint.
        seed: Of mixup and cutmix, whose draws depend only on (seed, epoch, batch, rank).

    Raises:
        UserError: If an argument is out of its range.
    """

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
        seed: int = 0,
    ) -> None:
        super().__init__()
        node = {"norm": norm, "label_smoothing": label_smoothing, "mixup": mixup, "cutmix": cutmix}
        problems = list(self.check(node))
        if problems:
            raise UserError(*(replace(p, path=f"model.{p.path}") for p in problems))
        if weights is not None:
            load_weights(network, weights)
        if norm == "group":
            network = with_group_norm(network)
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
        self._sums = torch.zeros(4)

    @staticmethod
    def check(
        config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem]:
        """Problems of the arguments; paths are relative to the model node."""
        file = config.get("weights")
        if file and context and context["local"] and not Path(file).exists():
            yield Problem("weights", f"no such file: {file}", "a .pth, .safetensors or .ckpt file")
        if config.get("norm", "batch") not in ("batch", "group"):
            yield Problem("norm", f"is {config['norm']!r}", "model.norm=batch or model.norm=group")
        for name in ("mixup", "cutmix"):
            alpha = config.get(name, 0)
            if alpha < 0:
                yield Problem(name, f"is {alpha}, below 0", f"model.{name}=0 switches it off")
        if not 0 <= (smoothing := config.get("label_smoothing", 0)) < 1:
            what = f"is {smoothing}, not from 0 to below 1"
            yield Problem("label_smoothing", what, "model.label_smoothing=0.1")

    def configure_model(self) -> None:
        torch.set_float32_matmul_precision(self._matmul_precision)
        # "measured" is replaced by a mode before training or a benchmark; elsewhere it is ignored.
        if self._compile in (False, "measured") or self.network._compiled_call_impl is not None:
            return
        device = self._trainer.strategy.root_device if self._trainer else self.device
        compilers.refuse_without_compiler(device.type)
        compilers.keep_results()
        mode = "default" if self._compile is True else str(self._compile)
        compilers.compile_in_place(self.network, mode)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] to logits [B, num_classes]."""
        return self.network(images.contiguous(memory_format=self._layout))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        images, targets = self.pipeline_inputs(batch, batch_idx)
        return {"loss": self.pipeline_loss(self(images), targets)}

    # The interface for strategy=pipeline (docs/strategies/pipeline.md).

    def pipeline_blocks(self) -> list[NamedBlock]:
        """The network's blocks: called one after the other, they compute `forward`."""
        named = [(n if n is None else f"network.{n}", b) for n, b in blocks_of(self.network)]
        return [(None, MemoryLayout(self._layout)), *named]

    def pipeline_inputs(self, batch: Batch, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, H, W] and labels int64 [B], or mixed ones and float32 [B, num_classes]."""
        images, targets, _ = _parts(batch)
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

    def on_validation_epoch_start(self) -> None:
        # float64 for exact sums and counts; Apple's GPUs do not support it.
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._sums = torch.zeros(4, dtype=dtype, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels, weight = _parts(batch)
        logits = self(images).float()
        loss = F.cross_entropy(logits, labels, reduction="none")
        best = logits.topk(min(5, logits.shape[1])).indices
        hits = best == labels[:, None]
        rows = torch.stack((loss, hits[:, 0], hits.any(dim=1), torch.ones_like(loss)))
        # `where` and not a product, since an infinite loss times a weight of 0 is NaN.
        counted = torch.where(weight > 0, rows * weight, 0.0)
        self._sums += counted.to(self._sums.dtype).sum(dim=1)

    def on_validation_epoch_end(self) -> None:
        self._log_means("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_means("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Logits [B, num_classes], filler rows (weight 0) included."""
        return self(_parts(batch)[0])

    def _log_means(self, stage: str) -> None:
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        assert isinstance(sums, torch.Tensor)
        loss, top1, top5, samples = sums.tolist()
        count = samples or math.nan
        names = "loss", "acc1", "acc5"
        means = {f"{stage}/{n}": v / count for n, v in zip(names, (loss, top1, top5), strict=True)}
        # Lightning would recommend sync_dist, but all ranks have the same values.
        warnings.filterwarnings("ignore", message=rf"It is recommended to use `self.log\('{stage}/")
        self.log_dict({**means, f"{stage}/samples": samples}, rank_zero_only=False, sync_dist=False)


def _parts(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, labels, and weights float32 [B] (ones if the batch has none). These are where the
    labels are: in a pipeline, images are on `meta` in all stages but the first."""
    if isinstance(batch, Mapping):
        images = batch["image"]
        labels = batch["label"]
        weight = batch.get("weight")
    else:
        images, labels = batch
        weight = None
    if weight is None:
        weight = torch.ones(len(images), device=labels.device)
    return images, labels, weight.float()


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

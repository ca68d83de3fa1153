"""DDP with communication hooks on every device and a measured bucket size."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distdl.distributed import process_group
from distdl.strategies import hooks
from distdl.strategies.arrival_order import ArrivalOrder, arrange
from distdl.strategies.bucket_search import BucketSearch
from distdl.strategies.drifting import DriftingStrategy
from distdl.util.errors import Problem
from distdl.util.ranges import AboveZero, Count, Positive

log = logging.getLogger(__name__)

KEY = "ddp_arrival_order"  # in a checkpoint


class DDPStrategy(DriftingStrategy):
    """Lightning's DDPStrategy with the arguments below, its own, and DistributedDataParallel's.

    Args:
        comm_hook: What is sent instead of float32 gradients: "bf16" or "fp16" (half the bytes),
            "powersgd" (low-rank factors), "post_local_sgd" (weights every few steps; gradients only
            within each of several nodes; Lin et al. 2018, https://arxiv.org/abs/1808.07217).
        powersgd_rank: Rank of powersgd's factors.
        hook_start_step: Optimizer steps with plain all-reduces before powersgd or post_local_sgd.
        average_every: post_local_sgd: optimizer steps between two averages of the weights.
        bucket_cap_mb: Approximate size of gradient buckets (2^20 bytes); "auto" tries a few sizes
            during the first steps.
        first_bucket_mb: Size of the bucket that fills first, with the last layers. A small one is
            sent while most of the backward is still to run. Ignored with powersgd, which keeps
            state per bucket, and by a DDP without the argument `bucket_cap_mb_list`.
    """

    def __init__(
        self,
        comm_hook: hooks.Name = "none",
        powersgd_rank: Positive = 1,
        hook_start_step: Count = 1000,
        average_every: int = 4,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_mb: AboveZero = 1,
        **kwargs: Any,  # noqa: ANN401 - arguments of Lightning's own, passed on
    ) -> None:
        super().__init__(**kwargs)
        self.comm_hook = comm_hook
        self.powersgd_rank = powersgd_rank
        self.hook_start_step = hook_start_step
        self.average_every = average_every
        self.bucket_cap_mb = bucket_cap_mb
        self.first_bucket_mb = first_bucket_mb
        # Read from `_ddp_kwargs`, not `kwargs`: validation must see `kwargs` passed on unchanged.
        unset = inspect.signature(DistributedDataParallel).parameters.keys() - self._ddp_kwargs
        self._choose_first = "bucket_cap_mb_list" in unset
        self._hook: hooks.Hook | None = None
        self.search: BucketSearch | None = None
        self._steps = 0
        self._order: ArrivalOrder | None = None
        self._order_before: Sequence[str] = ()  # in the checkpoint
        self._frozen: list[torch.nn.Parameter] = []  # when the module was wrapped

    @staticmethod
    def check(config: Mapping[str, Any], context: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of the arguments; paths are relative to the strategy node."""
        hook = config.get("comm_hook", "none")
        size = config.get("bucket_cap_mb", 25)
        defaults = {"powersgd_rank": 1, "hook_start_step": 1000, "average_every": 4}
        values = {name: config.get(name, default) for name, default in defaults.items()}
        for name, users in hooks.SETTINGS.items():
            if values[name] != defaults[name] and hook not in users:
                yield Problem(
                    name,
                    what=f"has no effect with strategy.comm_hook={hook}",
                    remedy=f"strategy.comm_hook={users[0]}, or leave strategy.{name} out",
                    code="conflict",
                )
        least = hooks.PLAIN_STEPS
        if hook == "powersgd" and values["hook_start_step"] < least:
            yield Problem(
                "hook_start_step",
                what=f"must be {least} or more: DDP rearranges its buckets in the first steps",
                remedy=f"strategy.hook_start_step={least}",
                code="out-of-range",
            )
        if values["average_every"] < 2:
            yield Problem(
                "average_every",
                what="must be 2 or more: with 1, plain DDP (comm_hook=none) does the same",
                remedy="strategy.average_every=4",
                code="out-of-range",
            )
        if isinstance(size, (int, float)) and size <= 0:
            yield Problem(
                "bucket_cap_mb",
                what="must be more than 0",
                remedy="strategy.bucket_cap_mb=25",
                code="out-of-range",
            )
        if size == "auto" and hook == "powersgd":
            yield Problem(
                "bucket_cap_mb",
                what="powersgd keeps its errors per bucket, so the buckets must not change",
                remedy="strategy.bucket_cap_mb=25",
                code="conflict",
            )
        mode = (context.get("config", {}).get("model") or {}).get("compile")
        if size == "auto" and mode:
            yield Problem(
                "bucket_cap_mb",
                what=f"model.compile={mode} splits its code by the buckets, which must not change",
                remedy="strategy.bucket_cap_mb=25, or model.compile=false",
                code="conflict",
            )
        if hook != "none" and (config.get("ddp_comm_hook") or config.get("ddp_comm_state")):
            yield Problem(
                "ddp_comm_hook",
                what=f"conflicts with strategy.comm_hook={hook}",
                remedy="leave one of the two out",
                code="conflict",
            )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self._steps = int(checkpoint.get("global_step", 0))
        self._order_before = checkpoint.get(KEY, ())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None
    ) -> None:
        """Adds the order in which gradients arrive; other strategies ignore it."""
        if self._order is not None:
            names = self._order.names if self._order.complete else self._order_before
            checkpoint = {**checkpoint, KEY: [*names]}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def configure_ddp(self) -> None:
        """Wraps the module, unless it is alone: one device sends nothing, and the wrapper would
        only cost time (2 % of a step of ResNet-50 on one H200)."""
        if self.world_size == 1:
            if self.comm_hook != "none":
                hook = self.comm_hook
                log.warning("strategy.comm_hook=%s: ignored, one device sends nothing", hook)
            return
        if self.comm_hook != "none":
            self._hook = hooks.make(
                self.comm_hook,
                powersgd_rank=self.powersgd_rank,
                start_step=self.hook_start_step,
                step=self._steps,
                per_node=self.num_processes,
            )
        if self.bucket_cap_mb == "auto":
            trained = [p for p in self.lightning_module.parameters() if p.requires_grad]
            size = sum(p.numel() * p.element_size() for p in trained) / 2**20
            self.search = BucketSearch(size, process_group.gather)
        super().configure_ddp()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        size = self.search.size if self.search else float(self.bucket_cap_mb)
        self._ddp_kwargs["bucket_cap_mb"] = size
        if self._choose_first:
            # Setting bucket_cap_mb disables DDP's own first bucket of 1 MB.
            two_sizes = self.first_bucket_mb < size and self.comm_hook != "powersgd"
            sizes = [self.first_bucket_mb, size] if two_sizes else None
            self._ddp_kwargs["bucket_cap_mb_list"] = sizes
        # Lightning would build DDP on a side stream. All gradients would then be accumulated on
        # that stream, and the stream and each backward would wait for each other.
        ids = self.determine_ddp_device_ids()
        if self._order is not None:
            self._order.stop()
        # The sum of two values does not depend on their order, and with find_unused_parameters DDP
        # does not change its buckets.
        matters = self.world_size > 2 and not self._ddp_kwargs.get("find_unused_parameters")
        self._order = ArrivalOrder(model) if matters else None
        return DistributedDataParallel(model, device_ids=ids, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only and ignores them silently elsewhere.
        assert isinstance(self.model, DistributedDataParallel)
        if self._hook is not None:
            self.model.register_comm_hook(*self._hook)
        else:
            _register_ddp_comm_hook(
                self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
            )

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        # DDP averages only parameters that were trainable when it was built, and
        # BackboneFinetuning unfreezes others later.
        if any(parameter.requires_grad for parameter in self._frozen):
            self._wrap_again()
        names = self._order_before
        self._order_before = ()
        # Hooks that keep a state per bucket start with plain steps of their own.
        if names and self._order is not None and self.comm_hook in ("none", "bf16", "fp16"):
            assert isinstance(self.model, DistributedDataParallel)
            arrange(self.model, names)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        if self.search is None or self.search.done:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:
            self._finish_queued()
            started = time.perf_counter()
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._finish_queued()
            changed = self.search.add_step(time.perf_counter() - started)
            if self.search.done:
                log.info("strategy.bucket_cap_mb=auto: %s", self.search.describe())
            if changed:
                self._wrap_again()
        self._steps += 1
        local = self._steps - self.hook_start_step
        if self._hook is not None and self.comm_hook == "post_local_sgd" and local > 0:
            self.drifted()
            if local % self.average_every == 0:
                self.meet()
        return output

    def _wrap_again(self) -> None:
        """Wraps the module in a new DDP, since DDP cannot change its buckets."""
        assert isinstance(self.model, DistributedDataParallel)
        self.model._remove_autograd_hooks()
        # Gradients may be views into the old buckets; the step has used them already.
        for parameter in self.lightning_module.parameters():
            parameter.grad = None
        kept = self._ddp_kwargs
        self._ddp_kwargs = {**kept, "init_sync": False}
        self.model = self._setup_model(self.lightning_module)
        self._ddp_kwargs = kept
        self._register_ddp_hooks()

    def _finish_queued(self) -> None:
        if self.root_device.type == "cuda":
            torch.cuda.synchronize()

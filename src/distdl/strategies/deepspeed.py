"""DeepSpeed's ZeRO under Lightning, on GPUs and (with gloo, without a compiler) on CPUs.

Lightning's DeepSpeedStrategy lacks portable checkpoints, batch norm in mixed precision,
accumulation and clipping as under DDP, and a validation after the training. This one adds them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distdl.checkpoint import deepspeed_folder, portable, sharded_folder
from distdl.distributed import process_group
from distdl.optim import layerwise, uncovered
from distdl.runs.checkpoints import remove
from distdl.strategies import deepspeed_state, sharing
from distdl.strategies.deepspeed_precision import AutocastPrecision
from distdl.strategies.deepspeed_settings import INSTALL, find, settings_of
from distdl.util.errors import Problem, UserError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class DeepSpeedStrategy(sharing.Sliced, LightningDeepSpeed):
    """ZeRO (Rajbhandari et al. 2020): partitions the state of which DDP has a copy on every rank.

    Args:
        stage: 1 partitions optimizer state; 2 also gradients; 3 also weights.
        offload_optimizer: Keep optimizer state in host memory, and step there.
        offload_parameters: Keep weights in host memory (stage 3).
        overlap_comm: Reduce gradients during the backward.
        reduce_bucket_size, allgather_bucket_size: Elements per bucket.
        config: A JSON file of DeepSpeed's settings, instead of the arguments above; "auto" and
            missing keys are filled in. Relative to the current folder or your project's root.
        autotune: Measure micro-batches and stages before the training (`worker.autotune`).

    Raises:
        UserError: DeepSpeed is not installed, or the file cannot be read.
    """

    ends_between_steps = False  # gradients that wait for a step are each rank's own
    unfreezes = False  # what is trained is laid out once, at the start

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        overlap_comm: bool = True,
        reduce_bucket_size: int = 200_000_000,
        allgather_bucket_size: int = 200_000_000,
        config: str | None = None,
        autotune: bool = False,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError.at(
                "strategy", what="DeepSpeed is not installed", remedy=INSTALL, code="not-installed"
            )
        if not torch.cuda.is_available():  # DeepSpeed reads the variable at import
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            overlap_comm=overlap_comm,
            reduce_bucket_size=reduce_bucket_size,
            allgather_bucket_size=allgather_bucket_size,
            config=settings_of(find(config)) if config else None,
            logging_level=logging.ERROR,  # DeepSpeed warns of every optimizer that is not its own
        )
        assert isinstance(self.config, dict)
        self.config.setdefault("zero_allow_untested_optimizer", True)  # torch's own: SGD, AdamW
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # that one needs a compiler
        # DeepSpeed's own timer syncs the device three times a step; StepMetrics needs no sync.
        self.config.setdefault("timers", {"throughput": {"enabled": False}})
        self.autotune = autotune
        self._engine: Any = None
        self._names: list[list[str]] = []
        # The optimizer's groups, if nothing is trained yet of some of them.
        self._groups: list[dict[str, Any]] = []
        self._indexed = False

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of the strategy node; paths are relative to it."""
        trainer = context["config"]["trainer"]
        local = context["local"]
        if local and importlib.util.find_spec("deepspeed") is None:
            yield Problem(
                "",
                what="needs DeepSpeed, which is not installed",
                remedy=INSTALL,
                code="not-installed",
            )
        if node.get("offload_parameters") and node.get("stage", 2) != 3:
            yield Problem(
                "offload_parameters",
                what="only stage 3 can keep weights in host memory",
                remedy="strategy.stage=3",
                code="unsupported",
            )
        if context["accelerator"] == "mps":
            yield Problem(
                "",
                what="does not run on Apple's GPUs",
                remedy="trainer.accelerator=cpu",
                code="unsupported",
            )
        if trainer.get("gradient_clip_val") and trainer.get("gradient_clip_algorithm") == "value":
            yield Problem(
                "",
                what="DeepSpeed clips by the norm, not by value",
                remedy="trainer.gradient_clip_algorithm=norm",
                code="unsupported",
            )
        name, _ = layerwise.of_config(context["config"])
        yield from layerwise.refuse_parts(name, "ZeRO")
        if node.get("stage", 2) == 3:
            yield from sharing.refuse_averaging(context["config"])
        if trainer.get("sync_batchnorm"):
            yield Problem(
                "",
                what="does not synchronise batch norm",
                remedy="trainer.sync_batchnorm=false",
                code="unsupported",
            )
        if node.get("config") and local:
            try:
                settings_of(find(str(node["config"])))
            except UserError as error:
                yield from error.problems

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision):
            precision: Any = plugin.precision  # stated more widely than DeepSpeed's own
            plugin = AutocastPrecision(precision)
        self._precision_plugin = plugin

    @property
    def handles_gradient_accumulation(self) -> bool:
        # Lightning already divides the loss; DeepSpeed would divide it again. DeepSpeed would also
        # carry the last batches of an epoch over into the next one.
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        # deepspeed.initialize needs a device index, and a CPU has none.
        return torch.device("cpu", 0) if self._indexed and device.type == "cpu" else device

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # Lightning's own insists on CUDA

    def setup_distributed(self) -> None:
        import deepspeed

        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device.type
        # DeepSpeed uses an existing process group; a single process has none yet.
        _init_dist_connection(self.cluster_environment, process_group.backend(device))
        if device == "cpu":
            use_cpu()
            # Else DeepSpeed compiles an extension, which takes a minute and needs ninja.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._process_group_backend = "nccl" if device == "cuda" else "gloo"
        self._init_deepspeed_distributed()

    def _set_node_environment_variables(self) -> None:
        super()._set_node_environment_variables()
        if self.root_device.type == "cuda":
            # DeepSpeed uses LOCAL_RANK as the GPU's index, which is 0 if a rank sees only one GPU.
            for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys():
                os.environ[name] = str(self.root_device.index)

    def setup(self, trainer: Trainer) -> None:
        self._unwrap()
        super().setup(trainer)
        if self.model is not self.lightning_module:
            self._engine = self.model
        if isinstance(self.precision_plugin, AutocastPrecision):
            manual = not trainer.lightning_module.automatic_optimization
            self.precision_plugin.optimizes_manually = manual

    def _format_config(self) -> None:
        """Lightning writes it; here, mixed precision is by autocast, unless a dtype is chosen."""
        assert isinstance(self.config, dict)
        chosen = self.config.keys() & {"bf16", "fp16", "torch_autocast"}
        super()._format_config()
        plugin = self.precision_plugin
        if not isinstance(plugin, AutocastPrecision) or chosen:
            return
        if plugin.precision == "bf16-mixed":
            # Autocast, as under DDP: DeepSpeed's bf16 casts all weights to bf16, which batch norm
            # does not support on the CPU. No module is "safe", so gradients are reduced in float32.
            self.config.pop("bf16", None)
            autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
            self.config["torch_autocast"] = autocast
            plugin.autocasts_on = self.root_device.type

    def _setup_model_and_optimizer(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | ReduceLROnPlateau | None = None,
    ) -> tuple[DeepSpeedEngine, Optimizer]:
        if optimizer is not None:
            name, _ = layerwise.of_optimizer(optimizer)
            layerwise.refuse_own(layerwise.refuse_parts(name, "ZeRO"))
            uncovered.look(self.lightning_module, [optimizer], speaks=self.is_global_zero)
        # Read the names first: afterwards the optimizer has flat partitions.
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._names = portable.names_of(optimizer, model) if optimizer else [trained]
        if optimizer is not None and self._flattens:
            self._groups = deepspeed_state.set_aside_frozen(optimizer, lr_scheduler)
        sharing.to_default_layout(model)
        with self._device_index():
            engine, optimizer = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        engine.set_gradient_accumulation_boundary(True)
        return engine, optimizer

    @property
    def _flattens(self) -> bool:
        """Whether ZeRO flattens the parameters: in stages 1 to 3."""
        assert isinstance(self.config, dict)
        return bool((self.config.get("zero_optimization") or {}).get("stage"))

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        assert isinstance(self.config, dict)
        if not self.zero_stage_3:  # every rank has all weights
            self.model_to_device()
            return
        sharing.to_default_layout(model)
        with self._device_index():
            super()._initialize_deepspeed_inference(model)

    @contextmanager
    def _device_index(self) -> Iterator[None]:
        self._indexed = True
        try:
            yield
        finally:
            self._indexed = False

    def _unwrap(self) -> None:
        """Destroys the engine and turns its module into an ordinary one again."""
        if self._engine is None or self.lightning_module is None:
            return
        module, engine = self.lightning_module, self._engine
        self._engine = None
        full = deepspeed_state.weights(engine, module, self.root_device, keep=True)
        engine.destroy()
        for owner_name, owner in module.named_modules():
            owner._parameters = dict(owner._parameters)  # stage 3 had replaced the dict
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    full_name = f"{owner_name}.{name}".removeprefix(".")
                    value = full[full_name].to(self.root_device)
                    owner._parameters[name] = nn.Parameter(value, parameter.requires_grad)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full weights on rank 0; empty if DeepSpeed writes the checkpoint. Collective."""
        sharing.agree_on_buffers(self.lightning_module)
        if self.sharded_checkpoints:
            return {}
        if self._engine is None:
            return self.lightning_module.state_dict()
        return deepspeed_state.weights(
            self._engine, self.lightning_module, self.root_device, keep=self.is_global_zero
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as in `distdl.checkpoint.portable`, complete on rank 0. Collective."""
        if self.sharded_checkpoints:
            return {}
        return deepspeed_state.optimizer_state(
            self._engine,
            self.lightning_module,
            names=self._names,
            groups=self._groups,
            device=self.root_device,
            keep=self.is_global_zero,
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None
    ) -> None:
        if self.sharded_checkpoints:
            # Under a key of our own, since DeepSpeed adds entries beside it.
            rest = {k: v for k, v in checkpoint.items() if k not in sharded_folder.SHARDED}
            folder = self.broadcast(str(filepath))
            if self.is_global_zero:  # an interrupted save may have left files of more ranks
                remove(Path(folder))
            self.barrier()
            self._engine.save_checkpoint(folder, "checkpoint", {deepspeed_folder.TRAINER: rest})
        else:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._unwrap()
        if any(hasattr(p, "ds_id") for p in self.lightning_module.parameters()):
            # Built in `configure_model`, where Lightning partitions parameters on creation.
            self._restore_zero_state(checkpoint, strict=strict)
        else:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        engine, module = self._engine, self.lightning_module
        (state,) = checkpoint["optimizer_states"]
        deepspeed_state.load_optimizer_state(engine, module, self._names, self._groups, state)
        if engine.bfloat16_enabled() or engine.fp16_enabled():
            deepspeed_state.load_masters(engine, module, checkpoint["state_dict"])


def use_cpu() -> None:
    """Makes DeepSpeed use the CPU even if the machine has GPUs."""
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())

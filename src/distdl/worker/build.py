"""From the config to Trainer, module, data module and callbacks: the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler, OptimizerLRSchedulerConfig
from omegaconf import DictConfig

from distdl.callbacks import Checkpointer, ModuleState, Pictures, RecordSamples, StepMetrics
from distdl.callbacks.adapters import Adapters
from distdl.callbacks.averages import AveragedWeights
from distdl.checkpoint import portable
from distdl.checkpoint.formats import AnyCheckpoint
from distdl.config import batches, degrees, schema, task_facts
from distdl.config.recipe import plain, seconds_of
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.distributed import process_group
from distdl.job import Resources
from distdl.loops.trainer import Trainer
from distdl.models import lora, recompute
from distdl.models.evaluated import Evaluated
from distdl.models.parts import layers_in
from distdl.models.weights import read_published_without_code
from distdl.optim import learning_rates, optimizers, parameter_groups
from distdl.optim.averages import exchanges
from distdl.optim.budget import TimeBudget
from distdl.optim.schedules import length_of
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.checkpoints import CheckpointStore, manifest_at
from distdl.runs.directory import Attempt, RunDirectory
from distdl.strategies import PipelineStrategy
from distdl.strategies.sharing import to_default_layout
from distdl.validation.meta import targets_own
from distdl.validation.signatures import with_dtypes

log = logging.getLogger(__name__)


@dataclass
class Built:
    """A built run, as a task receives it."""

    config: DictConfig
    run: RunDirectory
    trainer: Trainer
    module: LightningModule
    datamodule: LightningDataModule | None
    metrics: StepMetrics
    checkpointer: Checkpointer
    checkpoint: str | None = None  # the file or folder to resume from
    own_optimizer: bool = False  # the module defines `configure_optimizers`

    @property
    def data(self) -> str:
        """The `_target_` of the data, or of the model if it has its own loaders."""
        return str((self.config.get("data") or self.config.model).get("_target_"))

    def release(self) -> None:
        """Frees what outlives the Trainer: DeepSpeed's engine."""
        engine = getattr(self.trainer.strategy, "_engine", None)
        if engine is not None:
            engine.destroy()

    @property
    def has_trained(self) -> bool:
        """Whether any attempt of this run trains."""
        return any(task_facts.of_target(each.task).trains for each in self.run.attempts())


def build(
    config: DictConfig,
    run: RunDirectory,
    attempt: Attempt,
    environment: Environment,
    resources: Resources,
    stop: StopRequest,
    loggers: list[Any],
    checkpoint: str | None = None,
    *,
    monitor_typed: bool = False,
    again: bool = False,
) -> Built:
    """Builds the run on this rank.

    Args:
        config: The recipe merged with where the attempt runs.
        checkpoint: To resume from, the same on all ranks.
        monitor_typed: Whether the user has typed `checkpoint.monitor`.
        again: Whether a fit was left (`loops.fit.Rebuilt`), to go on with this one.
    """
    _, _, accumulate = batches.factors(config, resources)
    global_batch = batches.global_batch_size(config, resources)
    position = TrainPosition()
    # Every rank gets the same weights, whether or not the strategy broadcasts them.
    seed_everything(config.seed, workers=True, verbose=False)
    module = make_module(config.model)
    modules = ModuleState(module)
    datamodule = make(config.get("data")) if config.get("data") else None
    own_optimizer = configures_optimizers(module)
    nodes = (config.get("callbacks") or {}).items()
    callbacks = [make(node) for _, node in nodes if node]  # null removes a callback
    strategy = make(config.strategy)
    if checkpoint and isinstance(strategy, PipelineStrategy):
        strategy.kept_split = manifest_at(Path(checkpoint)).get("split")
    limit = config.trainer.get("max_time")
    budget = None if limit is None else TimeBudget(seconds_of(limit))
    if not own_optimizer:
        attach_optimizer(module, config, global_batch, position, budget)
    if isinstance(strategy, ModelParallelStrategy):
        to_default_layout(module)  # torch sends the weights of a file by their order in memory
    rank, world_size = data_share(strategy, environment)
    distribute(
        datamodule if datamodule is not None else module,
        rank=rank,
        world_size=world_size,
        seed=config.seed,
        position=position,
        # Overfitting needs the same batches in every epoch.
        shuffle=False if config.trainer.get("overfit_batches") else None,
        share=bool(config.trainer.get("use_distributed_sampler", True)),
    )
    metrics = StepMetrics(None, attempt, position)
    checkpointer = Checkpointer(
        CheckpointStore(run.checkpoints),
        stop,
        position,
        global_batch_size=global_batch,
        accumulate=accumulate,
        optimizer=None if own_optimizer else plain(config.get("optimizer")),
        seed=config.seed,
        modules=modules,
        settings=schema.Checkpoint.of(config.checkpoint),
        monitor_typed=monitor_typed,
        budget=budget,
    )
    for callback in callbacks:
        if isinstance(callback, RecordSamples):
            callback.run_dir = run.path
            callback.attempt = attempt.number
    averages = [] if own_optimizer or not keeps_averages(config) else [AveragedWeights()]
    callbacks = [modules, *averages, metrics, *callbacks]
    if hasattr(module, "drawing"):
        callbacks.append(Pictures(run.path, attempt.path))
    callbacks.append(checkpointer)
    if config.model.get(lora.KEY) is not None:
        callbacks.append(Adapters(module))
    trainer = build_trainer(config, strategy, environment, resources, callbacks, loggers, run)
    if isinstance(module, Evaluated) and not getattr(strategy, "unfreezes", True):
        unfreeze_at = module.unfreeze_at
        if unfreeze_at is None or not (again or next_epoch(checkpoint, run) >= unfreeze_at):
            checkpointer.rebuild_at = unfreeze_at
        else:
            module.lay_out_all()
    return Built(
        config=config,
        run=run,
        trainer=trainer,
        module=module,
        datamodule=datamodule,
        metrics=metrics,
        checkpointer=checkpointer,
        checkpoint=checkpoint,
        own_optimizer=own_optimizer,
    )


def next_epoch(checkpoint: str | None, run: RunDirectory) -> int:
    """The epoch that a resume from a checkpoint begins with or goes on in, by its manifest; 0 if it
    is not one of this run, of which a new run may take the weights alone."""
    if checkpoint is None or not Path(checkpoint).is_relative_to(run.path):
        return 0
    manifest = manifest_at(Path(checkpoint))
    epoch = manifest.get("epoch")
    if not isinstance(epoch, int):
        return 0
    return epoch + (manifest.get("reason") == "epoch")


def data_share(strategy: object, environment: Environment) -> tuple[int, int]:
    """(rank, count) among the ranks that read different data. A strategy's method `data_share` may
    change them: the stages of a pipeline read the same data, as do the ranks of a tensor-parallel
    group of Lightning's strategy."""
    rank, world_size = environment.rank, environment.world_size
    if share_of := getattr(strategy, "data_share", None):
        return share_of(rank, world_size)
    if not isinstance(strategy, ModelParallelStrategy):
        return rank, world_size
    sizes = {
        degrees.DATA: strategy._data_parallel_size,
        degrees.TENSOR: strategy._tensor_parallel_size,
    }
    nodes = max(1, world_size // environment.local_world_size)
    degrees.MESH.refuse(sizes, world_size, nodes)
    shares = degrees.MESH.shares(sizes, world_size, nodes)
    return rank // (world_size // shares), shares


def make(node: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - whatever the node names
    """Instantiates a `_target_` node. Containers become plain Python ones unless `_convert_` says
    otherwise, and text such as `float32` becomes a dtype where one is expected. Raises the original
    error, not Hydra's."""
    if isinstance(node, DictConfig):
        values = plain(node)
        typed: Any = with_dtypes(values)
        if typed != values:
            node = typed
    read_published_without_code()  # by now the check of the targets has imported torchvision
    try:
        return instantiate(node, _convert_=(node or {}).get("_convert_", "all"))
    except InstantiationException as error:
        raise error.__cause__ or error from None


def make_module(node: Mapping[str, Any]) -> LightningModule:
    """The model, with adapters (`model.lora`), and of which some blocks recompute their activations
    (`model.recompute`).

    Raises:
        UserError: It has no such layers or blocks.
    """
    values = plain(node) if isinstance(node, DictConfig) else node
    typed: Any = with_dtypes(targets_own(values))
    module: LightningModule = make(typed)
    lora.apply(module, values.get(lora.KEY))
    recompute.apply(module, values.get(recompute.KEY))
    return module


def keeps_averages(config: DictConfig) -> bool:
    """Whether the config's optimizer exchanges the weights for their average."""
    target = plain(config.get("optimizer")).get("_target_")
    return bool(target) and exchanges(get_object(str(target)))


def configures_optimizers(module: LightningModule) -> bool:
    return type(module).configure_optimizers is not LightningModule.configure_optimizers


def attach_optimizer(
    module: LightningModule,
    config: DictConfig,
    declared: int | None,
    position: TrainPosition,
    budget: TimeBudget | None = None,
) -> None:
    """Makes the module's `configure_optimizers` build the config's optimizer and schedule, for the
    global batch of the loaders (`position`) or, if they do not state it, the `declared` one, and
    for the time of the training, if that is limited."""
    optimizer_node = plain(config.get("optimizer"))
    schedule_node = plain(config.get("schedule"))
    if not optimizer_node:
        return
    rates: list[learning_rates.LayerRate] = []
    heads: list[str] = []
    if optimizer_node.get("_target_") in parameter_groups.WITH_FALLBACK:
        layers, last = layers_in(module)
        heads = [name for layer in last for name in layers[layer]]
    if any(optimizer_node.get(key) is not None for key in learning_rates.OF_LAYERS):
        rates = learning_rates.layer_rates(*layers_in(module), optimizer_node)

    def configure_optimizers(self: LightningModule) -> OptimizerLRScheduler:
        self.trainer.fit_loop.setup_data()  # rate and schedule depend on the loaders
        reference = learning_rates.RateScaling.of(optimizer_node).reference
        per_step = (position.samples or 0) * self.trainer.accumulate_grad_batches
        optimizer = optimizers.build_optimizer(
            self,
            optimizer_node,
            global_batch=per_step or declared or reference,
            fuse=may_fuse(config),
            rates=rates,
            later=self.trained_later if isinstance(self, Evaluated) else (),
            heads=heads,
        )
        if not schedule_node:
            return optimizer
        if not self.automatic_optimization and self.trainer.is_global_zero:
            log.warning(
                "the model steps its optimizers itself and must step its schedule too: call "
                "self.lr_schedulers().step() in training_step, or set schedule=none"
            )
        schedule: Any = optimizers.build_schedule(
            optimizer, schedule_node, **dataclasses.asdict(length_of(self.trainer)), budget=budget
        )
        both: OptimizerLRSchedulerConfig = {"optimizer": optimizer, "lr_scheduler": schedule}
        return both

    module.configure_optimizers = functools.partial(configure_optimizers, module)  # type: ignore[method-assign]


def may_fuse(config: DictConfig) -> bool:
    """Whether an optimizer may use its fused kernel by default. With 16-mixed, a fused step
    unscales gradients itself, after they were clipped; Lightning refuses this combination.
    DeepSpeed's optimizers have their own keys to choose a kernel."""
    trainer = schema.TrainerArguments.of(config.trainer)
    half = trainer.precision_name in ("16", "16-mixed")
    clips = bool(trainer.gradient_clip_val)
    strategy = str((config.get("strategy") or {}).get("_target_"))
    return not (half and clips) and not strategy.endswith("DeepSpeedStrategy")


class Unprofiled(PassThroughProfiler):
    """Lightning's profiler that does nothing, with one shared context. Lightning calls it 35 times
    per step of a default run, and its new generator per call takes four times as long."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> nullcontext[None]:  # type: ignore[override]
        return self._nothing


@runtime_checkable
class WritesShards(Protocol):
    """A strategy whose ranks may each write their part of a checkpoint."""

    sharded_checkpoints: bool


def build_trainer(
    config: DictConfig,
    strategy: Strategy | str,
    environment: Environment,
    resources: Resources,
    callbacks: list[Callback],
    loggers: list[Any],
    run: RunDirectory,
) -> Trainer:
    """Builds the Trainer. distdl sets its devices, plugins, callbacks and loggers."""
    arguments = dict(make(config.trainer))  # a profiler or a timedelta may be a node
    arguments.pop("use_distributed_sampler", None)  # see below
    # Lightning's Timer would broadcast its answer at every step: the Checkpointer counts the time.
    if arguments.pop("max_time", None) is not None and arguments.get("max_epochs") is None:
        arguments["max_epochs"] = -1
    arguments.update(
        accelerator=process_group.accelerator_of(environment, resources.accelerator),
        devices=environment.local_world_size,
        num_nodes=resources.num_nodes,
        profiler=arguments.get("profiler") or Unprofiled(),
    )
    if arguments.get("benchmark") is None:  # cudnn's search may choose non-deterministic kernels
        arguments["benchmark"] = not arguments.get("deterministic")
    if schema.Checkpoint.of(config.checkpoint).sharded:
        assert isinstance(strategy, WritesShards)  # as validation has checked
        strategy.sharded_checkpoints = True
    process_group.give_backends(strategy, resources.accelerator)
    trainer = Trainer(
        **arguments,
        strategy=strategy,
        plugins=[process_group.LaunchedEnvironment(environment), AnyCheckpoint()],
        callbacks=callbacks,
        logger=loggers or False,
        default_root_dir=Path(run.path),
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        # Our Checkpointer writes checkpoints; a user's ModelCheckpoint may write others.
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        # `distribute` divides the data among the ranks, and makes a resume exact.
        use_distributed_sampler=False,
    )
    portable.use_names(trainer.strategy)
    return trainer

"""What Lightning 1 had and Lightning 2 has not, with what took its place: told before the start.

A hook that was renamed is the worst of it: it is never called, and nobody says so. The tables
follow https://lightning.ai/docs/pytorch/stable/upgrade/migration_guide.html.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any


def _table(text: str) -> dict[str, str]:
    rows = [line.strip().partition(": ") for line in text.strip().splitlines()]
    return {name: instead for names, _, instead in rows for name in names.split()}


TRAINER = _table("""
    gpus num_processes auto_select_gpus tpu_cores ipus: trainer.devices=N
    amp_backend amp_level: trainer.precision=16-mixed or bf16-mixed
    auto_lr_find: choose optimizer.lr (lightning.pytorch.tuner.Tuner finds one, in a script)
    auto_scale_batch_size: choose data.batch_size
    checkpoint_callback: choose what is saved by checkpoint.*
    distributed_backend: choose the strategy by its group: strategy=ddp
    flush_logs_every_n_steps: an argument of those loggers that know it, under tracking
    log_gpu_memory: +callbacks.devices._target_=lightning.pytorch.callbacks.DeviceStatsMonitor
    move_metrics_to_cpu: move them in the module
    multiple_trainloader_mode: let train_dataloader return a CombinedLoader of that mode
    prepare_data_per_node: set self.prepare_data_per_node in the data module
    progress_bar_refresh_rate process_position: callbacks.progress=null takes the bar away
    reload_dataloaders_every_epoch: trainer.reload_dataloaders_every_n_epochs=1
    replace_sampler_ddp: trainer.use_distributed_sampler
    resume_from_checkpoint: checkpoint.resume_from=FILE
    stochastic_weight_avg: lightning.pytorch.callbacks.StochasticWeightAveraging, under callbacks
    terminate_on_nan: trainer.detect_anomaly=true
    track_grad_norm: log lightning.pytorch.utilities.grad_norm in on_before_optimizer_step
    truncated_bptt_steps: split the sequence in training_step, with automatic_optimization = False
    weights_save_path: output_dir=FOLDER
    weights_summary: trainer.enable_model_summary=true or false
""")
# Values of trainer.accelerator that named a strategy.
ACCELERATORS = ("ddp", "ddp2", "ddp_cpu", "ddp_sharded", "ddp_spawn", "dp", "horovod")
HOOKS = _table("""
    training_epoch_end: on_train_epoch_end, for which the step keeps its outputs in self
    validation_epoch_end: on_validation_epoch_end, for which the step keeps its outputs in self
    test_epoch_end: on_test_epoch_end, for which the step keeps its outputs in self
    training_step_end validation_step_end test_step_end: the end of the step itself
    on_epoch_start: on_train_epoch_start, on_validation_epoch_start
    on_epoch_end: on_train_epoch_end, on_validation_epoch_end
    on_batch_start: on_train_batch_start
    on_batch_end: on_train_batch_end
    on_pretrain_routine_start on_pretrain_routine_end: on_fit_start
    on_init_start on_init_end on_configure_sharded_model on_before_accelerator_backend_setup: setup
    on_keyboard_interrupt: on_exception
    on_hpc_save: on_save_checkpoint
    on_hpc_load: on_load_checkpoint
    on_train_dataloader on_val_dataloader on_test_dataloader on_predict_dataloader: setup
    get_progress_bar_dict: self.log(..., prog_bar=True)
    tbptt_split_batch: training_step, with automatic_optimization = False
""")
ARGUMENTS = _table("""
    optimizer_idx opt_idx: self.automatic_optimization = False, and step each of self.optimizers()
    on_tpu using_native_amp using_lbfgs: leave it out
    outputs: keep them in an attribute of the module
    hiddens: split the sequence in training_step, with automatic_optimization = False
""")
# The Trainer itself refuses to start with these, whoever calls them.
_REFUSED = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
# How many arguments a step is given, which the base class does not say; and what else is called.
_STEPS = {"training_step": 2, "validation_step": 3, "test_step": 3, "predict_step": 3}
_CALLED = ("backward", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step")


def problems(
    called: type, base: type, own: Callable[[str], bool]
) -> Iterator[tuple[str, str, bool]]:
    """Hooks of Lightning 1 in a class.

    Args:
        called: The class.
        base: LightningModule, LightningDataModule or Callback.
        own: Whether a dotted name is one of the user's own code.

    Yields:
        What is wrong, the remedy, and whether it must not start so: a hook that nobody calls may
        stand in a library for the sake of older versions.
    """
    for name in dir(called):
        function = inspect.getattr_static(called, name)
        if not inspect.isfunction(function):
            continue
        shown, home = f"{called.__name__}.{name}", f"{function.__module__}.x"
        refused = base.__name__ == "LightningModule" and name in _REFUSED
        if refused or (name in HOOKS and not _is_used(called, name)):
            what = f"{shown} is a hook of Lightning 1, and nobody calls it"
            yield what, f"it is now {HOOKS[name]}", refused or own(home)
        elif hasattr(base, name) and (name.startswith("on_") or name in (*_STEPS, *_CALLED)):
            given = [p.name for p in _places(getattr(base, name))]
            count = _STEPS.get(name, len(given))
            for place, argument in enumerate(_places(function)):
                other = argument.name in ARGUMENTS and argument.name not in given
                if other if place < count else argument.default is argument.empty:
                    what = f"{shown} takes {argument.name}, which Lightning 2 does not pass"
                    yield what, ARGUMENTS.get(argument.name, "leave it out"), True


def _places(function: Any) -> list[inspect.Parameter]:
    """The arguments that are taken by position, without `self`."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _is_used(called: type, name: str) -> bool:
    """Whether a method of the class, other than that hook itself, speaks of it."""
    methods = [f for c in called.__mro__ for n, f in vars(c).items() if n != name]
    return any(inspect.isfunction(f) and _speaks_of(f.__code__, name) for f in methods)


def _speaks_of(code: CodeType, name: str) -> bool:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return name in code.co_names or any(_speaks_of(c, name) for c in inner)

"""What Lightning 2 removed from Lightning 1, with the replacements.

A renamed hook is the worst case: it is never called, and no message says so. The tables follow
https://lightning.ai/docs/pytorch/stable/upgrade/migration_guide.html.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

from distdl.config.words import table

TRAINER = table("""
    gpus num_processes auto_select_gpus tpu_cores ipus: trainer.devices=N
    auto_lr_find auto_scale_batch_size: choose optimizer.lr, data.batch_size
    checkpoint_callback: choose what is saved by checkpoint.*
    multiple_trainloader_mode: let train_dataloader return a CombinedLoader of that mode
    progress_bar_refresh_rate: callbacks.progress=null removes the bar
    reload_dataloaders_every_epoch: trainer.reload_dataloaders_every_n_epochs=1
    replace_sampler_ddp: trainer.use_distributed_sampler
    resume_from_checkpoint: checkpoint.resume_from=FILE
    terminate_on_nan: trainer.detect_anomaly=true
    track_grad_norm: log lightning.pytorch.utilities.grad_norm in on_before_optimizer_step
    weights_summary: trainer.enable_model_summary=true or false
""")
HOOKS = table("""
    training_epoch_end: on_train_epoch_end; keep the outputs of the steps in self
    validation_epoch_end: on_validation_epoch_end; keep the outputs of the steps in self
    test_epoch_end: on_test_epoch_end; keep the outputs of the steps in self
    training_step_end validation_step_end test_step_end: the end of the step itself
    on_epoch_start: on_train_epoch_start, on_validation_epoch_start
    on_epoch_end: on_train_epoch_end, on_validation_epoch_end
    on_batch_start: on_train_batch_start
    on_batch_end: on_train_batch_end
    on_pretrain_routine_start on_pretrain_routine_end: on_fit_start
    on_init_start on_init_end on_configure_sharded_model on_before_accelerator_backend_setup: setup
    on_train_dataloader on_val_dataloader on_test_dataloader on_predict_dataloader: setup
    tbptt_split_batch: training_step, with automatic_optimization = False
""")
# Modules and names below pytorch_lightning.
IMPORTS = table("""
    metrics: torchmetrics
    lite: lightning.fabric.Fabric
    profiler: lightning.pytorch.profilers
    core.lightning: lightning.pytorch.LightningModule
    callbacks.base: lightning.pytorch.Callback
    loggers.base loggers.LightningLoggerBase: lightning.pytorch.loggers.Logger
    plugins.DDPPlugin plugins.DeepSpeedPlugin plugins.training_type: lightning.pytorch.strategies
    utilities.cli: lightning.pytorch.cli
    utilities.distributed: lightning.pytorch.utilities.rank_zero
    utilities.seed.seed_everything: lightning.pytorch.seed_everything
    utilities.types.EPOCH_OUTPUT: list
""")
ARGUMENTS = table("""
    optimizer_idx opt_idx: self.automatic_optimization = False, and step each of self.optimizers()
    dataloader_idx on_tpu using_native_amp using_lbfgs: leave it out
    outputs: keep them in an attribute of the module
    hiddens: split the sequence in training_step, with automatic_optimization = False
""")
# The Trainer itself refuses to start with these hooks, even if other code calls them.
_REFUSED = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")


def replaced(error: BaseException) -> str:
    """The new name of the object of Lightning 1 that could not be imported; "" for other errors."""
    # No module named 'a.b', cannot import name 'b' from 'a', module 'a' has no attribute 'b'
    parts = sorted(re.findall(r"'([\w.]+)'", str(error)), key=lambda part: "." not in part)
    name = re.sub(r"^(pytorch_lightning|lightning\.pytorch)\.", "", ".".join(parts))
    return f"it is now {IMPORTS[name]}; " if name in IMPORTS else ""


def problems(called: type, base: type, users: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yields each part of a class that only Lightning 1 supports, and the remedy.

    A library's hooks are reported only if the Trainer refuses them: they may be there for older
    versions. `base` is Lightning's own class; `users` says whether a name is the user's code."""
    for name in (n for n in dir(called) if not n.startswith("_") and n != "forward"):
        function = inspect.getattr_static(called, name)
        if not inspect.isfunction(function):
            continue
        shown = f"{called.__name__}.{name}"
        refused = base.__name__ == "LightningModule" and name in _REFUSED
        users_hook = name in HOOKS and users(f"{function.__module__}.x")
        if refused or (users_hook and not _is_used(called, name)):
            what = f"{shown} is a hook of Lightning 1, and nobody calls it"
            yield what, f"it is now {HOOKS[name]}"
        elif inspect.isfunction(getattr(base, name, None)):
            passed = inspect.signature(getattr(base, name)).parameters
            for key, argument in inspect.signature(function).parameters.items():
                known = key in passed or (key == "dataloader_idx" and "args" in passed)
                needed = argument.default is argument.empty and not str(argument).startswith("*")
                if key in ARGUMENTS and needed and not known:
                    what = f"{shown} takes {key}, which Lightning 2 does not pass"
                    yield what, ARGUMENTS[key]


def _is_used(called: type, name: str) -> bool:
    """Whether another method of the class refers to this one."""
    others = [f for c in called.__mro__ for n, f in vars(c).items() if n != name]
    return any(inspect.isfunction(f) and name in f.__code__.co_names for f in others)

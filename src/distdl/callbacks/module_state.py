"""State of a model's layers that is neither parameter nor buffer, which Lightning (2.6) loses.

A callback may switch a batch norm's `track_running_stats`, a dropout's `p`, or a part of the model
to `eval()`. A checkpoint holds these settings where they differ from the model as it was built.
What it cannot hold (layers, hooks and attributes of the user's own classes that changed since the
start) is named when it is first saved without it, and again by a resume.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parameter import is_lazy

from distdl.callbacks.lean import LeanCallback
from distdl.loops.fit import fit_loop_of

log = logging.getLogger(__name__)

KEY = "distdl_modules"  # in a checkpoint
# Their layers keep only settings in plain attributes. Other classes, such as the user's, may keep
# results or counts there, which must not be set from outside.
LIBRARIES = ("torch", "torchvision", "timm", "distdl")
# They add their hooks whenever they run, after a resume too.
HOOKING = ("torch", "lightning", "pytorch_lightning", "deepspeed", "distdl")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
PLAIN = (bool, int, float, str, type(None))
SHOWN = 6  # names in a message
Settings = dict[str, dict[str, Any]]  # name of a layer -> attribute -> value


class ModuleState(LeanCallback):
    """Saves and restores the settings of layers. It must be the first callback.

    Args:
        module: The model as it was built, before any callback.
    """

    def __init__(self, module: nn.Module) -> None:
        self._built = settings_of(module)
        self._start: Picture | None = None
        self._named = set[str]()
        self._loaded: Mapping[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # `setup` and `configure_model`, which a resume repeats before it loads, have run.
        self._start = Picture.of(pl_module)
        for name, values in settings_of(pl_module).items():
            self._built.setdefault(name, values)

    # A resume restores once all hooks of the start have run. Inside an epoch, Lightning does not
    # call `on_train_epoch_start`.
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *_: object
    ) -> None:
        self._restore(trainer, pl_module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._loaded = checkpoint.get(KEY)
        else:
            apply(pl_module, for_inference(checkpoint))

    def save(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the state to a checkpoint that is otherwise complete, and names what is lost."""
        if self._start is None:
            return
        now = settings_of(module)
        if trainer.validating:  # Lightning has switched all layers to eval()
            modes = fit_loop_of(trainer).epoch_loop.val_loop.modes
            for name in now.keys() & modes.keys():
                now[name]["training"] = modes[name]
        lost = self._start.lost(Picture.of(module), checkpoint["state_dict"])
        checkpoint[KEY] = {
            "settings": changes(self._built, now),
            "gradients": [n for n, b in module.named_buffers() if b.is_leaf and b.requires_grad],
            "lost": lost,
        }
        if trainer.is_global_zero:
            self._name(lost, module.strict_loading)

    def _restore(self, trainer: Trainer, module: LightningModule) -> None:
        if self._loaded is None:
            return
        saved = self._loaded
        self._loaded = None
        # What was changed and changed back before the save is as built in the checkpoint, and may
        # have been changed again by this start.
        apply(module, self._built)
        apply(module, saved["settings"])
        for name, buffer in module.named_buffers():
            if buffer.is_leaf and buffer.requires_grad != (name in saved["gradients"]):
                buffer.requires_grad_(name in saved["gradients"])
        missing = not_there(saved["lost"], Picture.of(module))
        if missing and trainer.is_global_zero:
            text = "the checkpoint does not hold, and this resume goes on without: %s"
            log.warning(text, listed(missing))

    def _name(self, lost: Mapping[str, Any], strict: bool) -> None:
        """Names what has not been named before."""
        weights = [name for name in lost["weights"] if name not in self._named]
        others = [text for text in described(lost) if text not in self._named]
        self._named.update(weights, others)
        if weights:
            text = "%s came late: a resume will %s. %s"
            effect = "refuse this checkpoint" if strict else "go on without"
            log.warning(text, came_late(weights), effect, REMEDY)
        if others:
            log.warning(
                "no checkpoint holds, and a resume starts without: %s (unless a callback's setup, "
                "on_fit_start or on_train_start makes it again; a buffer would be saved)",
                listed(others),
            )


REMEDY = (
    "Create such layers in the module's __init__ or configure_model, or in the callback's setup: "
    "the weights of a checkpoint are loaded before on_fit_start"
)


def came_late(weights: list[str]) -> str:
    """The layers of weights that came, went or changed their shape after the start."""
    return listed([*dict.fromkeys(name.rpartition(".")[0] or name for name in weights)])


def late_in(checkpoint: Mapping[str, Any], names: Collection[str]) -> str:
    """The layers of a checkpoint that came late and are not in a model with these names of weights,
    or the other way round; "" if there are none."""
    lost = (checkpoint.get(KEY) or {}).get("lost", {}).get("weights", ())
    return came_late([n for n in lost if (n in names) != (n in checkpoint["state_dict"])])


@dataclass(frozen=True)
class Picture:
    """What a checkpoint does not hold of a model, or cannot load if it differs."""

    weights: dict[str, tuple[int, ...] | None]  # shapes by name
    kinds: dict[str, str]  # layer -> class
    hooks: dict[str, list[str]]  # layer -> hooks
    attributes: Settings  # of the user's own classes, except None: the module itself fills these

    @classmethod
    def of(cls, module: nn.Module) -> Picture:
        layers = dict(module.named_modules())
        hooks = {name: hooks_of(layer) for name, layer in layers.items()}
        return cls(
            weights=shapes_of_weights(module),
            kinds={name: class_of(layer).__qualname__ for name, layer in layers.items()},
            hooks={name: found for name, found in hooks.items() if found},
            attributes={name: own_attributes(layer) for name, layer in layers.items()},
        )

    def lost(self, now: Picture, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What has changed since, in types that `weights_only` loads.

        - `weights`: names of parameters and buffers that came, went or changed their shape;
        - `layers`: layers that came or were replaced, with their classes;
        - `gone`: layers that went;
        - `hooks`: the new hooks of each layer;
        - `attributes`: of each layer, with their values.

        Args:
            saved: What the checkpoint holds by name. A callback may have removed its weights.
        """
        moved = []
        for name in sorted({*now.weights, *self.weights}):
            then = self.weights.get(name, "absent")
            # None: a lazy layer, which gets its shape in the first step.
            if then is not None and then != now.weights.get(name, "absent"):
                moved.append(name)
        weights = [name for name in moved if (name in saved) == (name in now.weights)]

        def alone(layers: list[str]) -> list[str]:
            """Without layers inside another one of them, and without layers whose weights have
            moved: both are named already."""
            outer = [name for name in layers if name.rpartition(".")[0] not in layers]
            return [name for name in outer if not any(w.startswith(f"{name}.") for w in moved)]

        other = []
        for name, kind in now.kinds.items():
            before = self.kinds.get(name, "")
            if before != kind and not before.startswith("Lazy"):
                other.append(name)
        hooks = {
            name: [hook for hook in found if hook not in self.hooks.get(name, ())]
            for name, found in now.hooks.items()
        }
        return {
            "weights": weights,
            "layers": {name: now.kinds[name] for name in alone(other)},
            "gone": alone([name for name in self.kinds if name not in now.kinds]),
            "hooks": {name: found for name, found in hooks.items() if found},
            "attributes": changes(self.attributes, now.attributes),
        }


def described(lost: Mapping[str, Any]) -> list[str]:
    """What is lost, except weights, each in a few words."""
    texts = [f"the layer {name} ({kind})" for name, kind in lost["layers"].items()]
    texts += [f"the removal of {name}" for name in lost["gone"]]
    for name, hooks in lost["hooks"].items():
        texts += [f"the hook {hook} on {name or 'the module'}" for hook in hooks]
    for name, values in lost["attributes"].items():
        texts += [f"the value of {name}.{key}".replace(" .", " ") for key in values]
    return texts


def not_there(lost: Mapping[str, Any], now: Picture) -> list[str]:
    """What a checkpoint has lost and a callback has not made again, in words."""
    wanted: Settings = lost["attributes"]
    hooks = {
        name: [hook for hook in found if hook not in now.hooks.get(name, ())]
        for name, found in lost["hooks"].items()
    }
    layers = {n: kind for n, kind in lost["layers"].items() if now.kinds.get(n) != kind}
    gone = [name for name in lost["gone"] if name in now.kinds]
    attributes = changes(now.attributes, wanted)
    return described({"layers": layers, "gone": gone, "hooks": hooks, "attributes": attributes})


def changes(before: Settings, now: Settings) -> Settings:
    """The attributes that both have, where they differ: the values of `now`."""
    found: Settings = {}
    for name, values in now.items():
        old = before.get(name, {})
        differ = {k: v for k, v in values.items() if k in old and not same(v, old[k])}
        if differ:
            found[name] = differ
    return found


def apply(module: nn.Module, settings: Settings) -> None:
    """Sets attributes of the layers that are there and have them."""
    layers = dict(module.named_modules())
    for name in settings.keys() & layers.keys():
        present = plain_attributes(layers[name])
        for attribute, value in settings[name].items():
            if attribute in present and not same(present[attribute], value):
                setattr(layers[name], attribute, value)


def for_inference(checkpoint: Mapping[str, Any]) -> Settings:
    """A checkpoint's settings, without which layers were in training."""
    saved: Settings = (checkpoint.get(KEY) or {}).get("settings", {})
    settings = {n: {k: v for k, v in each.items() if k != "training"} for n, each in saved.items()}
    return {name: values for name, values in settings.items() if values}


def changed(settings: Settings) -> str:
    """The attributes of settings, for a message."""
    return listed([f"{name}.{key}" for name, values in settings.items() for key in values])


def settings_of(module: nn.Module) -> Settings:
    """`training` of each layer, and the other plain attributes of a library's layers."""
    return {
        name: plain_attributes(layer) if of_library(layer) else {"training": layer.training}
        for name, layer in module.named_modules()
    }


def own_attributes(layer: nn.Module) -> dict[str, Any]:
    if of_library(layer):
        return {}
    values = plain_attributes(layer).items()
    return {k: v for k, v in values if k != "training" and v is not None}


def plain_attributes(layer: nn.Module) -> dict[str, Any]:
    """The public attributes whose values `weights_only` loads. DeepSpeed's begin with `ds_`."""
    values = {k: plain(v) for k, v in vars(layer).items() if not k.startswith(("_", "ds_"))}
    return {k: v for k, v in values.items() if is_plain(v)}


def plain(value: object) -> object:
    """The value of one of NumPy's scalars; others unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def is_plain(value: object) -> bool:
    """Whether it is a truth value, a number, a text, None or a tuple of such, and no subclass."""
    return all(map(is_plain, value)) if type(value) is tuple else type(value) in PLAIN


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is the same as NaN, and 1 is not True


def class_of(layer: nn.Module) -> type:
    """Its class, also below the one that FSDP2 gives it."""
    kinds = type(layer).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch.distributed"))


def of_library(layer: nn.Module) -> bool:
    return class_of(layer).__module__.partition(".")[0] in LIBRARIES


def shapes_of_weights(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """The shapes in its state_dict, without making one, which is collective under some strategies.
    None: not yet known."""
    found: dict[str, tuple[int, ...] | None] = {}
    for prefix, layer in module.named_modules():
        hidden = layer._non_persistent_buffers_set
        buffers = {k: v for k, v in layer._buffers.items() if k not in hidden}
        for name, tensor in {**layer._parameters, **buffers}.items():
            if tensor is None:
                continue
            # DeepSpeed leaves a slice in a parameter, and its shape in `ds_shape`.
            shape = None if is_lazy(tensor) else tuple(getattr(tensor, "ds_shape", tensor.shape))
            found[f"{prefix}.{name}" if prefix else name] = shape
    return found


def hooks_of(layer: nn.Module) -> list[str]:
    """The names of the hooks that no library has added."""
    hooks = [unwrapped(hook) for kind in HOOKS for hook in getattr(layer, kind).values()]
    own = [hook for hook in hooks if str(hook.__module__).partition(".")[0] not in HOOKING]
    return [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in own]


def unwrapped(hook: object) -> object:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

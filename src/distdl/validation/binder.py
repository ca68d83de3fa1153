"""Whether the keys of a node are arguments that its class or function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from distdl.config.paths import path_text
from distdl.job import adapted_launcher, is_launcher
from distdl.util.errors import Problem
from distdl.util.suggest import closest
from distdl.util.typed import Path
from distdl.validation.findings import ConfigFindings
from distdl.validation.meta import MODEL_KEYS
from distdl.validation.resolve import Resolved
from distdl.validation.targets import nodes

_SPECIAL = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
UNKNOWN = "takes no argument"
# Functions that pass **kwargs to a model: only building the model shows which are valid.
_BUILT_ON_META = (
    "torchvision.models.",
    "timm.models.",
    "timm.create_model",
    "distdl.models.torchvision_detector",
)

# What the builder (worker.build) passes besides the node's own keys. `supplied`: the leading
# positional arguments; `consumed`: keys that are not passed to the target; `null_is_absent`: keys
# that are passed only if they are set; `offered`: arguments passed if the signature takes them.
SUPPLIED: dict[str, dict[str, tuple[str, ...]]] = {
    "optimizer": {
        "supplied": ("params",),
        "consumed": (
            "lr_scaling",
            "lr_reference_batch",
            "decay_norm_and_bias",
            "layer_decay",
            "backbone_lr",
        ),
        "null_is_absent": ("fused",),
    },
    "model": {"consumed": MODEL_KEYS},
    "schedule": {
        "supplied": ("optimizer",),
        "consumed": ("interval",),
        "offered": ("steps_per_epoch", "max_epochs", "total_steps", "budget"),
    },
    "task": {"supplied": ("context",)},  # to a function; a class is made of the node's own keys
}


class Binder:
    """Binds the arguments of nodes, and builds on `meta` what takes any.

    Args:
        resolved: The config, and the `${...}` that its values were.
        skip: The nodes that are refused already; the list may grow.
        findings: Where problems go.
    """

    def __init__(self, resolved: Resolved, skip: Sequence[Path], findings: ConfigFindings) -> None:
        self.resolved = resolved
        self.skip = skip
        self.findings = findings

    def bind(
        self, called: Callable[..., Any], node: dict[str, Any], path: Path, target: str = ""
    ) -> None:
        """Adds a problem for each argument that does not fit.

        Args:
            target: What messages call the target; "": by its `_target_`.
        """
        from distdl.validation.signatures import bind, takes, takes_anything

        target = target or node["_target_"]
        text = path_text(path)
        parameters = takes(called)
        if parameters is None:
            return
        table = SUPPLIED.get(text, {})
        if text == "task" and inspect.isclass(called):
            table = {}
        hidden = [*_SPECIAL, *table.get("consumed", ())]
        hidden += [key for key in table.get("null_is_absent", ()) if node.get(key) is None]
        misfits = [
            *bind(
                parameters,
                {key: value for key, value in node.items() if key not in hidden},
                positional=len(table.get("supplied", ())) + len(node.get("_args_") or ()),
                partial=node.get("_partial_") is True,
                offered=table.get("offered", ()),
            )
        ]
        unknown = [each.path for each in misfits if each.code == "unknown-key"]
        if path in (("model",), ("data",)) and len(unknown) > 3:
            misfits = [each for each in misfits if each.path not in unknown]
            default = f"if the default adds them, write under defaults: - override /{text}: null"
            what = f"{target} {UNKNOWN} {', '.join(unknown)}"
            self.findings.add(path, what, default, code="unknown-key")
        for misfit in misfits:
            self._add(misfit, called, node, path, target)
        called_on_meta = target.startswith(_BUILT_ON_META) and node.get("_partial_") is not True
        if called_on_meta and takes_anything(parameters):
            self._build(target, node, path)

    def _add(
        self,
        misfit: Problem,
        called: Callable[..., Any],
        node: dict[str, Any],
        path: Path,
        target: str,
    ) -> None:
        """Adds what `signatures.bind` says of one argument, with what is known of its node."""
        text = path_text(path)
        name = misfit.path
        what = misfit.what
        location = (*path, name) if name else path
        remedy = misfit.remedy.replace("{}", f"{text}.")
        if misfit.code == "unknown-key":
            what = f"{target} {UNKNOWN} {name!r}"
            near = closest(name, MODEL_KEYS) if text == "model" else ""
            if near:
                remedy = f"did you mean {text}.{near}?"
            if is_launcher(called):
                remedy = adapted_launcher(called).instead.get(name, remedy)
            if name == "class_path":
                remedy = f"this key is LightningCLI's: write {text}._target_={node[name]}"
        elif misfit.code == "missing-key":
            what = f"missing, {target} needs it"
            remedy = f"write {path_text(location)}=..."
        elif "{}" in what:
            what = what.replace("{}", self.resolved.show(location))
        self.findings.add(location, what, remedy, code=misfit.code)

    def _build(self, target: str, node: dict[str, Any], path: Path) -> None:
        from distdl.validation.meta import misfit

        inner = (str(each["_target_"]) for _, each in nodes(node))
        foreign = any(not each.startswith(("torch.", *_BUILT_ON_META)) for each in inner)
        refused = any(path == bad[: len(path)] for bad in self.skip)
        if path[0] == "model" and not foreign and not refused and (wrong := misfit(node)):
            location = (*path, wrong.path) if wrong.path else path
            remedy = wrong.remedy.replace("{}", path_text(path))
            self.findings.add(location, f"{target}: {wrong.what}", remedy, code=wrong.code)

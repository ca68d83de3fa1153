"""A complete, valid config; tables of changes to it; both stages of validation, in this process."""

from __future__ import annotations

import functools
import sys
from unittest import mock

from omegaconf import OmegaConf

from distdl.config.compose import compose
from distdl.config.own_code import own_folders
from distdl.validation.resolve import resolve
from distdl.validation.validate import check_bindings, problems_of

_DEMOS = "lightning.pytorch.demos.boring_classes"
_CHOSEN = ("tracking=csv", "callbacks=early_stopping", "experiment_name=sample")


@functools.cache
def _composed():
    config = compose(_CHOSEN)
    config.pop("hydra")
    config.model = node(f"{_DEMOS}.BoringModel")
    config.data = node(f"{_DEMOS}.BoringDataModule")
    config.strategy = node("lightning.pytorch.strategies.DDPStrategy", find_unused_parameters=False)
    config.schedule = node("torch.optim.lr_scheduler.StepLR", step_size=3, interval="epoch")
    return OmegaConf.to_container(config, resolve=False)


def sample(changes=None):
    """The config with some values set, as `++key=value` sets them."""
    config = OmegaConf.create(_composed())
    for path, value in (changes or {}).items():
        OmegaConf.update(config, path, value, merge=False, force_add=True)
    return config


def node(target, *arguments, **named):
    return {"_target_": target, **({"_args_": [*arguments]} if arguments else {}), **named}


def problems(changes, root=None, size=None):
    """What both stages of validation refuse in a run on this machine."""
    config = sample(changes)
    folders = own_folders(root) if root else None
    first = problems_of(config, topology=size, local=True, folders=folders)
    with mock.patch.object(sys, "path", [*sys.path]):
        return (
            first or check_bindings(resolve(config), size, folders, local=True, in_process=True)[0]
        )


def rows(table):
    """Lines `what is typed | a part of what is read | the next part`."""
    lines = [line.split(" | ") for line in table.splitlines() if line and line[0] != "#"]
    return [(typed, parts) for typed, *parts in lines]


def change(text, **names):
    """`path = value in Python` as what `sample` takes."""
    path, _, value = text.partition(" = ")
    return {path: eval(value, {"node": node, **names})}


def check_parts(text, parts):
    """Every part is in the text, in this order."""
    rest = text
    for part in parts:
        assert part in rest, text
        rest = rest.partition(part)[2]

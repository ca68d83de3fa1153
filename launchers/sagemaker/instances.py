"""The instance types that distdl knows, and whether one suits a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distdl.launchers.sagemaker.limits import input_shape
from distdl.util.errors import Problem
from distdl.util.suggest import did_you_mean_word


@dataclass(frozen=True)
class Instance:
    """One instance type. `network` is in Gbit/s and `memory` in GiB; 0 means unknown."""

    name: str
    gpus: int = 0
    gpu: str = ""
    cpus: int = 0
    memory: int = 0
    network: int = 0
    efa: bool = False


@cache
def instances() -> dict[str, Instance]:
    """Name -> instance, for all types in instance_types.yaml."""
    import yaml

    facts = yaml.safe_load((Path(__file__).parent / "instance_types.yaml").read_text())
    with_gpu = {name: Instance(name, **fields) for name, fields in facts["gpu"].items()}
    names = [f"ml.{family}.{size}" for family, sizes in facts["cpu"].items() for size in sizes]
    return {**with_gpu, **{name: Instance(name) for name in names}}


def _is_newer_than_the_file(name: str) -> bool:
    """Whether the installed boto3 knows an instance type that the file lacks."""
    shape = input_shape()
    return shape is not None and name in (
        shape.members["ResourceConfig"].members["InstanceType"].enum
    )


def misfits(name: str, at: str, context: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of an instance type for a run of this size; `at` is the key that names it."""
    instance = instances().get(name)
    devices = int(context["devices"])
    wants_gpu = context["accelerator"] == "gpu"
    if instance is None:
        if not _is_newer_than_the_file(name):
            near = did_you_mean_word(name, instances())
            yield Problem(
                at,
                what=f"SageMaker has no instance type {name}",
                remedy=near or "names begin with ml., e.g. ml.g5.12xlarge",
                code="wrong-choice",
            )
    elif wants_gpu and not instance.gpus:
        yield Problem(
            at,
            what=f"{name} has no GPU",
            remedy="choose a type of ml.g or ml.p, or write trainer.accelerator=cpu",
            code="not-enough",
        )
    elif wants_gpu and devices > instance.gpus:
        larger = [i.name for i in alike(instance) if i.gpus >= devices]
        hint = f", or launcher.{at}={larger[0]}" if larger else ""
        yield Problem(
            at,
            what=(
                f"{name} has {instance.gpus} {instance.gpu.split()[0]}, "
                f"but trainer.devices={devices}"
            ),
            remedy=f"trainer.devices={instance.gpus} trainer.num_nodes=HOSTS{hint}",
            code="conflict",
        )


def alike(instance: Instance) -> list[Instance]:
    return [each for each in instances().values() if each.gpu == instance.gpu]

"""The settings under `launcher.*` with launcher=sagemaker, and the known instance types.

An input is s3://bucket/folder, with mode File (copied before the start), FastFile or Pipe. Or it is
a file system inside the VPC, with mode ro or rw: efs://fs-0123456789abcdef0/folder or
fsx://fs-0123456789abcdef0/mount/folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from distdl.launchers.common import (
    LauncherSettings,
    ListOf,
    Positive,
    Refused,
    Values,
    Walltime,
    did_you_mean,
    matching,
    unknown_keys,
)
from distdl.util import walltime
from distdl.util.errors import Problem

REQUIRED = {
    "role": "launcher.role=arn:aws:iam::<account>:role/<name>: the job's permissions",
    "image": "launcher.image=<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>; "
    "launchers/sagemaker/Dockerfile builds one",
    "bucket": "launcher.bucket=<name>, in the region of the job",
    "instance_type": "launcher.instance_type=ml.g5.12xlarge, for example",
}
BUNDLE = "bundle"  # the channel (SageMaker's word for an input) with the code
MOST_INPUTS = 19  # SageMaker allows 20 channels, and the bundle uses one
S3_MODES, DISK_MODES = ("File", "FastFile", "Pipe"), ("ro", "rw")
FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,})(/.*)?")
DAY = 86400  # seconds
LONGEST_WAIT = 30 * DAY
_PART = r"(?!\.+(?:/|$))[A-Za-z0-9_.+=@-]+"


ROLE_ARN = matching(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "the ARN of a role", REQUIRED["role"])
PREFIX = matching(
    rf"/*({_PART}(/{_PART})*)?/*",
    "a prefix for the names of objects and secrets",
    "letters, digits and _ . + = @ -, and / between folders",
)


def _bucket(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", value):
        name = value.removeprefix("s3://").partition("/")[0]
        remedy = f"launcher.bucket={name}; a folder in it is launcher.prefix"
        raise Refused(f"{value} is not the name of a bucket", remedy)
    return value


def _at_most(days: int) -> AfterValidator:
    def validate(seconds: int) -> int:
        if seconds > days * DAY:
            raise Refused(f"{seconds} s is more than {days} days", walltime.FORMS)
        return seconds

    return AfterValidator(validate)


class SageMakerSettings(LauncherSettings):
    role: Annotated[str, ROLE_ARN] | None = None
    image: str | None = None
    instance_type: str | None = None
    bucket: Annotated[str, AfterValidator(_bucket)] | None = None
    prefix: Annotated[str, PREFIX] = "distdl"
    region: str | None = None
    profile: str | None = None
    volume_gb: Positive = 100
    walltime: Annotated[Walltime, _at_most(28)] = 24
    spot: bool = False
    max_wait: Annotated[Walltime, _at_most(30)] | None = None
    keep_alive: Annotated[int, Field(ge=0, le=6 * 3600)] = 0
    retries: Annotated[int, Field(ge=0, le=30)] = 0
    subnets: ListOf[str] = []
    security_groups: ListOf[str] = []
    encrypt_traffic: bool = False
    kms_key: str | None = None
    tags: Values = {}
    env: Values = {}

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        for key, remedy in REQUIRED.items():
            if not getattr(self, key):
                yield Problem(key, "missing", remedy)
        if self.instance_type:
            yield from _instance(self.instance_type, context)
        if self.max_wait is not None and not self.spot:
            yield Problem("max_wait", "applies only to spot jobs", "launcher.spot=true")
        elif self.max_wait is not None and self.max_wait < self.walltime:
            what = f"{self.max_wait} s must cover waiting and running, but walltime alone is "
            what += f"{self.walltime} s"
            yield Problem("max_wait", what, "launcher.max_wait=null is twice the walltime")
        if self.keep_alive and self.spot:
            yield Problem(
                "keep_alive", "spot instances cannot be kept warm", "launcher.keep_alive=0"
            )
        for missing, other in permutations(("subnets", "security_groups")):
            if getattr(self, other) and not getattr(self, missing):
                yield Problem(missing, f"missing, but launcher.{other} is set", "a VPC needs both")
        yield from self._inputs()

    def _inputs(self) -> Iterator[Problem]:
        if len(self.inputs) > MOST_INPUTS:
            what = f"{len(self.inputs)} inputs, but SageMaker allows {MOST_INPUTS} besides the code"
            yield Problem("inputs", what)
        yield from unknown_keys(self.inputs, ("path", "mode"))
        for name, entry in self.inputs.items():
            path, on_disk = str(entry.get("path") or ""), is_on_disk(entry)
            at, modes = f"inputs.{name}", DISK_MODES if on_disk else S3_MODES
            if name == BUNDLE or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
                what = "is reserved for the code" if name == BUNDLE else "is not a valid input name"
                yield Problem(at, what, "use letters, digits and _, but not the name bundle")
            if on_disk and not FILE_SYSTEM.fullmatch(path):
                yield Problem(at, f"{path} names no file system", "write efs://fs-0123456789/dir")
            elif not on_disk and not re.fullmatch(r"s3://[^/]+/?.*", path):
                what = f"a SageMaker job cannot read {path or 'an empty path'}"
                remedy = f"aws s3 sync {path or 'FOLDER'} s3://BUCKET/FOLDER, and write that URI"
                yield Problem(at, what, remedy)
            elif (mode := mode_of(entry)) not in modes:
                hint = f"{did_you_mean(mode, modes)} one of {', '.join(modes)}".strip()
                yield Problem(f"{at}.mode", f"{mode!r} is not a mode", hint)
            elif on_disk and not (self.subnets and self.security_groups):
                remedy = "launcher.subnets=[subnet-...] launcher.security_groups=[sg-...]"
                yield Problem(at, f"{path} can be reached only inside its VPC", remedy)


def is_on_disk(entry: Mapping[str, Any]) -> bool:
    """Whether an input is a mounted file system."""
    return str(entry.get("path")).startswith(("efs:", "fsx:"))


def mode_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("mode") or ("ro" if is_on_disk(entry) else "File"))


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
    try:
        from botocore.session import Session
    except ImportError:
        return False
    shape = Session().get_service_model("sagemaker").shape_for("TrainingInstanceType")
    return name in shape.enum


def _instance(name: str, context: Mapping[str, Any]) -> Iterator[Problem]:
    instance = instances().get(name)
    devices, wants_gpu = int(context["devices"]), context["accelerator"] == "gpu"
    if instance is None:
        if not _is_newer_than_the_file(name):
            hint = did_you_mean(name, instances()) or "names begin with ml., e.g. ml.g5.12xlarge"
            yield Problem("instance_type", f"SageMaker has no instance type {name}", hint)
    elif wants_gpu and not instance.gpus:
        remedy = "choose a type of ml.g or ml.p, or write trainer.accelerator=cpu"
        yield Problem("instance_type", f"{name} has no GPU", remedy)
    elif wants_gpu and devices > instance.gpus:
        larger = [i.name for i in alike(instance) if i.gpus >= devices]
        hint = f", or launcher.instance_type={larger[0]}" if larger else ""
        yield Problem(
            "instance_type",
            f"{name} has {instance.gpus} {instance.gpu.split()[0]}, but trainer.devices={devices}",
            f"trainer.devices={instance.gpus} trainer.num_nodes=<hosts>{hint}",
        )


def alike(instance: Instance) -> list[Instance]:
    return [each for each in instances().values() if each.gpu == instance.gpu]

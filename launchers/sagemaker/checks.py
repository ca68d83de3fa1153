"""What is wrong with `launcher.*`, said before anything is uploaded or paid for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from distdl import walltime
from distdl.errors import Problem
from distdl.launchers.sagemaker import inputs, instances
from distdl.launchers.sagemaker.request import LONGEST_WAIT

LONGEST_RUN = 28 * 86400  # seconds
LONGEST_KEEP_ALIVE = 21600  # seconds

REQUIRED = {
    "role": "launcher.role=arn:aws:iam::<account>:role/<name>, which the job acts as",
    "image": "launcher.image=<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>; "
    "launchers/sagemaker/Dockerfile shows one",
    "bucket": "launcher.bucket=<name>, in the region of the job",
    "instance_type": "launcher.instance_type=ml.g5.12xlarge, for example",
}
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/.+")
_PREFIX_PART = re.compile(r"(?!\.+$)[A-Za-z0-9_.+=@-]+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the node, with paths relative to it.

    Args:
        node: `launcher.*`, resolved.
        context: num_nodes, devices, accelerator of the run.
    """
    node = {"walltime": 24, "volume_gb": 100, **node}
    for key, remedy in REQUIRED.items():
        if not node.get(key):
            yield Problem(key, "missing", remedy)
    role, bucket = node.get("role"), node.get("bucket")
    if role and not _ROLE.fullmatch(str(role)):
        yield Problem("role", f"{role} is no ARN of a role", REQUIRED["role"])
    if bucket and not _BUCKET.fullmatch(str(bucket)):
        plain = str(bucket).removeprefix("s3://").partition("/")[0]
        hint = "a folder in it is launcher.prefix"
        yield Problem(
            "bucket", f"{bucket} is no name of a bucket", f"launcher.bucket={plain}; {hint}"
        )
    prefix = str(node.get("prefix") or "").strip("/")
    if prefix and not all(map(_PREFIX_PART.fullmatch, prefix.split("/"))):
        what = f"{prefix!r} cannot be part of the names of objects and secrets"
        yield Problem("prefix", what, "letters, digits and _ . + = @ -, and / between folders")
    if node.get("instance_type"):
        yield from _instance(str(node["instance_type"]), context)
    yield from _times(node)
    in_vpc = bool(node.get("subnets")) and bool(node.get("security_groups"))
    if bool(node.get("subnets")) != bool(node.get("security_groups")):
        missing, given = ("security_groups", "subnets")
        if node.get("security_groups"):
            missing, given = given, missing
        yield Problem(missing, f"missing, and launcher.{given} is given", "a VPC needs both")
    yield from inputs.problems_of(node.get("inputs") or {}, in_vpc)


def _instance(name: str, context: Mapping[str, Any]) -> Iterator[Problem]:
    from distdl.suggest import closest

    instance = instances.known().get(name)
    if instance is None:
        if not instances.is_newer_than_the_file(name):
            near = closest(name, instances.known())
            hint = f"did you mean {near}?" if near else "names begin with ml., e.g. ml.g5.12xlarge"
            yield Problem("instance_type", f"SageMaker has no instance type {name}", hint)
        return
    devices, wants_gpu = int(context["devices"]), context["accelerator"] == "gpu"
    if wants_gpu and not instance.gpus:
        remedy = "choose a type of ml.g or ml.p, or write trainer.accelerator=cpu"
        yield Problem("instance_type", f"{name} has no GPU", remedy)
    elif wants_gpu and devices > instance.gpus:
        kind = instance.gpu.split()[0]
        fits = [
            i for i in instances.known().values() if i.gpus >= devices and i.gpu == instance.gpu
        ]
        hint = f", or launcher.instance_type={fits[0].name}" if fits else ""
        yield Problem(
            "instance_type",
            f"{name} has {instance.gpus} {kind}, and trainer.devices={devices}",
            f"trainer.devices={instance.gpus} trainer.num_nodes=<hosts>{hint}",
        )


def _times(node: Mapping[str, Any]) -> Iterator[Problem]:
    found: dict[str, int | None] = {"walltime": None, "max_wait": None}
    for key in found:
        if node.get(key) is not None:
            try:
                found[key] = walltime.seconds(node[key])
            except ValueError as error:
                yield Problem(key, str(error), walltime.FORMS)
        elif key == "walltime":
            yield Problem(key, "a job of SageMaker has an end", walltime.FORMS)
    run, wait = found["walltime"], found["max_wait"]
    if run is not None and run > LONGEST_RUN:
        yield Problem("walltime", f"{run} s is more than 28 days", walltime.FORMS)
    if node.get("max_wait") is not None and not node.get("spot"):
        yield Problem("max_wait", "only spot jobs wait", "launcher.spot=true")
    elif wait is not None and run is not None and not run <= wait <= LONGEST_WAIT:
        yield Problem(
            "max_wait",
            f"{wait} s is for waiting and running together, and walltime is {run} s already"
            if wait < run
            else f"{wait} s is more than 30 days",
            "launcher.max_wait=null is twice the walltime",
        )
    keep = int(node.get("keep_alive") or 0)
    if keep and node.get("spot"):
        yield Problem("keep_alive", "spot instances cannot be kept warm", "launcher.keep_alive=0")
    elif not 0 <= keep <= LONGEST_KEEP_ALIVE:
        yield Problem(
            "keep_alive", f"{keep} s is not between 0 and 6 hours ({LONGEST_KEEP_ALIVE} s)"
        )
    if not 0 <= int(node.get("retries") or 0) <= 30:
        yield Problem("retries", "SageMaker starts a job again at most 30 times")
    if int(node.get("volume_gb") or 0) < 1:
        yield Problem(
            "volume_gb", "is the disk for inputs and checkpoints", "launcher.volume_gb=100"
        )

"""The settings under `launcher.*` with launcher=sagemaker.

An input is s3://bucket/folder, with mode File (copied before the start), FastFile or Pipe; with
`sharded` each host gets a part of it, with `groups` only hosts of these instance groups. Or it is
a file system inside the VPC, with mode ro or rw: efs://fs-0123456789abcdef0/folder or
fsx://fs-0123456789abcdef0/mount/folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from distdl.launchers.common import (
    Inputs,
    LauncherSettings,
    ListOf,
    Positive,
    Values,
    Walltime,
    matching,
    unknown_keys,
)
from distdl.launchers.sagemaker import instances
from distdl.util import walltime
from distdl.util.errors import Problem, Refused
from distdl.util.suggest import did_you_mean_word

REQUIRED = {
    "role": "launcher.role=arn:aws:iam::ACCOUNT:role/NAME: the job's permissions",
    "image": "launcher.image=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG; "
    "launchers/sagemaker/Dockerfile builds one",
    "bucket": "launcher.bucket=NAME, in the region of the job",
    "instance_type": "launcher.instance_type=ml.g5.12xlarge, for example",
}
BUNDLE = "bundle"  # the channel (SageMaker's word for an input) with the code
MOST_INPUTS = 19  # SageMaker allows 20 channels, and the bundle uses one
S3_MODES = ("File", "FastFile", "Pipe")
DISK_MODES = ("ro", "rw")
FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,})(/.*)?")
# The root of a file system of FSx is the name of its mount.
NO_MOUNT = re.compile(r"fsx://[^/]+/*")
INPUT_KEYS = ("path", "mode", "sharded", "groups")
GROUP_KEYS = ("instance_type", "count")
DAY = 86400  # seconds
LONGEST_WAIT = 30 * DAY
_PART = r"(?!\.+(?:/|$))[A-Za-z0-9_.+=@-]+"


# Name -> {instance_type: ..., count: ...}
Groups = Annotated[
    dict[str, dict[str, Any]], BeforeValidator(lambda value: {} if value is None else value)
]
ROLE_ARN = matching(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "the ARN of a role", REQUIRED["role"])
PREFIX = matching(
    rf"/*({_PART}(/{_PART})*)?/*",
    "a prefix for the names of objects and secrets",
    "letters, digits and _ . + = @ -, and / between folders",
)


def _bucket(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", value):
        name = value.removeprefix("s3://").partition("/")[0]
        raise Refused(
            what=f"{value} is not the name of a bucket",
            remedy=f"launcher.bucket={name}; a folder in it is launcher.prefix",
            code="wrong-kind",
        )
    return value


def _at_most(days: int) -> AfterValidator:
    def validate(seconds: int) -> int:
        if seconds > days * DAY:
            raise Refused(
                what=f"{seconds} s is more than {days} days",
                remedy=walltime.FORMS,
                code="out-of-range",
            )
        return seconds

    return AfterValidator(validate)


def _metric(name: str, pattern: object) -> Iterator[Problem]:
    """Problems of a regular expression that finds a metric's values in the log."""
    at = f"metrics.{name}"
    remedy = f"launcher.metrics.{name}='{name} ([0-9.e+-]+)'"
    if not isinstance(pattern, str):
        yield Problem(
            at,
            what=f"{pattern!r} is not a regular expression: it is not a text",
            remedy=remedy,
            code="wrong-type",
        )
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Problem(
            at,
            what=f"{pattern!r} is not a regular expression: {error}",
            remedy=remedy,
            code="wrong-kind",
        )
        return
    if groups != 1:
        yield Problem(
            at,
            what=f"{pattern!r} has {groups} groups; the value is what its one group ( ) finds",
            remedy=remedy,
            code="wrong-kind",
        )


class SageMakerSettings(LauncherSettings):
    role: Annotated[str, ROLE_ARN] | None = None
    """The role that the job acts as: arn:aws:iam::<account>:role/<name>. Required."""

    image: str | None = None
    """The container image, in ECR. Required.

    launchers/sagemaker/Dockerfile shows one."""

    instance_type: str | None = None
    """The type of every host, e.g. ml.g5.12xlarge. Required, unless there are instance_groups.

    trainer.num_nodes is the number of hosts; trainer.devices=auto means all their GPUs."""

    bucket: Annotated[str, AfterValidator(_bucket)] | None = None
    """The bucket of code, checkpoints and logs: s3://<bucket>/<prefix>/<experiment>/<name>/.
    Required."""

    prefix: Annotated[str, PREFIX] = "distdl"
    """The folder in the bucket, and the beginning of the names of secrets."""

    region: str | None = None
    """The AWS region; null: that of AWS_REGION or ~/.aws/config."""

    profile: str | None = None
    """The profile of ~/.aws/config; null: that of AWS_PROFILE, or the default."""

    volume_gb: Positive = 100
    """Disk of each host in GB, for inputs of mode File and checkpoints.

    Hosts with NVMe disks use those."""

    walltime: Annotated[Walltime, _at_most(28)] = 24
    """The time limit: hours (0.5), or in quotes "1:30:00", "2-12" (days-hours).

    The ranks then get SIGTERM, and two more minutes to save."""

    spot: bool = False
    """Whether to use spare capacity, which is much cheaper but may be taken away: the run then
    resumes by itself."""

    max_wait: Annotated[Walltime, _at_most(30)] | None = None
    """The limit of waiting for spot capacity and running together; null: twice the walltime."""

    keep_alive: Annotated[int, Field(ge=0, le=6 * 3600)] = 0
    """Seconds that the hosts are kept, and paid, for a next job (a warm pool): at most 6 hours, no
    spot."""

    retries: Annotated[int, Field(ge=0, le=30)] = 0
    """How often SageMaker starts the job again after an error of SageMaker itself."""

    subnets: ListOf[str] = []
    """The subnets of the hosts in a VPC, with security_groups; needed for inputs on EFS and FSx."""

    security_groups: ListOf[str] = []
    """The security groups of the hosts in a VPC, with subnets."""

    encrypt_traffic: bool = False
    """Whether the traffic between the hosts is encrypted; slower."""

    kms_key: str | None = None
    """A KMS key for disks and output."""

    tags: Values = {}
    """Tags of the job, besides distdl:run."""

    env: Values = {}
    """More environment variables of every rank, e.g. {NCCL_DEBUG: INFO}; never a secret."""

    metrics: Values = {}
    """Metrics that CloudWatch reads from the log: name -> a regular expression, whose one group is
    the value.

    {train/loss: "step .* loss ([0-9.e+-]+)", val/acc1: "val/acc1 ([0-9.e+-]+)"}."""

    network_isolation: bool = False
    """Whether the containers are cut off from everything but each other: no forward_env, tracking
    server or store."""

    training_plan: str | None = None
    """The ARN of a training plan, whose reserved hosts the job uses; null: none."""

    instance_groups: Groups = {}
    """Hosts of several types instead: name -> {instance_type: ml.g5.48xlarge, count: 1}.

    trainer.num_nodes is the number of all of them."""

    inputs: Inputs = {}
    """The data of the job: name -> s3://..., efs://<id>/<folder>, fsx://<id>/<mount>/<folder>, or a
    mapping.

    {path: ..., mode: File|FastFile|Pipe (S3), ro|rw (EFS, FSx)}. On S3 also sharded: true (each
    host gets a part of the objects; only for a data module of your own) and groups: [instance
    groups that get it]. The recipe uses it as ${input:name}."""

    forward_env: ListOf[str] = []
    """Names of environment variables whose values are sent to every rank, through AWS Secrets
    Manager."""

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        for key, remedy in REQUIRED.items():
            if not getattr(self, key) and not (key == "instance_type" and self.instance_groups):
                yield Problem(key, what="missing", remedy=remedy, code="missing-key")
        if self.instance_groups:
            yield from self._groups(context)
        elif self.instance_type:
            yield from instances.misfits(self.instance_type, "instance_type", context)
        for name, pattern in self.metrics.items():
            yield from _metric(name, pattern)
        if self.network_isolation and self.forward_env:
            yield Problem(
                "network_isolation",
                what=(
                    "an isolated container reaches no Secrets Manager, "
                    "so forward_env cannot be read"
                ),
                remedy="launcher.forward_env=[]",
                code="conflict",
            )
        if self.max_wait is not None and not self.spot:
            yield Problem(
                "max_wait",
                what="applies only to spot jobs",
                remedy="launcher.spot=true",
                code="unsupported",
            )
        elif self.max_wait is not None and self.max_wait < self.walltime:
            yield Problem(
                "max_wait",
                what=(
                    f"{self.max_wait} s must cover waiting and running, but walltime alone is "
                    f"{self.walltime} s"
                ),
                remedy="launcher.max_wait=null is twice the walltime",
                code="out-of-range",
            )
        if self.keep_alive and self.spot:
            yield Problem(
                "keep_alive",
                what="spot instances cannot be kept warm",
                remedy="launcher.keep_alive=0",
                code="unsupported",
            )
        for missing, other in permutations(("subnets", "security_groups")):
            if getattr(self, other) and not getattr(self, missing):
                yield Problem(
                    missing,
                    what=f"missing, but launcher.{other} is set",
                    remedy="a VPC needs both",
                    code="missing-key",
                )
        yield from self._inputs()

    def _groups(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        if self.instance_type:
            yield Problem(
                "instance_type",
                what="each of launcher.instance_groups has its own type",
                remedy="launcher.instance_type=null",
                code="reserved",
            )
        hosts = 0
        for name, group in self.instance_groups.items():
            at = f"instance_groups.{name}"
            for key in sorted(set(group) - set(GROUP_KEYS)):
                yield Problem(
                    f"{at}.{key}",
                    what="not a setting of a group",
                    remedy=did_you_mean_word(key, GROUP_KEYS),
                    code="unknown-key",
                )
            kind = group.get("instance_type")
            count = group.get("count", 1)
            if not isinstance(kind, str):
                yield Problem(
                    f"{at}.instance_type",
                    what="missing",
                    remedy=REQUIRED["instance_type"],
                    code="missing-key",
                )
            else:
                yield from instances.misfits(kind, f"{at}.instance_type", context)
            if type(count) is not int or count < 1:
                yield Problem(
                    f"{at}.count",
                    what=f"{count!r} is not a number of hosts",
                    remedy="write 1 or more",
                    code="wrong-type",
                )
                return
            hosts += count
        if hosts != context["num_nodes"]:
            yield Problem(
                "instance_groups",
                what=f"{hosts} hosts in all, but trainer.num_nodes is {context['num_nodes']}",
                remedy=f"trainer.num_nodes={hosts}",
                code="conflict",
            )

    def _inputs(self) -> Iterator[Problem]:
        if len(self.inputs) > MOST_INPUTS:
            yield Problem(
                "inputs",
                what=(
                    f"{len(self.inputs)} inputs, but SageMaker allows {MOST_INPUTS} besides the "
                    "code"
                ),
                code="out-of-range",
            )
        yield from unknown_keys(self.inputs, INPUT_KEYS)
        for name, entry in self.inputs.items():
            path = str(entry.get("path") or "")
            on_disk = is_on_disk(entry)
            at = f"inputs.{name}"
            modes = DISK_MODES if on_disk else S3_MODES
            if name == BUNDLE or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
                what = "is not a valid input name"
                if name == BUNDLE:
                    what = "is reserved for the code"
                yield Problem(
                    at,
                    what=what,
                    remedy="use letters, digits and _, but not the name bundle",
                    code="wrong-type",
                )
            if on_disk and not FILE_SYSTEM.fullmatch(path):
                yield Problem(
                    at,
                    what=f"{path} names no file system",
                    remedy="write efs://fs-0123456789/dir",
                    code="wrong-kind",
                )
            elif on_disk and NO_MOUNT.fullmatch(path):
                yield Problem(
                    at,
                    what=f"{path} lacks the name of the file system's mount",
                    remedy=(
                        f"{path.rstrip('/')}/MOUNT/folder: `aws fsx describe-file-systems` has it"
                    ),
                    code="incomplete",
                )
            elif not on_disk and not re.fullmatch(r"s3://[^/]+/?.*", path):
                yield Problem(
                    at,
                    what=f"a SageMaker job cannot read {path or 'an empty path'}",
                    remedy=f"aws s3 sync {path or 'FOLDER'} s3://BUCKET/FOLDER, and write that URI",
                    code="unsupported",
                )
            elif (mode := mode_of(entry)) not in modes:
                yield Problem(
                    f"{at}.mode",
                    what=f"{mode!r} is not a mode",
                    remedy=f"{did_you_mean_word(mode, modes)} one of {', '.join(modes)}".strip(),
                    code="wrong-choice",
                )
            elif on_disk and not (self.subnets and self.security_groups):
                yield Problem(
                    at,
                    what=f"{path} can be reached only inside its VPC",
                    remedy="launcher.subnets=[subnet-...] launcher.security_groups=[sg-...]",
                    code="unsupported",
                )
            yield from self._parts(at, entry)

    def _parts(self, at: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
        """Problems of what each host gets of an input."""
        for key in ("sharded", "groups"):
            if entry.get(key) and is_on_disk(entry):
                yield Problem(
                    f"{at}.{key}",
                    what="every host sees the whole file system",
                    remedy="leave it out, or use an input on S3",
                    code="unsupported",
                )
        if not isinstance(entry.get("sharded", False), bool):
            yield Problem(
                f"{at}.sharded",
                what=f"{entry['sharded']!r} is not true or false",
                code="wrong-type",
            )
        groups = entry.get("groups") or []
        if not isinstance(groups, list):
            yield Problem(
                f"{at}.groups",
                what=f"{groups!r} is not a list",
                remedy=f"write [{groups}]",
                code="wrong-type",
            )
            return
        for name in groups:
            if name not in self.instance_groups:
                yield Problem(
                    f"{at}.groups",
                    what=f"there is no instance group {name}",
                    remedy=did_you_mean_word(name, self.instance_groups)
                    or "launcher.instance_groups",
                    code="wrong-choice",
                )


def is_on_disk(entry: Mapping[str, Any]) -> bool:
    """Whether an input is a mounted file system."""
    return str(entry.get("path")).startswith(("efs:", "fsx:"))


def mode_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("mode") or ("ro" if is_on_disk(entry) else "File"))

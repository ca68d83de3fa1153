"""The request: the arguments of `create_training_job`, and the names of uploads and secrets.

Names, limits and meanings are from
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distdl.job import VERDICTS, JobSpec, variables
from distdl.launchers.common import PYTHON_CHECK, digest, slug
from distdl.launchers.sagemaker.instances import Instance, alike, instances
from distdl.launchers.sagemaker.sagemaker_settings import (
    BUNDLE,
    FILE_SYSTEM,
    LONGEST_WAIT,
    SageMakerSettings,
    mode_of,
)
from distdl.util.names import kept_apart

# Folders in the container; SageMaker defines the first two.
# https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo.html
INPUTS = "/opt/ml/input/data"
STORE = "/opt/ml/checkpoints"  # SageMaker fills it from S3 at the start, then copies changes to S3
UNPACKED = "/opt/ml/distdl"
ARCHIVE = "bundle.tar.gz"

# The image has a shell, Python and distdl's dependencies; the bundle has distdl itself. `exec` lets
# SIGTERM reach the entry point. The check is an argument, since each may have 256 characters.
ENTRY = (
    'python -c "$1" && shift && '
    f"python -m tarfile --filter data -e {INPUTS}/{BUNDLE}/{ARCHIVE} {UNPACKED} && "
    f'PYTHONPATH={UNPACKED}/code exec python -m distdl.launchers.sagemaker.entry "$@"'
)
# Variable -> name of its secret, as JSON; DISTDL_SECRETS_2 and so on if there are many.
SECRETS = "DISTDL_SECRETS"
REGION = "AWS_DEFAULT_REGION"
LONGEST_NAME = 63
LONGEST_VALUE = 512  # characters of a variable's value


@dataclass(frozen=True)
class SageMakerRequest:
    """One training job."""

    spec: JobSpec
    settings: SageMakerSettings
    names_taken: int = 0  # how many earlier job names are taken: SageMaker never frees a name

    @property
    def name(self) -> str:
        """The job's name: the run, the attempt, and a hash that distinguishes runs of the same name
        in other buckets or prefixes. At most 63 letters, digits and single hyphens."""
        full = f"{self.settings.bucket}/{self.settings.prefix}/{self.spec.name}"
        suffix = f"-{self.spec.attempt:03d}-{digest(full, 6)}"
        suffix += f"-{self.names_taken}" if self.names_taken else ""
        return slug(self.spec.name)[: LONGEST_NAME - len(suffix)].rstrip("-") + suffix

    @property
    def key(self) -> str:
        """The prefix of all objects of this run in the bucket."""
        return "/".join(filter(None, [self.settings.prefix.strip("/"), self.spec.name]))

    @property
    def bundle_key(self) -> str:
        return f"{self.key}/bundles/{self.name}/{ARCHIVE}"

    @property
    def store_key(self) -> str:
        return f"{self.key}/store"

    def uri(self, key: str) -> str:
        return f"s3://{self.settings.bucket}/{key}"

    @property
    def secrets(self) -> dict[str, str]:
        """Forwarded variable -> the name of its secret in Secrets Manager."""
        named = {}
        for name in self.spec.forward_env:
            full = f"{self.key}/{name}"
            accepted = re.sub(r"[^\w/+=.@-]", "_", full, flags=re.ASCII)
            named[name] = kept_apart(full, accepted, LONGEST_VALUE - len(json.dumps({name: ""})))
        return named

    @property
    def tag(self) -> str:
        """The run's name as a tag's value, which has at most 256 characters of some kinds."""
        return kept_apart(self.spec.name, re.sub(r"[^\w .:/=+@-]", "_", self.spec.name))

    def body(self, region: str | None = None) -> dict[str, Any]:
        """The arguments of `create_training_job`; `region` is that of the job and its secrets."""
        settings = self.settings
        size = self.spec.resources
        attempt = self.spec.attempt
        resources: dict[str, Any] = {"VolumeSizeInGB": settings.volume_gb}
        if settings.instance_groups:
            resources["InstanceGroups"] = [
                {
                    "InstanceGroupName": name,
                    "InstanceType": group["instance_type"],
                    "InstanceCount": group.get("count", 1),
                }
                for name, group in settings.instance_groups.items()
            ]
        else:
            hosts = {"InstanceType": settings.instance_type, "InstanceCount": size.num_nodes}
            resources = hosts | resources
        output: dict[str, Any] = {"S3OutputPath": self.uri(f"{self.key}/output")}
        if settings.kms_key:
            resources["VolumeKmsKeyId"] = output["KmsKeyId"] = settings.kms_key
        if settings.keep_alive:
            resources["KeepAlivePeriodInSeconds"] = settings.keep_alive
        if settings.training_plan:
            resources["TrainingPlanArn"] = settings.training_plan
        stopping = {"MaxRuntimeInSeconds": settings.walltime}
        if settings.spot:
            stopping["MaxWaitTimeInSeconds"] = settings.max_wait or min(
                2 * settings.walltime, LONGEST_WAIT
            )
        bundle = {"path": self.uri(self.bundle_key).rpartition("/")[0] + "/"}
        channels = [channel(*each) for each in ({BUNDLE: bundle} | settings.inputs).items()]
        tags = {"distdl:run": self.tag, **settings.tags}
        body: dict[str, Any] = {
            "TrainingJobName": self.name,
            "AlgorithmSpecification": {
                "TrainingImage": settings.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["sh", "-c", ENTRY, "distdl", PYTHON_CHECK],
                "ContainerArguments": f"--devices {size.devices} --attempt {attempt}".split(),
            },
            "RoleArn": settings.role,
            "InputDataConfig": channels,
            "OutputDataConfig": output,
            "CheckpointConfig": {"S3Uri": self.uri(self.store_key), "LocalPath": STORE},
            "ResourceConfig": resources,
            "StoppingCondition": stopping,
            "EnableManagedSpotTraining": settings.spot,
            "Environment": self.environment(region or settings.region),
            "Tags": [{"Key": key, "Value": str(value)} for key, value in tags.items()],
        }
        if settings.metrics:
            body["AlgorithmSpecification"]["MetricDefinitions"] = [
                {"Name": name, "Regex": pattern} for name, pattern in settings.metrics.items()
            ]
        if settings.network_isolation:
            body["EnableNetworkIsolation"] = True
        if settings.subnets:
            body["VpcConfig"] = {
                "Subnets": settings.subnets,
                "SecurityGroupIds": settings.security_groups,
            }
        if settings.encrypt_traffic:
            body["EnableInterContainerTrafficEncryption"] = True
        if settings.retries:
            body["RetryStrategy"] = {"MaximumRetryAttempts": settings.retries}
        return body

    def environment(self, region: str | None) -> dict[str, str]:
        """The container's variables. Everybody who may describe the job can read them, so they have
        only the names of secrets."""
        inputs = {f"DISTDL_INPUT_{n.upper()}": f"{INPUTS}/{n}" for n in self.settings.inputs}
        env = (
            variables(self.settings.env, self.spec.env) | {"DISTDL_LAUNCHER": "sagemaker"} | inputs
        )
        for number, part in enumerate(packed(self.secrets), start=1):
            env[SECRETS if number == 1 else f"{SECRETS}_{number}"] = json.dumps(part)
        if region:
            env[REGION] = region
        if self.spec.judged:
            env[VERDICTS] = verdicts_of(self.uri(self.store_key))
        return env

    def render(self) -> str:
        import yaml

        lines = [
            f"# region  {self.settings.region or 'by AWS_REGION or your AWS profile'}",
            f"# upload  {self.spec.bundle} -> {self.uri(self.bundle_key)}",
            *(f"# secret  ${name} -> Secrets Manager: {to}" for name, to in self.secrets.items()),
            *(f"# note    {note}" for note in self.notes()),
            "# create_training_job:",
        ]
        body = yaml.safe_dump(self.body(), sort_keys=False, width=1000)
        return "\n".join([*lines, body.rstrip()])

    def notes(self) -> Iterator[str]:
        """Notes on settings that are allowed but probably not intended."""
        groups = self.settings.instance_groups.values()
        types = {str(group["instance_type"]) for group in groups}
        if len(types) > 1:
            yield f"hosts of {' and '.join(sorted(types))}: the slowest rank sets the pace"
        for name in sorted(types) or [str(self.settings.instance_type)]:
            yield from self._notes_on(instances().get(name, Instance(name)))

    def _notes_on(self, instance: Instance) -> Iterator[str]:
        size = self.spec.resources
        name = instance.name
        gpus = instance.gpus
        one_host = size.num_nodes == 1
        if size.accelerator == "cpu" and gpus:
            yield f"{name} has {gpus} GPUs, but none of them is used"
        elif 0 < size.devices < gpus:
            fits = not one_host and size.world_size <= gpus
            enough = f": one host is enough for all {size.world_size} ranks" if fits else ""
            yield f"{name} has {gpus} GPUs, but only {size.devices} are used{enough}"
        if not one_host and gpus and not instance.efa:
            larger = next((i for i in alike(instance) if i.gpus >= size.world_size), None)
            hint = f"; one host is enough: {larger.name} ({larger.gpus} GPUs)" if larger else ""
            speed = f"{instance.network} Gbit/s of Ethernet{hint}"
            yield f"{name} has no EFA: {size.num_nodes} hosts exchange gradients over {speed}"


def verdicts_of(store: str) -> str:
    """Where a search leaves its verdicts on a run: beside its store, which SageMaker fills a
    container's disk from and then overwrites from there."""
    return f"{store.rstrip('/').rpartition('/')[0]}/search"


def channel(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if disk := FILE_SYSTEM.fullmatch(str(entry["path"])):
        source = {
            "FileSystemId": disk[2],
            "FileSystemAccessMode": mode_of(entry),
            "FileSystemType": {"efs": "EFS", "fsx": "FSxLustre"}[disk[1]],
            "DirectoryPath": disk[3] or "/",
        }
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}}
    # By default every host gets all the data; the data module decides which rank reads which part.
    distribution = "ShardedByS3Key" if entry.get("sharded") else "FullyReplicated"
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": str(entry["path"]),
        "S3DataDistributionType": distribution,
    }
    if entry.get("groups"):
        source["InstanceGroupNames"] = entry["groups"]
    return {
        "ChannelName": name,
        "DataSource": {"S3DataSource": source},
        "InputMode": mode_of(entry),
    }


def packed(secrets: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The secrets in parts, each of which is short enough for one variable, as JSON."""
    part: dict[str, str] = {}
    for name, secret in secrets.items():
        if part and len(json.dumps({**part, name: secret})) > LONGEST_VALUE:
            yield part
            part = {}
        part[name] = secret
    if part:
        yield part

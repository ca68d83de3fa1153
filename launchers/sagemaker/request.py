"""The request: what `create_training_job` gets, and what is uploaded before.

Source of names, limits and meanings:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from distdl import walltime
from distdl.job import JobSpec, variables
from distdl.launchers.sagemaker.inputs import BUNDLE, parse, s3_channel

# Folders of a container that SageMaker fixes.
# https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo.html
INPUTS = "/opt/ml/input/data"
STORE = "/opt/ml/checkpoints"  # kept equal to a place in S3, and filled from it at the start
UNPACKED = "/opt/ml/distdl"
ARCHIVE = "bundle.tar.gz"

# Nothing of distdl is in the image: its code comes with the bundle. The image has a shell, Python
# and what distdl depends on. `exec`, so that SIGTERM reaches our entry point.
ENTRY = (
    f"python -m tarfile --filter data -e {INPUTS}/{BUNDLE}/{ARCHIVE} {UNPACKED} && "
    f'PYTHONPATH={UNPACKED}/code exec python -m distdl.launchers.sagemaker.entry "$@"'
)
SECRETS = "DISTDL_SECRETS"  # variable -> name of its secret, as JSON
REGION = "AWS_DEFAULT_REGION"
LONGEST_NAME = 63
LONGEST_WAIT = 30 * 86400  # seconds a job may take with all its waiting


@dataclass
class Settings:
    """The keys of `launcher.*`.

    Args:
        role: ARN of the role that the job acts as.
        image: The container, in ECR.
        instance_type: Of every host, e.g. ml.p4d.24xlarge.
        bucket, prefix: Where in S3 code, checkpoints and logs of all runs go.
        region, profile: Of AWS; None leaves it to AWS's own variables and files.
        volume_gb: Disk of each host, in GB; sizes with NVMe disks ignore it.
        walltime: Until the job is stopped; `distdl.walltime` says what it means.
        spot: Spare capacity, which may be taken away; the run goes on when there is some again.
        max_wait: What waiting and running may take together; None: twice the walltime.
        keep_alive: Seconds that the hosts stay, and cost, for a next job.
        retries: How often SageMaker starts it again after an error of its own.
        subnets, security_groups: Of the VPC that the hosts are in.
        encrypt_traffic: Between the hosts; slower.
        kms_key: Encrypts disks and output.
        tags: Further tags of the job.
        env: Further variables for every rank, none of them secret.
        inputs: Name -> URI, or {path, mode}; see `distdl.launchers.sagemaker.inputs`.
        forward_env: Names of variables; their values go to AWS Secrets Manager.
    """

    role: str | None = None
    image: str | None = None
    instance_type: str | None = None
    bucket: str | None = None
    prefix: str = "distdl"
    region: str | None = None
    profile: str | None = None
    volume_gb: int = 100
    walltime: str | float = 24
    spot: bool = False
    max_wait: str | float | None = None
    keep_alive: int = 0
    retries: int = 0
    subnets: list[str] | None = None
    security_groups: list[str] | None = None
    encrypt_traffic: bool = False
    kms_key: str | None = None
    tags: dict[str, str] | None = None
    env: dict[str, str] | None = None
    inputs: dict[str, Any] | None = None
    forward_env: list[str] | None = None


@dataclass(frozen=True)
class SageMakerRequest:
    """One training job.

    Args:
        spec: The attempt.
        settings: `launcher.*`.
        again: Which try at a free name this is: SageMaker never gives a name twice.
    """

    spec: JobSpec
    settings: Settings
    again: int = 0

    @property
    def name(self) -> str:
        """Of the job: the run, the attempt, and a hash that tells equal names of runs in other
        buckets apart. At most 63 letters, digits and single hyphens."""
        whole = f"{self.settings.bucket}/{self.settings.prefix}/{self.spec.name}"
        suffix = f"-{self.spec.attempt:03d}-{hashlib.sha256(whole.encode()).hexdigest()[:6]}"
        suffix += f"-{self.again}" if self.again else ""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", self.spec.name).strip("-")
        return plain[: LONGEST_NAME - len(suffix)].rstrip("-") + suffix

    @property
    def key(self) -> str:
        """Of everything that this run has in the bucket."""
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
        return {name: f"{self.key}/{name}" for name in self.spec.forward_env}

    def body(self, region: str | None = None) -> dict[str, Any]:
        """The arguments of `create_training_job`.

        Args:
            region: Where it goes; the job asks the same region for its secrets.
        """
        s, size = self.settings, self.spec.resources
        resources: dict[str, Any] = {
            "InstanceType": s.instance_type,
            "InstanceCount": size.num_nodes,
            "VolumeSizeInGB": s.volume_gb,
        }
        output: dict[str, Any] = {"S3OutputPath": self.uri(f"{self.key}/output")}
        if s.kms_key:
            resources["VolumeKmsKeyId"] = output["KmsKeyId"] = s.kms_key
        if s.keep_alive:
            resources["KeepAlivePeriodInSeconds"] = s.keep_alive
        run = walltime.seconds(s.walltime)
        stopping = {"MaxRuntimeInSeconds": run}
        if s.spot:
            twice = min(2 * run, LONGEST_WAIT)
            wait = twice if s.max_wait is None else walltime.seconds(s.max_wait)
            stopping["MaxWaitTimeInSeconds"] = wait
        bundle = s3_channel(BUNDLE, self.uri(self.bundle_key).rpartition("/")[0] + "/", "File")
        body: dict[str, Any] = {
            "TrainingJobName": self.name,
            "AlgorithmSpecification": {
                "TrainingImage": s.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["sh", "-c", ENTRY, "distdl"],
                "ContainerArguments": [
                    *("--devices", str(size.devices)),
                    *("--attempt", str(self.spec.attempt)),
                ],
            },
            "RoleArn": s.role,
            "InputDataConfig": [bundle, *(each.channel() for each in parse(s.inputs or {}))],
            "OutputDataConfig": output,
            "CheckpointConfig": {"S3Uri": self.uri(self.store_key), "LocalPath": STORE},
            "ResourceConfig": resources,
            "StoppingCondition": stopping,
            "EnableManagedSpotTraining": s.spot,
            "Environment": self.environment(region or s.region),
            "Tags": [
                {"Key": key, "Value": str(value)}
                for key, value in {"distdl:run": self.spec.name, **(s.tags or {})}.items()
            ],
        }
        if s.subnets:
            groups = list(s.security_groups or ())
            body["VpcConfig"] = {"Subnets": list(s.subnets), "SecurityGroupIds": groups}
        if s.encrypt_traffic:
            body["EnableInterContainerTrafficEncryption"] = True
        if s.retries:
            body["RetryStrategy"] = {"MaximumRetryAttempts": s.retries}
        return body

    def environment(self, region: str | None) -> dict[str, str]:
        """The container's variables. Everybody who may describe the job can read them, so they
        name secrets and hold none."""
        env = variables(self.settings.env or {}, self.spec.env)
        env["DISTDL_LAUNCHER"] = "sagemaker"
        for each in parse(self.settings.inputs or {}):
            env[f"DISTDL_INPUT_{each.name.upper()}"] = f"{INPUTS}/{each.name}"
        if self.secrets:
            env[SECRETS] = json.dumps(self.secrets)
        if region:
            env[REGION] = region
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

    def notes(self) -> list[str]:
        """What is allowed and probably not wanted."""
        from distdl.launchers.sagemaker.instances import Instance, known

        size = self.spec.resources
        name = str(self.settings.instance_type)
        instance = known().get(name, Instance(name))
        notes = []
        if size.accelerator == "gpu" and 0 < size.devices < instance.gpus:
            notes.append(
                f"{instance.name} has {instance.gpus} GPUs, and {size.devices} of them are used"
                + (
                    f": one host holds all {size.world_size} ranks"
                    if size.num_nodes > 1 and size.world_size <= instance.gpus
                    else ""
                )
            )
        if size.accelerator == "cpu" and instance.gpus:
            notes.append(f"{instance.name} has {instance.gpus} GPUs, and none of them is used")
        if size.num_nodes > 1 and instance.gpus and not instance.efa:
            bigger = [
                f"{i.name} ({i.gpus} GPUs)"
                for i in known().values()
                if i.gpu == instance.gpu and i.gpus >= size.world_size
            ]
            hint = f"; one host would do: {bigger[0]}" if bigger else ""
            notes.append(
                f"{instance.name} has no EFA: {size.num_nodes} hosts share gradients over "
                f"{instance.network} Gbit/s of Ethernet{hint}"
            )
        return notes

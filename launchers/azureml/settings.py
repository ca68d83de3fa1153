"""The settings of `launcher=azureml`, and their validation, which works without an account.

The SDK's own validation accepts undefined inputs, negative node counts and most misspelt words.
Azure would reject them later, some only after an hour in the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from distdl.launchers.azureml import misfits, vm_sizes
from distdl.launchers.azureml.values import (
    ARM_ID,
    COMPUTE_NAME,
    DATASTORE,
    ENVIRONMENT,
    INPUT_NAME,
    KEY_VAULT,
    OUTPUT_NAME,
    AzureInput,
    AzureOutput,
    JobService,
    MountSetting,
    Size,
    SweepJob,
    VmSizeName,
    mapping,
    without_nulls,
)
from distdl.launchers.common import (
    Count,
    LauncherSettings,
    ListOf,
    Positive,
    Values,
    Walltime,
    with_paths,
)
from distdl.util.errors import Problem

BASE_IMAGE = "mcr.microsoft.com/azureml/openmpi5.0-ubuntu24.04"  # of a conda environment


class AzureSettings(LauncherSettings):
    """The settings, each with its sentence; conf/launcher/azureml.yaml sets their defaults."""

    subscription: str | None = None
    """The workspace's subscription; null: that of AZURE_SUBSCRIPTION_ID, or of the nearest
    config.json.

    It is config.json or .azureml/config.json in this folder or one above it."""

    resource_group: str | None = None
    """The workspace's resource group; null: that of AZURE_RESOURCE_GROUP, or of the nearest
    config.json."""

    workspace: str | None = None
    """The workspace's name; null: that of AZUREML_WORKSPACE_NAME, or of the nearest config.json."""

    cloud: str | None = None
    """AzureCloud, AzureUSGovernment or AzureChinaCloud; null: the SDK's own choice
    (ARM_CLOUD_METADATA_URL)."""

    vm_size: VmSizeName = "Standard_NC24ads_A100_v4"
    """The size of one node.

    trainer.num_nodes is the number of nodes, trainer.devices that of GPUs used on each."""

    tier: Literal["dedicated", "spot", "low_priority"] = "dedicated"
    """dedicated, or spot: cheaper, but Azure may take nodes away; the run then resumes.

    low_priority is the old name: Azure has given spot VMs for it since 2026-03-31."""

    compute: Annotated[str, COMPUTE_NAME] | None = None
    """The name of an AmlCompute cluster; null: serverless compute, with no cluster to maintain."""

    compute_type: Literal["amlcompute", "kubernetes"] = "amlcompute"
    """amlcompute, or kubernetes: the compute is a Kubernetes cluster that is attached to the
    workspace.

    vm_size then does not count."""

    instance_type: str | None = None
    """One of a Kubernetes cluster's own instance types; null: its default."""

    create_compute: bool = True
    """Whether a missing cluster is created. An existing one is never changed."""

    min_nodes: Count = 0
    """The least number of nodes of a cluster that is created; above 0 it costs money while idle."""

    max_nodes: Positive | None = None
    """The greatest number of nodes of a cluster that is created; null: that of the job."""

    idle_seconds: Count = 300
    """A node without work is given back after so many seconds."""

    vnet: str | None = None
    """The virtual network of a cluster that is created; null: none, or subnet is a full ARM id."""

    subnet: str | None = None
    """A subnet of vnet, or the full ARM id of any."""

    public_ip: bool = True
    """Whether nodes have public addresses; false needs a subnet with a way to the internet."""

    compute_identity: Literal["system", "none"] | list[Annotated[str, ARM_ID]] = "system"
    """The identity of the cluster's nodes: system, none, or the ARM ids of user-assigned
    identities."""

    walltime: Walltime | None = None
    """Azure cancels the job after: hours (0.5), or in quotes "1:30:00", "2-12" (days-hours); null:
    never."""

    environment: Annotated[str, ENVIRONMENT] | None = None
    """An environment of Azure ML for the job; null: built once from launchers/azureml/image.

    azureml:NAME@latest, azureml:NAME:VERSION or azureml://registries/azureml/environments/NAME/...
    Of environment, image and build_context only one may be set."""

    image: str | None = None
    """A ready image: myregistry.azurecr.io/train:1."""

    build_context: str | None = None
    """A folder that holds your own Dockerfile and only the files that it needs."""

    conda_file: str | None = None
    """A conda environment (environment.yml), which Azure installs on image, or on its own base
    image.

    It needs all that distdl imports."""

    distribution: Literal["pytorch", "mpi"] = "pytorch"
    """pytorch: Azure starts one process per device; mpi: Azure's mpirun does."""

    shm_size: Size | None = "16g"
    """Shared memory of a node's container, which data loaders use: a number and b, k, m or g."""

    docker_args: str | None = None
    """More arguments of `docker run` for the job's container."""

    # Settings are frozen: whoever takes them as LauncherSettings puts no plain mapping into it.
    inputs: Annotated[
        dict[Annotated[str, INPUT_NAME], AzureInput], BeforeValidator(with_paths)
    ] = {}  # type: ignore[assignment]
    """Data sets and models: NAME: URI, or NAME: {path, mode, type}.

    The recipe uses them as '${input:NAME}'."""

    outputs: Annotated[
        dict[Annotated[str, OUTPUT_NAME], AzureOutput], BeforeValidator(mapping)
    ] = {}
    """What the job leaves besides its run: NAME: {type, folder, name}, or NAME: {path, ...}.

    {model: {type: custom_model, folder: checkpoints, name: resnet}}: a folder of the run, or a path
    azureml://datastores/... With a name, Azure registers it at the end. Your code finds it in the
    variable DISTDL_OUTPUT_MODEL."""

    mount: Annotated[
        dict[MountSetting, Any], BeforeValidator(mapping), AfterValidator(without_nulls)
    ] = {}
    """Settings of Azure's data mounts (DATASET_MOUNT_*); null: Azure's default."""

    datastore: Annotated[str, DATASTORE] = "workspaceblobstore"
    """The datastore of checkpoints, logs and status: azureml://datastores/<this>/paths/distdl/<run
    id>."""

    forward_env: ListOf[str] = []
    """Names of environment variables whose values are sent to the job, through the workspace's Key
    Vault."""

    key_vault: Annotated[str, KEY_VAULT] | None = None
    """Another Key Vault: its name or its https address."""

    identity: Literal["managed", "user"] | None = None
    """The identity that reads data and secrets: managed (the cluster's), user (you), null (Azure's
    choice)."""

    env: Values = {}
    """More environment variables of every rank, e.g. {NCCL_DEBUG: INFO}; never a secret."""

    linger_seconds: Count = 120
    """Spot only: seconds that a worker waits after the checkpoint that it writes because its node
    is taken away.

    If it ended before its node, Azure would count the job as failed."""

    sweep: Literal["jobs", "azureml"] = "jobs"
    """What -m submits: jobs (one per run), or one Azure ML sweep job (azureml) over the same frozen
    runs."""

    sweep_job: Annotated[SweepJob, BeforeValidator(mapping)] = SweepJob()
    """Of sweep=azureml: how many trials run at once, and the metric by which Azure's page sorts
    them."""

    files: str | None = None
    """With dry_run=true: a folder into which the code and job.yml, environment.yml and compute.yml
    are written.

    `az ml ... create --file` reads them."""

    storage_sku: Literal["standard", "premium"] | None = None
    """For the advice of a dry run only: standard or premium storage of your data."""

    registry_sku: Literal["basic", "standard", "premium"] | None = None
    """For the advice of a dry run only: a basic, standard or premium registry."""

    experiment_name: str | None = None
    """The name of the job's experiment in the Studio; null: the run's experiment."""

    display_name: str | None = None
    """The name of the job in the Studio; null: the run's id."""

    description: str | None = None
    """What the Studio shows about the job."""

    priority: Literal["low", "medium", "high"] | None = None
    """low, medium or high, where the compute has a queue with priorities."""

    tags: Values = {}
    """Tags of the job."""

    services: Annotated[dict[str, JobService], BeforeValidator(mapping)] = {}
    """Ways into a running job: NAME: {type: ssh, tensor_board, jupyter_lab or vs_code, ...}.

    {ssh: {type: ssh, ssh_public_keys: "ssh-rsa ..."}, jupyter: {type: jupyter_lab}}"""

    @property
    def on_kubernetes(self) -> bool:
        return self.compute_type == "kubernetes"

    @property
    def spot(self) -> bool:
        return self.tier in vm_sizes.SPOT

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        return misfits.misfits(self, context)

    def conda(self) -> dict[str, Any]:
        """What the conda file holds.

        Raises:
            ValueError: It is absent, or lists no packages.
        """
        import yaml

        assert self.conda_file is not None
        try:
            found = yaml.safe_load(Path(self.conda_file).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{self.conda_file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            lines = " ".join(str(error).split())
            raise ValueError(f"{self.conda_file} is not YAML: {lines}") from None
        if not isinstance(found, dict) or not isinstance(found.get("dependencies"), list):
            raise ValueError(f"{self.conda_file} has no list of dependencies")
        return found

"""The settings of `launcher=azureml`, and their validation, which works without an account.

The SDK's own validation accepts undefined inputs, negative node counts and most misspelt words.
Azure would reject them later, some only after an hour in the queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distdl.launchers.azureml import docker_options, vm_sizes
from distdl.launchers.common import (
    Count,
    LauncherSettings,
    ListOf,
    Positive,
    Values,
    Walltime,
    matching,
    with_paths,
)
from distdl.util.errors import Problem, Refused
from distdl.util.suggest import did_you_mean_word

Size = Annotated[str, matching(r"[1-9]\d*[bkmgBKMG]", "a size", "a number and b, k, m or g: 16g")]
# https://learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules
COMPUTE_NAME = matching(
    r"[A-Za-z](?=.{2,31}$)[A-Za-z0-9-]*[A-Za-z0-9]",
    "a name for a cluster",
    "3 to 32 letters, digits and hyphens, a letter first, no hyphen last",
)
ENVIRONMENT = matching(
    r"azureml:(//registries/[^/]+/environments/.+|[^/:@]+[:@].+)",
    "the name of an environment",
    "azureml:NAME@latest, azureml:NAME:VERSION or azureml://registries/.../environments/...",
)
DATASTORE = matching("[A-Za-z0-9_]+", "the name of a datastore", "letters, digits and _")
KEY_VAULT = matching(
    r"[A-Za-z][\w-]{1,22}|https://[^/]+/?",
    "a Key Vault's name or https address",
    "https://NAME.vault.azure.net",
)
IDENTITY = "[/subscriptions/.../userAssignedIdentities/NAME]"
ARM_ID = matching("/subscriptions/.*", "an ARM id", IDENTITY)
INPUT_NAME = matching("[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and _")
OUTPUT_NAME = matching(r"(?!store$)[A-Za-z_]\w*", "a name of letters, digits and _, but store")
RUN_FOLDER = matching(
    r"(?![.]{1,2}(/|$))[\w.-]+(/(?![.]{1,2}(/|$))[\w.-]+)*",
    "a folder of the run",
    "write checkpoints, exports/pt2 or the like",
)
OUTPUT_PATH = matching(
    r"azureml://datastores/[^']+",
    "the address of a folder",
    "azureml://datastores/NAME/paths/FOLDER",
)
ASSET_NAME = matching(
    r"[A-Za-z0-9][\w.-]{0,254}", "a name for a model or data asset", "letters, digits, _ . and -"
)
BASE_IMAGE = "mcr.microsoft.com/azureml/openmpi5.0-ubuntu24.04"  # of a conda environment
REMOTE = re.compile(r"(azureml|wasbs?|abfss?|adl|https?)://|azureml:[^/]")
REFERENCE = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)\s*\}\}")


def _vm_size(name: Any) -> Any:
    """Also accepts well-formed names that are not in vm_sizes.yaml: Azure may have that size."""
    if not vm_sizes.find(str(name)) and not vm_sizes.unknown_note(str(name)):
        what = f"{name!r} is not the name of a VM size" if name else "missing"
        raise Refused(what, vm_sizes.suggest(str(name or "")))
    return name


VmSizeName = Annotated[str, BeforeValidator(_vm_size)]
# https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2#available-mount-settings
MOUNT = (
    *("attribute_cache_ttl", "block_based_cache_enabled", "block_file_cache_enabled"),
    *("block_file_cache_max_queue_size", "block_file_cache_write_threads", "cache_size"),
    *("file_cache_prune_target", "file_cache_prune_threshold", "memory_cache_size"),
    *("read_block_size", "read_buffer_block_count", "read_threads", "reserved_free_disk_space"),
    "unmount_timeout_seconds",
)


def _mount_setting(name: str) -> str:
    if name not in MOUNT:
        remedy = did_you_mean_word(name, MOUNT) or f"one of {', '.join(MOUNT)}"
        raise Refused(f"{name!r} is not a setting of Azure's data mounts", remedy)
    return name


MountSetting = Annotated[str, AfterValidator(_mount_setting)]


def _mapping(value: Any) -> Any:
    return {} if value is None else value


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class Entry(BaseModel, strict=True, validate_default=True, extra="forbid"):
    """A mapping in the settings that names a key it does not know, and the closest one it does."""

    kind: ClassVar = ""  # what such a mapping is

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for key in sorted(set(values) - set(cls.model_fields)) if isinstance(values, dict) else ():
            known = cls.model_fields
            hint = did_you_mean_word(key, known) or f"one of {', '.join(known)}"
            raise Refused(f"{key!r} is not a setting of {cls.kind}", hint)
        return values


class AzureInput(Entry):
    """Data or a model that Azure mounts or copies: a value of `launcher.inputs`."""

    kind: ClassVar = "an input"

    type: Literal[
        "uri_folder", "uri_file", "mltable", "custom_model", "mlflow_model", "triton_model"
    ] = "uri_folder"
    # https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2#modes
    mode: Literal["ro_mount", "download", "direct", "eval_mount", "eval_download"] = "ro_mount"
    path: str = ""

    @field_validator("mode")
    @classmethod
    def _of_its_type(cls, mode: str, info: ValidationInfo) -> str:
        if mode.startswith("eval_") and info.data.get("type", "mltable") != "mltable":
            raise Refused(f"{mode} is only for type=mltable", "write ro_mount or download")
        return mode

    @field_validator("path")
    @classmethod
    def _remote(cls, path: str) -> str:
        if not path:
            raise Refused("missing", "write azureml://datastores/NAME/paths/FOLDER")
        if "'" in path:
            raise Refused("has a ', which would end a quotation in the job's command", "write %27")
        if not REMOTE.match(path):
            remedy = "upload it, and write azureml://datastores/NAME/paths/FOLDER, azureml:DATA:1 "
            raise Refused(
                f"{path} is not an address that Azure can read", f"{remedy}or https://..."
            )
        return path


class AzureOutput(Entry):
    """What a job leaves besides its store: a value of `launcher.outputs`. With a `name`, Azure
    registers it at the end as a model or a data asset, by its `type`. It is a `folder` of the run,
    or lies at another `path`."""

    kind: ClassVar = "an output"

    type: Literal["uri_folder", "mltable", "custom_model", "mlflow_model", "triton_model"] = (
        "uri_folder"
    )
    folder: Annotated[str, RUN_FOLDER] | None = None
    path: Annotated[str, OUTPUT_PATH] | None = None
    mode: Literal["rw_mount", "upload"] = "rw_mount"
    name: Annotated[str, ASSET_NAME] | None = None
    version: Annotated[str, ASSET_NAME] | None = None


class JobService(Entry):
    """Interactive access to a running job: a value of `launcher.services`."""

    kind: ClassVar = "a service"

    type: Literal["ssh", "tensor_board", "jupyter_lab", "vs_code"]
    nodes: Annotated[str, matching("all|[0-9]+", "all, or the number of a node")] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    properties: dict[str, str] | None = None
    ssh_public_keys: str | None = None
    log_dir: str | None = None


# The key that one type of service has alone. The SDK drops those of another type in silence.
SERVICE_KEYS = {"ssh_public_keys": "ssh", "log_dir": "tensor_board"}


class SweepJob(Entry):
    kind: ClassVar = "sweep_job"
    max_concurrent: Positive = 4
    metric: str = "val/acc1"
    goal: Literal["maximize", "minimize"] = "maximize"


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

    inputs: Annotated[
        dict[Annotated[str, INPUT_NAME], AzureInput], BeforeValidator(with_paths)
    ] = {}
    """Data sets and models: NAME: URI, or NAME: {path, mode, type}.

    The recipe uses them as '${input:NAME}'."""

    outputs: Annotated[
        dict[Annotated[str, OUTPUT_NAME], AzureOutput], BeforeValidator(_mapping)
    ] = {}
    """What the job leaves besides its run: NAME: {type, folder, name}, or NAME: {path, ...}.

    {model: {type: custom_model, folder: checkpoints, name: resnet}}: a folder of the run, or a path
    azureml://datastores/... With a name, Azure registers it at the end. Your code finds it in the
    variable DISTDL_OUTPUT_MODEL."""

    mount: Annotated[
        dict[MountSetting, Any], BeforeValidator(_mapping), AfterValidator(_without_nulls)
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

    sweep_job: Annotated[SweepJob, BeforeValidator(_mapping)] = SweepJob()
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

    services: Annotated[dict[str, JobService], BeforeValidator(_mapping)] = {}
    """Ways into a running job: NAME: {type: ssh, tensor_board, jupyter_lab or vs_code, ...}.

    {ssh: {type: ssh, ssh_public_keys: "ssh-rsa ..."}, jupyter: {type: jupyter_lab}}"""

    @property
    def on_kubernetes(self) -> bool:
        return self.compute_type == "kubernetes"

    @property
    def spot(self) -> bool:
        return self.tier in vm_sizes.SPOT

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        yield from self._gpus(context)
        yield from self._nodes(context)
        yield from self._kubernetes()
        parts = (self._network, self._image, self._services, self._outputs)
        for part in (*parts, self._references, self._files):
            yield from part()

    def _gpus(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        vm, devices = vm_sizes.find(self.vm_size), context.get("devices", 1)
        if vm is None or self.on_kubernetes or context.get("accelerator") != "gpu":
            return
        if vm.gpus == 0:
            remedy = "choose a size with GPUs, or write trainer.accelerator=cpu"
            yield Problem("vm_size", f"{vm.name} has no GPU", remedy)
        elif devices > vm.gpus:
            have = f"{vm.gpus} GPU{'s' if vm.gpus > 1 else ''}"
            what = f"{devices} processes per node (trainer.devices), but {vm.name} has {have}"
            remedy = f"write trainer.devices={vm.gpus}, or choose a larger size"
            yield Problem("vm_size", what, remedy)
        if vm.gpu in vm_sizes.OTHER_IMAGE and not self._images():
            what = f"distdl's image is for NVIDIA and x86-64, but {vm.name} has an {vm.gpu}: "
            remedy = "write launcher.image=... with a torch for it, or launcher.build_context=..."
            yield Problem("vm_size", what + vm_sizes.OTHER_IMAGE[vm.gpu], remedy)
        if vm.gpu in vm_sizes.TOO_OLD and not self._images():
            what = f"the torch of distdl's image has no kernels for a {vm.gpu} (CUDA 13 dropped it)"
            remedy = "choose a T4, A100 or newer, or a launcher.image or launcher.build_context "
            yield Problem("vm_size", what, f"{remedy}whose torch is built for CUDA 12")

    def _nodes(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        nodes = context.get("num_nodes", 1)
        if self.on_kubernetes:  # which has its own limits
            return
        most = self.max_nodes or nodes
        if nodes > most:
            what = f"trainer.num_nodes={nodes}, but the cluster has at most {most}: the job would "
            yield Problem("max_nodes", f"{what}never start", f"write launcher.max_nodes={nodes}")
        if self.min_nodes > most:
            yield Problem("min_nodes", f"{self.min_nodes} is more than max_nodes ({most})")

    def _network(self) -> Iterator[Problem]:
        if self.vnet and not self.subnet:
            yield Problem("subnet", "missing, but launcher.vnet is set", "name a subnet of it")
        if self.subnet and not self.vnet and not self.subnet.startswith("/subscriptions/"):
            what = "without launcher.vnet it must be the subnet's full ARM id"
            yield Problem("subnet", what, "write launcher.vnet=<name of the network> as well")
        if not self.public_ip and not self.subnet:
            what = "nodes without a public IP address need a subnet"
            yield Problem("public_ip", what, "write launcher.vnet=... launcher.subnet=...")

    def _images(self) -> list[str]:
        """The settings that replace distdl's own image and are set."""
        keys = ("environment", "image", "build_context", "conda_file")
        return [key for key in keys if getattr(self, key)]

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

    def _image(self) -> Iterator[Problem]:
        if self.conda_file:
            try:
                self.conda()
            except ValueError as error:
                remedy = "dependencies: [python=3.11, pip, {pip: [...]}]"
                yield Problem("conda_file", str(error), remedy)
        keys = self._images()
        if keys != ["image", "conda_file"] and len(keys) > 1:  # a conda file is put onto an image
            names = " and ".join(f"launcher.{key}" for key in keys)
            yield Problem(keys[0], f"{names} each choose the job's image", "set only one of them")
        yield from docker_options.problems(self.docker_args or "")
        folder = self.build_context
        if folder and not (Path(folder).expanduser() / "Dockerfile").is_file():
            yield Problem("build_context", f"{folder} has no Dockerfile")

    def _services(self) -> Iterator[Problem]:
        if self.services and self.sweep == "azureml":
            what = "the trials of a sweep job have none"
            yield Problem("services", what, "write launcher.sweep=jobs")
        for name, service in self.services.items():
            for key, kind in SERVICE_KEYS.items():
                if kind != service.type and getattr(service, key) is not None:
                    what = f"is a key of type {kind}, not of {service.type}"
                    yield Problem(f"services.{name}.{key}", what, "leave it out")
            if service.type == "ssh" and not service.ssh_public_keys:
                path, what = f"services.{name}.ssh_public_keys", "missing: nobody could log in"
                yield Problem(path, what, "write the text of your *.pub file")

    def _outputs(self) -> Iterator[Problem]:
        if self.outputs and self.sweep == "azureml":
            what = "all trials of a sweep job would write to the same place"
            yield Problem("outputs", what, "write launcher.sweep=jobs")
        for name, output in self.outputs.items():
            if bool(output.folder) == bool(output.path):
                what = "needs either a folder of the run or a path"
                yield Problem(f"outputs.{name}", what, f"write {{folder: {name}}}")
            if output.version and not output.name:
                what = "without a name nothing is registered"
                yield Problem(f"outputs.{name}.version", what, "write the name as well")

    def _kubernetes(self) -> Iterator[Problem]:
        if self.instance_type and not self.on_kubernetes:
            what = "only a Kubernetes compute has instance types"
            remedy = f"write launcher.vm_size={self.instance_type}, or compute_type=kubernetes"
            yield Problem("instance_type", what, remedy)
        if not self.on_kubernetes:
            return
        if not self.compute:
            remedy = "write launcher.compute=<its name in the workspace>"
            yield Problem("compute", "missing: which Kubernetes compute", remedy)
        if self.spot:
            what = f"{self.tier}, but a Kubernetes cluster has no tiers"
            yield Problem("tier", what, "write launcher.tier=dedicated, and an instance_type")

    def _references(self) -> Iterator[Problem]:
        """Undefined `${{inputs.NAME}}` or `${{outputs.NAME}}` in settings, which Azure fills in."""
        known = {"inputs": list(self.inputs), "outputs": ["store", *self.outputs]}
        for path, text in _strings(self.model_dump(), ""):
            for kind, name in REFERENCE.findall(text):
                if name not in known[kind]:
                    has = f"launcher.{kind} has {', '.join(known[kind]) or 'none'}"
                    what = f"refers to ${{{{{kind}.{name}}}}}, which is undefined"
                    yield Problem(path, what, did_you_mean_word(name, known[kind]) or has)

    def _files(self) -> Iterator[Problem]:
        """Settings that need an action at submission, which `launcher.files` cannot include."""
        if self.files and self.forward_env:
            what = "the values of launcher.forward_env are stored only when distdl submits the job"
            remedy = "write launcher.forward_env=[], and pass them to the job yourself"
            yield Problem("files", what, remedy)
        if self.files and self.sweep == "azureml":
            what = "the code of a sweep job is collected only when distdl submits it"
            yield Problem("files", what, "write launcher.sweep=jobs, for a folder per member")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str):
        yield path, value

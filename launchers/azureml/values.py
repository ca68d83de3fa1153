"""The values that settings of `launcher=azureml` may have: names, addresses, and the mappings that
describe inputs, outputs, services and sweeps."""

from __future__ import annotations

import re
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

from distdl.launchers.azureml import vm_sizes
from distdl.launchers.common import Positive, matching
from distdl.util.errors import Refused
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
REMOTE = re.compile(r"(azureml|wasbs?|abfss?|adl|https?)://|azureml:[^/]")


def _vm_size(name: object) -> object:
    """Also accepts well-formed names that are not in vm_sizes.yaml: Azure may have that size."""
    if not vm_sizes.find(str(name)) and not vm_sizes.unknown_note(str(name)):
        raise Refused(
            what=f"{name!r} is not the name of a VM size" if name else "missing",
            remedy=vm_sizes.suggest(str(name or "")),
            code="wrong-kind",
        )
    return name


VmSizeName = Annotated[str, BeforeValidator(_vm_size)]
# https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2#available-mount-settings
MOUNT = (
    "attribute_cache_ttl",
    "block_based_cache_enabled",
    "block_file_cache_enabled",
    "block_file_cache_max_queue_size",
    "block_file_cache_write_threads",
    "cache_size",
    "file_cache_prune_target",
    "file_cache_prune_threshold",
    "memory_cache_size",
    "read_block_size",
    "read_buffer_block_count",
    "read_threads",
    "reserved_free_disk_space",
    "unmount_timeout_seconds",
)


def _mount_setting(name: str) -> str:
    if name not in MOUNT:
        raise Refused(
            what=f"{name!r} is not a setting of Azure's data mounts",
            remedy=did_you_mean_word(name, MOUNT) or f"one of {', '.join(MOUNT)}",
            code="unknown-key",
        )
    return name


MountSetting = Annotated[str, AfterValidator(_mount_setting)]


def mapping(value: object) -> object:
    return {} if value is None else value


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class Entry(BaseModel, strict=True, validate_default=True, extra="forbid"):
    """A mapping in the settings that names a key it does not know, and the closest one it does."""

    kind: ClassVar = ""  # what such a mapping is

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: object) -> object:
        for key in sorted(set(values) - set(cls.model_fields)) if isinstance(values, dict) else ():
            known = cls.model_fields
            raise Refused(
                what=f"{key!r} is not a setting of {cls.kind}",
                remedy=did_you_mean_word(key, known) or f"one of {', '.join(known)}",
                code="unknown-key",
            )
        return values


class AzureInput(Entry):
    """Data or a model that Azure mounts or copies: a value of `launcher.inputs`."""

    kind: ClassVar = "an input"

    type: Literal[
        "uri_folder", "uri_file", "mltable", "custom_model", "mlflow_model", "triton_model"
    ] = "uri_folder"
    """What it is, in Azure's words: a folder, a file, a table or a model."""

    # https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2#modes
    mode: Literal["ro_mount", "download", "direct", "eval_mount", "eval_download"] = "ro_mount"
    """How the job gets it: mounted, downloaded before it starts, or as its address (direct)."""

    path: str = ""
    """Where it is: azureml://datastores/D/paths/P, azureml:DATA:1 or https://..."""

    @field_validator("mode")
    @classmethod
    def _of_its_type(cls, mode: str, info: ValidationInfo) -> str:
        if mode.startswith("eval_") and info.data.get("type", "mltable") != "mltable":
            raise Refused(
                what=f"{mode} is only for type=mltable",
                remedy="write ro_mount or download",
                code="unsupported",
            )
        return mode

    @field_validator("path")
    @classmethod
    def _remote(cls, path: str) -> str:
        if not path:
            raise Refused(
                what="missing",
                remedy="write azureml://datastores/NAME/paths/FOLDER",
                code="missing-key",
            )
        if "'" in path:
            raise Refused(
                what="has a ', which would end a quotation in the job's command",
                remedy="write %27",
                code="wrong-kind",
            )
        if not REMOTE.match(path):
            remedy = "upload it, and write azureml://datastores/NAME/paths/FOLDER, azureml:DATA:1 "
            raise Refused(
                what=f"{path} is not an address that Azure can read",
                remedy=f"{remedy}or https://...",
                code="wrong-kind",
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
    """As what Azure registers it, if it has a name."""

    folder: Annotated[str, RUN_FOLDER] | None = None
    """The folder of the run that it is."""

    path: Annotated[str, OUTPUT_PATH] | None = None
    """Where it lies, if it is no folder of the run: azureml://datastores/D/paths/P."""

    mode: Literal["rw_mount", "upload"] = "rw_mount"
    """When it is written: during the job (rw_mount), or at its end."""

    name: Annotated[str, ASSET_NAME] | None = None
    """The name under which Azure registers it at the end; null: it is not registered."""

    version: Annotated[str, ASSET_NAME] | None = None
    """The version that is registered; null: Azure counts."""


class JobService(Entry):
    """Interactive access to a running job: a value of `launcher.services`."""

    kind: ClassVar = "a service"

    type: Literal["ssh", "tensor_board", "jupyter_lab", "vs_code"]
    """What runs beside the job."""

    nodes: Annotated[str, matching("all|[0-9]+", "all, or the number of a node")] | None = None
    """On which nodes it runs: all, or the number of one; null: on the first."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The port on which it listens; null: Azure's choice."""

    properties: dict[str, str] | None = None
    """More settings of Azure's, as texts."""

    ssh_public_keys: str | None = None
    """With type=ssh: the public keys that may sign in."""

    log_dir: str | None = None
    """With type=tensor_board: the folder of its event files."""


class SweepJob(Entry):
    """How Azure runs and sorts the trials of sweep=azureml."""

    kind: ClassVar = "sweep_job"

    max_concurrent: Positive = 4
    """How many trials run at once."""

    metric: str = "val/acc1"
    """The metric by which Azure's page sorts the trials."""

    goal: Literal["maximize", "minimize"] = "maximize"
    """Whether the largest or the smallest value of the metric is the best."""

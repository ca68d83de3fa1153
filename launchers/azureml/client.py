"""The way to a workspace: which one, as whom, and what went wrong in one sentence."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distdl.errors import Problem, UserError

# Per cloud: who signs in, the resource manager, Key Vault's domain, Azure ML's pages.
# https://learn.microsoft.com/azure/azure-government/compare-azure-government-global-azure
CLOUDS = {
    "AzureCloud": (
        "login.microsoftonline.com",
        "https://management.azure.com",
        "vault.azure.net",
        "https://ml.azure.com",
    ),
    "AzureUSGovernment": (
        "login.microsoftonline.us",
        "https://management.usgovcloudapi.net",
        "vault.usgovcloudapi.net",
        "https://ml.azure.us",
    ),
    "AzureChinaCloud": (
        "login.chinacloudapi.cn",
        "https://management.chinacloudapi.cn",
        "vault.azure.cn",
        "https://studio.ml.azure.cn",
    ),
}
# What names a workspace: a variable, and a key of config.json, which Azure's portal offers.
NAMED_BY = {
    "subscription": ("AZURE_SUBSCRIPTION_ID", "subscription_id"),
    "resource_group": ("AZURE_RESOURCE_GROUP", "resource_group"),
    "workspace": ("AZUREML_WORKSPACE_NAME", "workspace_name"),
}
OLD_NAME = "AZURE_WORKSPACE_NAME"  # of the workspace's variable
# Of names that become part of an address: what Azure allows in any of them, and no way out.
PART = r"(?!\.+(?:/|$))[A-Za-z0-9_.()-]+"
HANDLE = re.compile(
    rf"azureml://subscriptions/({PART})/resourceGroups/({PART})/workspaces/({PART})"
    rf"/jobs/({PART})(?:/members/({PART}))?"
)


@dataclass(frozen=True)
class Workspace:
    """Where a workspace is. Its name, the resource group's and the subscription's id.

    Raises:
        UserError: One of them cannot be part of an address.
    """

    subscription: str
    resource_group: str
    name: str

    def __post_init__(self) -> None:
        given = (self.subscription, self.resource_group, self.name)
        problems = [
            Problem(
                f"launcher.{key}", f"{value!r} is no name in Azure", "letters, digits, _ . ( ) -"
            )
            for key, value in zip(NAMED_BY, given, strict=True)
            if not re.fullmatch(PART, value)
        ]
        if problems:
            raise UserError(*problems)

    @classmethod
    def find(
        cls, subscription: str | None, resource_group: str | None, workspace: str | None
    ) -> Workspace:
        """The workspace as set; what is None comes from the environment, else from config.json.

        Raises:
            UserError: Nothing says which one.
        """
        file, given = config_file(), (subscription, resource_group, workspace)
        here = from_environment()
        found = {
            key: value or here.get(key) or file.get(name)
            for (key, (_, name)), value in zip(NAMED_BY.items(), given, strict=True)
        }
        problems = [
            Problem(
                f"launcher.{key}",
                "nothing says it, and the job cannot be sent (dry_run=true shows it)",
                f"write launcher.{key}=..., export {NAMED_BY[key][0]}=..., or put the "
                "workspace's config.json here (Azure's portal offers it for download)",
            )
            for key, value in found.items()
            if not value
        ]
        if problems:
            raise UserError(*problems)
        return cls(*map(str, found.values()))

    @property
    def arm_id(self) -> str:
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"
        )

    def handle(self, job: str, member: str | None = None) -> str:
        """Names a job to a later shell."""
        place = f"subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
        text = f"azureml://{place}/workspaces/{self.name}/jobs/{job}"
        return f"{text}/members/{member}" if member else text


def from_environment() -> dict[str, str]:
    """What variables say of a workspace: `subscription`, `resource_group`, `workspace`."""
    found = {key: os.environ.get(name) for key, (name, _) in NAMED_BY.items()}
    found["workspace"] = found["workspace"] or os.environ.get(OLD_NAME)
    return {key: value for key, value in found.items() if value}


def parse(handle: str) -> tuple[Workspace, str, str | None]:
    """Workspace, job and the sweep's member of a handle.

    Raises:
        UserError: It is none of ours.
    """
    found = HANDLE.fullmatch(handle)
    if found is None:
        remedy = "azureml://subscriptions/.../resourceGroups/.../workspaces/.../jobs/NAME"
        raise UserError(Problem(handle, "is no handle of a job on Azure ML", remedy))
    subscription, group, name, job, member = found.groups()
    return Workspace(subscription, group, name), job, member


def config_file() -> dict[str, str]:
    """The nearest config.json here or above, as the SDK looks for it; empty without one."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        for path in (folder / "config.json", folder / ".azureml" / "config.json"):
            try:
                found = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(found, dict) and "workspace_name" in found:
                return found
    return {}


class Connection:
    """A workspace, as somebody. Nothing is sent or imported before it is used.

    Args:
        workspace: Which one.
        cloud: Its cloud; None for the SDK's own choice, which follows ARM_CLOUD_METADATA_URL.
    """

    def __init__(self, workspace: Workspace, cloud: str | None) -> None:
        self.workspace = workspace
        self.cloud = cloud

    @functools.cached_property
    def credential(self) -> Any:
        """Whoever is signed in: variables, managed identity, `az login`, in that order."""
        with told():
            from azure.identity import DefaultAzureCredential

        if self.cloud in CLOUDS:
            return DefaultAzureCredential(authority=CLOUDS[str(self.cloud)][0])
        return DefaultAzureCredential()

    @functools.cached_property
    def client(self) -> Any:
        """The SDK's MLClient."""
        with told():
            import logging

            from azure.ai.ml import MLClient

            # Its warnings are about itself ("this class is experimental").
            for name in ("azure", "azure.ai.ml"):
                logging.getLogger(name).setLevel(logging.ERROR)
            options = {"cloud": self.cloud} if self.cloud else {}
            return MLClient(
                self.credential,
                self.workspace.subscription,
                self.workspace.resource_group,
                self.workspace.name,
                enable_telemetry=False,
                show_progress=sys.stderr.isatty(),
                **options,
            )

    @property
    def scope(self) -> str:
        """What tokens for Azure ML's own services are asked for."""
        elsewhere = urlsplit(os.environ.get("ARM_CLOUD_METADATA_URL", ""))
        if self.cloud in CLOUDS:
            manager = CLOUDS[str(self.cloud)][1]
        elif elsewhere.netloc:
            manager = f"{elsewhere.scheme}://{elsewhere.netloc}"
        else:
            manager = CLOUDS["AzureCloud"][1]
        return f"{manager}/.default"

    def page(self, job: str) -> str:
        """The job in Azure ML's studio."""
        site = CLOUDS.get(self.cloud or "AzureCloud", CLOUDS["AzureCloud"])[3]
        place = f"/subscriptions/{self.workspace.subscription}"
        place += f"/resourcegroups/{self.workspace.resource_group}/workspaces/{self.workspace.name}"
        return f"{site}/runs/{job}?wsid={place}"

    def look(self) -> None:
        """Asks for the workspace, and for nothing else.

        Raises:
            UserError: There is none of this name, or nobody here may see it.
        """
        with told():
            self.client.workspaces.get(self.workspace.name)

    def vault(self, key_vault: str | None) -> str:
        """The https address of a Key Vault; None means the workspace's own."""
        if key_vault and key_vault.startswith("https://"):
            return key_vault.rstrip("/")
        with told():
            own = key_vault or self.client.workspaces.get(self.workspace.name).key_vault
        domain = CLOUDS.get(self.cloud or "AzureCloud", CLOUDS["AzureCloud"])[2]
        return f"https://{str(own).rpartition('/')[2]}.{domain}"


@contextmanager
def quiet() -> Iterator[None]:
    """The SDK prints progress to stderr, and colour codes even where there is no terminal."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def told(where: str = "launcher") -> Iterator[None]:
    """What Azure's packages raise, as something a person can act on.

    Raises:
        UserError: In place of theirs.
    """
    try:
        from azure.core import exceptions as core
    except ImportError:
        raise no_extra() from None
    try:
        yield
    except ImportError as error:
        raise no_extra(error) from error
    except core.ClientAuthenticationError as error:
        remedy = (
            "az login, or export AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or run "
            "where a managed identity is"
        )
        what = f"Azure knows nobody here who may do this: {brief(error)}"
        raise UserError(Problem(where, what, remedy)) from error
    except core.HttpResponseError as error:
        what = f"Azure refuses ({error.status_code}): {brief(error)}"
        raise UserError(Problem(where, what)) from error
    except core.AzureError as error:
        raise UserError(Problem(where, f"Azure is out of reach: {brief(error)}")) from error
    except Exception as error:
        # The SDK's own exceptions have no common base outside it, and importing it takes seconds.
        if type(error).__module__.startswith(("azure.", "marshmallow")):
            raise UserError(Problem(where, f"Azure's SDK refuses: {brief(error)}")) from error
        raise


def no_extra(error: ImportError | None = None) -> UserError:
    what = "Azure's packages are not installed"
    if error is not None and error.name:
        what += f" ({error.name})"
    return UserError(Problem("launcher", what, "pip install 'distdl[azure]'"))


def brief(error: BaseException) -> str:
    """The first lines of what may be pages, without what repeats."""
    from distdl.redact import redact

    text = re.sub(r"\x1b\[\d*m", "", str(error))  # the SDK colours its messages
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return redact(" ".join(dict.fromkeys(lines[:4])))[:600]

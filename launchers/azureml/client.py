"""The connection to a workspace: names, credential, and Azure's errors as UserErrors."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from distdl.util.errors import NoRight, NotSignedIn, Problem, UserError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core import PipelineClient
    from azure.core.credentials import TokenCredential
    from azure.core.rest import HttpRequest, HttpResponse


class Cloud(NamedTuple):
    """Host names of one of Azure's clouds."""

    login: str  # the authority for signing in
    manager: str  # the resource manager
    vaults: str  # Key Vault's domain
    studio: str  # Azure ML's pages


# https://learn.microsoft.com/azure/azure-government/compare-azure-government-global-azure
HOSTS = {
    "AzureCloud": "login.microsoftonline.com management.azure.com vault.azure.net ml.azure.com",
    "AzureUSGovernment": "login.microsoftonline.us management.usgovcloudapi.net "
    "vault.usgovcloudapi.net ml.azure.us",
    "AzureChinaCloud": "login.chinacloudapi.cn management.chinacloudapi.cn vault.azure.cn "
    "studio.ml.azure.cn",
}
CLOUDS = {name: Cloud(*hosts.split()) for name, hosts in HOSTS.items()}
# Part of a workspace's name -> its environment variable, and its key in Azure's config.json.
NAMED_BY = {
    "subscription": ("AZURE_SUBSCRIPTION_ID", "subscription_id"),
    "resource_group": ("AZURE_RESOURCE_GROUP", "resource_group"),
    "workspace": ("AZUREML_WORKSPACE_NAME", "workspace_name"),
}
# The SDKs would wait 300 s for a connection and 300 s for an answer, up to four times each.
PATIENCE: dict[str, Any] = {
    "connection_timeout": 5,
    "read_timeout": 20,
    "retry_connect": 1,
    "retry_read": 1,
}
OLD_NAME = "AZURE_WORKSPACE_NAME"  # the old name of the variable for the workspace
# A name that becomes part of an address: all characters of Azure's names, but no `..`.
PART = r"(?!\.+(?:/|$))[A-Za-z0-9_.()-]+"
HANDLE = re.compile(
    rf"azureml://subscriptions/({PART})/resourceGroups/({PART})/workspaces/({PART})"
    rf"/jobs/({PART})(?:/members/({PART}))?"
)


@dataclass(frozen=True)
class Workspace:
    """A workspace, identified by its names in Azure, which must fit into an address."""

    subscription: str  # its id
    resource_group: str
    name: str

    def __post_init__(self) -> None:
        problems = [
            Problem(
                f"launcher.{key}",
                what=f"{name!r} is not an Azure name",
                remedy="letters, digits, _.()-",
                code="wrong-kind",
            )
            for key, name in zip(NAMED_BY, astuple(self), strict=True)
            if not re.fullmatch(PART, name)
        ]
        if problems:
            raise UserError(*problems)

    @classmethod
    def find(
        cls, subscription: str | None, resource_group: str | None, workspace: str | None
    ) -> Workspace:
        """The workspace. Names that are None are read from the environment, else config.json."""
        exported = from_environment()
        file = config_file()
        names = []
        problems = []
        settings = zip(NAMED_BY.items(), (subscription, resource_group, workspace), strict=True)
        for (key, (variable, file_key)), name in settings:
            names.append(name or exported.get(key) or file.get(file_key))
            if not names[-1]:
                problems.append(
                    Problem(
                        f"launcher.{key}",
                        what="missing: without it a job can be shown (dry_run=true) but not sent",
                        remedy=(
                            f"write launcher.{key}=..., export {variable}=..., "
                            "or put the workspace's "
                            "config.json from Azure's portal into this folder"
                        ),
                        code="missing-key",
                    )
                )
        if problems:
            raise UserError(*problems)
        return cls(*map(str, names))

    @property
    def group(self) -> str:
        return f"subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"

    @property
    def arm_id(self) -> str:
        return f"/{self.group}/providers/Microsoft.MachineLearningServices/workspaces/{self.name}"

    def handle(self, job: str, member: str | None = None) -> str:
        """The handle by which a later shell finds a job."""
        text = f"azureml://{self.group}/workspaces/{self.name}/jobs/{job}"
        return f"{text}/members/{member}" if member else text


def from_environment() -> dict[str, str]:
    """A workspace's names from environment variables, by the keys of NAMED_BY."""
    names = {key: os.environ.get(variable) for key, (variable, _) in NAMED_BY.items()}
    names["workspace"] = names["workspace"] or os.environ.get(OLD_NAME)
    return {key: name for key, name in names.items() if name}


def config_file() -> dict[str, str]:
    """The nearest config.json in this folder or above it, like the SDK; empty if there is none."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        for path in (folder / "config.json", folder / ".azureml" / "config.json"):
            with suppress(OSError, ValueError):
                content = json.loads(path.read_text())
                if isinstance(content, dict) and "workspace_name" in content:
                    return content
    return {}


def parse(handle: str) -> tuple[Workspace, str, str | None]:
    """Splits a handle into workspace, job and sweep member."""
    if (match := HANDLE.fullmatch(handle)) is None:
        raise UserError.at(
            handle,
            what="is not a handle of a job on Azure ML",
            remedy="azureml://subscriptions/.../resourceGroups/.../workspaces/.../jobs/NAME",
            code="wrong-kind",
        )
    subscription, group, name, job, member = match.groups()
    return Workspace(subscription, group, name), job, member


class Connection:
    """Access to a workspace as the signed-in user. Nothing is imported or sent before it is used.
    If `cloud` is None, the SDK chooses the cloud, by ARM_CLOUD_METADATA_URL."""

    def __init__(self, workspace: Workspace, cloud: str | None) -> None:
        self.workspace = workspace
        self.cloud = cloud
        self._hosts = CLOUDS.get(str(cloud), CLOUDS["AzureCloud"])

    @functools.cached_property
    def credential(self) -> TokenCredential:
        return sign_in(self.cloud)

    @functools.cached_property
    def client(self) -> MLClient:
        with azure_errors():
            from azure.ai.ml import MLClient

            logging.getLogger("azure.ai.ml").setLevel(logging.ERROR)
            options: dict[str, Any] = {"cloud": self.cloud} if self.cloud else {}
            options |= {"enable_telemetry": False, "show_progress": sys.stderr.isatty(), **PATIENCE}
            return MLClient(self.credential, *astuple(self.workspace), **options)

    @property
    def scope(self) -> str:
        """The scope of tokens for Azure ML's own services."""
        metadata = urlsplit(os.environ.get("ARM_CLOUD_METADATA_URL", ""))
        if metadata.netloc and self.cloud not in CLOUDS:
            return f"{metadata.scheme}://{metadata.netloc}/.default"
        return f"https://{self._hosts.manager}/.default"

    def page(self, job: str) -> str:
        group = self.workspace.group.replace("/resourceGroups/", "/resourcegroups/")
        return f"https://{self._hosts.studio}/runs/{job}?wsid=/{group}/workspaces/{self.workspace.name}"

    def check_access(self) -> None:
        """Checks that the workspace exists and that the signed-in user may see it."""
        with azure_errors():
            self.client.workspaces.get(self.workspace.name)

    def vault(self, key_vault: str | None) -> str:
        """The https address of a Key Vault; None selects the workspace's own."""
        if key_vault and key_vault.startswith("https://"):
            return key_vault.rstrip("/")
        with azure_errors():
            name = key_vault or self.client.workspaces.get(self.workspace.name).key_vault
        return f"https://{str(name).rpartition('/')[2]}.{self._hosts.vaults}"


def sign_in(cloud: str | None = None) -> TokenCredential:
    """A credential from variables, a managed identity or `az login`, in this order."""
    with azure_errors():
        from azure.identity import DefaultAzureCredential
    # It warns about each unavailable method; the final error lists them once.
    logging.getLogger("azure").setLevel(logging.ERROR)
    options: dict[str, Any] = {"authority": CLOUDS[cloud].login} if cloud in CLOUDS else {}
    return DefaultAzureCredential(**options, **PATIENCE)


def rest_client(
    credential: TokenCredential | None = None, scope: str = "", base_url: str = ""
) -> PipelineClient[HttpRequest, HttpResponse]:
    """An azure.core.PipelineClient that retries after temporary errors. Its requests have the
    credential's token for `scope`, or no token without a credential."""
    from azure.core import PipelineClient
    from azure.core.pipeline import policies

    chain: list[Any] = [
        policies.RequestIdPolicy(),  # pollers need it
        policies.UserAgentPolicy("distdl"),
        policies.RetryPolicy(**PATIENCE),
    ]
    if credential is not None:
        chain.append(policies.BearerTokenCredentialPolicy(credential, scope))
    return PipelineClient(base_url, policies=chain, **PATIENCE)


REFUSALS: dict[int | None, type[UserError]] = {401: NotSignedIn, 403: NoRight}


@contextmanager
def quiet() -> Iterator[None]:
    """Silences stderr if it is not a terminal, where the SDK would print progress and colours."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        yield


@contextmanager
def azure_errors(path: str = "launcher", remedies: Mapping[str, str] = {}) -> Iterator[None]:
    """Turns the exceptions of Azure's packages into UserErrors with the exception as the cause.

    Args:
        path: The path of the Problem.
        remedies: Azure's error code -> what to do about it.
    """
    try:
        from azure.core import exceptions as core

        yield
    except ImportError as error:
        raise UserError.at(
            "launcher",
            what=f"Azure's packages are not installed ({error.name})",
            remedy="pip install 'distdl[azure]'",
            code="not-installed",
        ) from error
    except core.ClientAuthenticationError as error:
        raise NotSignedIn.at(
            path,
            what=f"Azure cannot sign you in: {brief(error.message)}",
            remedy=(
                "az login, or export AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, "
                "or run this on a machine with a managed identity"
            ),
        ) from error
    except core.HttpResponseError as error:
        what = f"Azure refuses ({error.status_code}): {brief(error.message)}"
        kind = REFUSALS.get(error.status_code, UserError)
        remedy = remedies.get(code_of(error), "")
        raise kind.at(path, what, remedy, code="platform-refuses") from error
    except core.AzureError as error:
        raise UserError.at(
            path, what=f"Azure does not answer: {brief(error)}", code="unreachable"
        ) from error
    # The SDK's own exceptions have no common base class, and importing them takes seconds.
    except Exception as error:
        if type(error).__module__.startswith(("azure.", "marshmallow")):
            raise UserError.at(
                path, what=f"Azure's SDK refuses: {brief(error)}", code="platform-refuses"
            ) from error
        raise


def code_of(error: BaseException | None) -> str:
    """Azure's error code, such as AuthorizationFailed; empty if there is none."""
    return str(getattr(getattr(error, "error", None), "code", None) or "")


def brief(error: object) -> str:
    """The first lines of an error message, without repetitions and secrets."""
    from distdl.util.redact import redact

    text = re.sub(r"\x1b\[\d*m", "", str(error))  # the SDK colours its messages
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return redact(" ".join(dict.fromkeys(lines[:4])))[:600]

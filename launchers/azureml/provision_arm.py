"""As much of Azure's resource API as provisioning needs: look, make, change. It cannot delete."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from distdl.errors import Problem, UserError

# What Azure says -> what to do about it.
REMEDIES = {
    "AuthorizationFailed": "the role Owner on the resource group is enough (or Contributor, and "
    "User Access Administrator for role assignments)",
    "MissingSubscriptionRegistration": "az provider register --namespace NAME, once",
    "StorageAccountAlreadyTaken": "choose another name: storage.data=NAME, storage.results=NAME",
    "VaultAlreadyExists": "a deleted vault keeps its name for a while: key_vault=NAME",
    "ClusterCoreQuotaReached": "ask for quota: az ml quota, or choose another compute.vm_size",
    "SubscriptionNotFound": "az account list; subscription=ID",
    "InvalidAuthenticationTokenTenant": "az login --tenant TENANT",
}
# Seconds between two looks at something that Azure is making.
POLLING_INTERVAL = 5


class ArmError(Exception):
    """Azure refused, after it was asked to make or change something."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}" if code else message)

    @property
    def remedy(self) -> str:
        return REMEDIES.get(self.code, "")


class Arm:
    """A client.

    Args:
        endpoint: https address of Azure's resource manager.
        credential: What azure-identity calls a TokenCredential; None: whoever is logged in here
            (environment, managed identity, `az login`).

    Raises:
        UserError: azure-identity is not installed.
    """

    def __init__(self, endpoint: str, credential: Any = None) -> None:
        try:
            from azure.core.pipeline.policies import (
                BearerTokenCredentialPolicy,
                RequestIdPolicy,
                RetryPolicy,
                UserAgentPolicy,
            )
            from azure.identity import DefaultAzureCredential
            from azure.mgmt.core import ARMPipelineClient
        except ModuleNotFoundError as error:
            what = f"the package of {error.name} is not installed"
            raise UserError(Problem("", what, "pip install 'distdl[azure]'")) from error
        # It warns about every credential that is not there; the error says it once.
        logging.getLogger("azure.identity").setLevel(logging.ERROR)
        endpoint = endpoint.rstrip("/")
        token = BearerTokenCredentialPolicy(
            credential or DefaultAzureCredential(), f"{endpoint}/.default"
        )
        policies = [
            RequestIdPolicy(),  # the poller asks for it
            UserAgentPolicy("distdl"),
            RetryPolicy(retry_total=4),
            token,
        ]
        self._client: Any = ARMPipelineClient(base_url=endpoint, policies=policies)

    def get(self, path: str, api: str) -> dict[str, Any] | None:
        """What Azure knows of a resource, None where there is none.

        Raises:
            UserError: Nobody is logged in, or may not look.
        """
        response = self._send("GET", path, api)
        if response.status_code == 404:
            return None
        if response.status_code >= 400:
            error = refused(response)
            raise UserError(Problem(path, str(error), error.remedy))
        return dict(response.json())

    def list(self, path: str, api: str) -> Iterator[dict[str, Any]]:
        """Every item of a list, over all its pages."""
        page = self.get(path, api) or {}
        while True:
            yield from page.get("value", [])
            if not page.get("nextLink"):
                return
            page = dict(self._send("GET", page["nextLink"], None).json())

    def send(self, method: str, path: str, api: str, body: dict[str, Any]) -> dict[str, Any]:
        """Makes or changes a resource, and waits until Azure has done so.

        Args:
            method: PUT or PATCH.

        Returns:
            The resource as it is then.

        Raises:
            ArmError: Azure refused, or failed.
        """
        from azure.core.exceptions import AzureError, HttpResponseError
        from azure.core.polling import LROPoller
        from azure.mgmt.core.polling.arm_polling import ARMPolling

        assert method in ("PUT", "PATCH")
        try:
            first = self._send(method, path, api, body, pipeline=True)
            if first.http_response.status_code >= 400:
                raise refused(first.http_response)
            poller: Any = LROPoller(
                self._client, first, lambda answer: answer, ARMPolling(timeout=POLLING_INTERVAL)
            )
            poller.wait()
            poller.result()
        except HttpResponseError as error:
            code = str(getattr(error.error, "code", "") or "")
            raise ArmError(code, str(error.message)) from error
        except AzureError as error:
            raise ArmError("", str(error)) from error
        return self.get(path, api) or {}

    def _send(
        self, method: str, path: str, api: str | None, body: Any = None, pipeline: bool = False
    ) -> Any:
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.core.rest import HttpRequest

        query = {"api-version": api} if api else None
        request = HttpRequest(method, self._client.format_url(path), params=query, json=body)
        try:
            return self._client.send_request(request, _return_pipeline_response=pipeline)
        except ClientAuthenticationError as error:
            first = str(error.message).strip().splitlines()[0]
            what = f"nobody is logged in to Azure here ({first})"
            raise UserError(Problem("", what, "az login")) from error
        except AzureError as error:
            if method != "GET":
                raise
            what = f"Azure does not answer: {error}"
            raise UserError(Problem(str(request.url), what)) from error


def refused(response: Any) -> ArmError:
    """The error of an answer, which every service words in its own way."""
    try:
        error = response.json().get("error") or response.json()
        return ArmError(str(error.get("code", "")), str(error.get("message", "")))
    except (ValueError, AttributeError):
        return ArmError(str(response.status_code), str(response.reason))

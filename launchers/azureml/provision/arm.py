"""The part of Azure's resource API that provisioning needs: read, create and change, not delete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distdl.launchers.azureml.client import azure_errors, rest_client, sign_in

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.core.pipeline import PipelineResponse
    from azure.core.rest import HttpRequest, HttpResponse

# Azure's error code -> what to do about it.
REMEDIES = {
    "AuthorizationFailed": "you need the role Owner on the resource group, or Contributor and User "
    "Access Administrator (for role assignments)",
    "MissingSubscriptionRegistration": "run once: az provider register --namespace NAME",
    "StorageAccountAlreadyTaken": "choose another name: storage.data=NAME, storage.results=NAME",
    "VaultAlreadyExists": "a deleted vault keeps its name for a while: key_vault=NAME",
    "ClusterCoreQuotaReached": "request quota (az ml quota), or choose another compute.vm_size",
    "SubscriptionNotFound": "az account list; subscription=ID",
    "InvalidAuthenticationTokenTenant": "az login --tenant TENANT",
}
POLLING_INTERVAL = 5  # seconds between two polls of a running operation


class Arm:
    """A client of Azure's resource manager at an https address, with a TokenCredential of
    azure-identity (None: the signed-in user's).

    Raises:
        UserError: Azure's packages are not installed. In the methods: Azure rejects the request or
            does not answer.
    """

    def __init__(self, endpoint: str, credential: TokenCredential | None = None) -> None:
        scope = f"{endpoint.rstrip('/')}/.default"
        self._client = rest_client(credential or sign_in(), scope, endpoint)

    def get(self, path: str, api: str) -> dict[str, Any] | None:
        """A resource; None if it does not exist."""
        with azure_errors(path, REMEDIES):
            response = self._send("GET", path, api).http_response
            if response.status_code == 404:
                return None
            response.raise_for_status()
            return dict(response.json())

    def list(self, path: str, api: str) -> Iterator[dict[str, Any]]:
        """Every item of a list, from all its pages."""
        while path:
            page = self.get(path, api) or {}
            yield from page.get("value", [])
            path = page.get("nextLink", "")
            api = ""  # the link contains it

    def send(self, method: str, path: str, api: str, body: dict[str, Any]) -> dict[str, Any]:
        """Creates (PUT) or changes (PUT, PATCH) a resource, waits for Azure to finish, and returns
        the resource as Azure then describes it."""
        with azure_errors(path, REMEDIES):
            from azure.core.polling import LROPoller
            from azure.mgmt.core.polling.arm_polling import ARMPolling

            first = self._send(method, path, api, body)
            first.http_response.raise_for_status()
            polling: Any = ARMPolling(timeout=POLLING_INTERVAL)
            LROPoller(self._client, first, lambda answer: answer, polling).result()
        return self.get(path, api) or {}

    def _send(
        self, method: str, path: str, api: str, body: Mapping[str, Any] | None = None
    ) -> PipelineResponse[HttpRequest, HttpResponse]:
        from azure.core.rest import HttpRequest

        query = {"api-version": api} if api else None
        request = HttpRequest(method, self._client.format_url(path), params=query, json=body)
        # The option decides what comes back, which its type does not say.
        answer: Any = self._client.send_request(request, _return_pipeline_response=True)
        return answer

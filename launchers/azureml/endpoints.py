"""`distdl deploy azureml`: a model on a managed online endpoint, or on a batch endpoint.

The documents are those of `az ml online-deployment create --file`. The SDK checks them, uploads
model and code, registers the environment, and waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.launchers.azureml import cost, prices, vm_sizes
from distdl.launchers.azureml.client import azure_errors
from distdl.launchers.azureml.launcher import AzureMLLauncher
from distdl.launchers.azureml.submit import as_file
from distdl.launchers.deploying import Platform
from distdl.util.errors import UserError

# The packages of `distdl serve`, which Azure's servers do not use, and pin to other versions.
UNUSED = re.compile(r"(fastapi|uvicorn|pydantic)\b")
IMAGE = "mcr.microsoft.com/azureml/openmpi5.0-ubuntu24.04"


class OnlineEndpoint(Platform[AzureMLLauncher]):
    """A managed online endpoint in the workspace that the launcher's settings name."""

    kind, script, auth_mode = "online", "score.py", "key"
    packages = ["azureml-inference-server-http==1.5.1"]
    default_type = "Standard_DS3_v2"
    errors = staticmethod(azure_errors)

    def operations(self, what: str) -> Any:
        """The SDK's operations on `endpoints` or `deployments` of this kind."""
        return getattr(self.launcher.connection().client, f"{self.kind}_{what}")

    def documents(self, name: str, folder: Path) -> dict[str, dict[str, Any]]:
        lines = (folder / "requirements.txt").read_text().splitlines()
        root = folder.resolve()
        pip = [line for line in lines if not UNUSED.match(line)] + self.packages
        conda = {"channels": ["conda-forge"], "dependencies": ["python=3.11", "pip", {"pip": pip}]}
        deployment = {
            "name": name,
            "endpoint_name": self.options.name,
            "model": {"path": str(root), "type": "custom_model"},
            "environment": {"image": self.options.image or IMAGE, "conda_file": conda},
            "code_configuration": {"code": str(root / "azureml"), "scoring_script": self.script},
            **self.size(),
        }
        endpoint = {"name": self.options.name, "auth_mode": self.auth_mode}
        documents = {"endpoint": endpoint, "deployment": deployment}
        self.load(documents)
        return documents

    def load(self, documents: dict[str, dict[str, Any]]) -> list[Any]:
        """The SDK's objects."""
        from azure.ai import ml

        return [getattr(ml, f"load_{self.kind}_{k}")(as_file(d)) for k, d in documents.items()]

    def size(self) -> dict[str, Any]:
        """The keys of a deployment that only this kind of endpoint has."""
        kind = self.options.instance_type
        if not vm_sizes.NAME.fullmatch(kind):
            raise UserError.at(
                "--instance-type",
                what=f"{kind} is not a VM size",
                remedy=self.default_type,
                code="wrong-kind",
            )
        return {"instance_type": kind, "instance_count": self.options.instances}

    def price(self) -> str:
        found = vm_sizes.find(self.options.instance_type)
        count = self.options.instances
        size = prices.current(found) if found else None
        if size is None or size.price_per_hour is None:
            return f"not known to distdl: {cost.PRICES}"
        about = f"{count} x {size.name}; list price, {size.priced}"
        return f"{cost.money(count * size.price_per_hour)} ({about}), twice with the one before"

    def deployments(self) -> dict[str, bool]:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            endpoint = self.operations("endpoints").get(self.options.name)
        except ResourceNotFoundError:
            return {}
        listed = self.operations("deployments").list(self.options.name)
        ready = [each.name for each in listed if each.provisioning_state == "Succeeded"]
        return {name: self.answers(endpoint, name) for name in ready}

    def answers(self, endpoint: Any, name: str) -> bool:
        return bool(endpoint.traffic.get(name))

    def create(self, name: str, folder: Path) -> None:
        endpoint, deployment = self.load(self.documents(name, folder))
        if not self.deployments():
            self.operations("endpoints").begin_create_or_update(endpoint).result()
        self.operations("deployments").begin_create_or_update(deployment).result()

    def ask(self, name: str, request: Path) -> str:
        invoke = self.operations("endpoints").invoke
        return str(invoke(self.options.name, request_file=request, deployment_name=name))

    def move(self, name: str) -> None:
        endpoint = self.operations("endpoints").get(self.options.name)
        self.direct(endpoint, name)
        self.operations("endpoints").begin_create_or_update(endpoint).result()

    def direct(self, endpoint: Any, name: str) -> None:
        endpoint.traffic = {name: 100}

    def remove(self, name: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        with suppress(ResourceNotFoundError):
            self.operations("deployments").begin_delete(name, self.options.name).result()

    def delete(self, names: Iterable[str]) -> None:
        self.operations("endpoints").begin_delete(self.options.name).result()


class BatchEndpoint(OnlineEndpoint):
    """A batch endpoint: images in, JSON lines out, as a job on a cluster. It is not tested by a
    request, which would be a job of minutes."""

    kind, script, auth_mode = "batch", "batch_score.py", "aad_token"
    # Azure's examples also list azureml-dataset-runtime, which has no wheels for Python 3.11.
    packages = ["azureml-core", "pandas"]

    def size(self) -> dict[str, Any]:
        if not self.launcher.compute:
            raise UserError.at(
                "launcher.compute",
                what="missing",
                remedy="launcher.compute=NAME, the cluster that jobs run on",
                code="missing-key",
            )
        resources = {"instance_count": self.options.instances}
        output = {"output_action": "append_row", "output_file_name": "predictions.jsonl"}
        return {"compute": f"azureml:{self.launcher.compute}", "resources": resources, **output}

    def price(self) -> str:
        return f"nothing while no job runs, then that of {self.launcher.compute}'s nodes"

    def answers(self, endpoint: Any, name: str) -> bool:
        return bool(getattr(endpoint.defaults, "deployment_name", None) == name)

    def direct(self, endpoint: Any, name: str) -> None:
        endpoint.defaults = {"deployment_name": name}


KINDS = (OnlineEndpoint, BatchEndpoint)

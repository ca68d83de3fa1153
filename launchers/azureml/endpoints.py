"""`distdl deploy azureml`: a model on a managed online endpoint, or on a batch endpoint.

The documents are those that `az ml online-deployment create --file` and the like accept; the SDK
gets the same text that a dry run prints.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from distdl.launchers.azureml import cost, vm_sizes
from distdl.launchers.azureml.client import Connection, Workspace, azure_errors, code_of, quiet
from distdl.launchers.azureml.request import to_yaml
from distdl.launchers.azureml.settings import VmSizeName
from distdl.launchers.azureml.submit import as_file, ensure_environment
from distdl.launchers.common import Positive, digest
from distdl.launchers.deploying import TAG, DeploySettings, Endpoint, Example, ExportedModel, report
from distdl.util.errors import Problem, UserError

# The packages of `distdl serve`, which Azure's servers do not use, and pin to other versions.
UNUSED = re.compile(r"(fastapi|uvicorn|pydantic)\b")
LOG_LINES = 30


class AzureDeploySettings(DeploySettings):
    instance_type: VmSizeName = "Standard_DS3_v2"
    image: str = "mcr.microsoft.com/azureml/openmpi5.0-ubuntu24.04"
    mini_batch: Positive = 64


class OnlineEndpoint(Endpoint):
    """A managed online endpoint in the workspace that the launcher's settings name."""

    settings_type = AzureDeploySettings
    kind, script, auth_mode = "online", "score.py", "key"
    needs: tuple[str, ...] = ("azureml-inference-server-http==1.5.1",)

    def misfits(self) -> Iterator[Problem]:
        size = vm_sizes.find(self.settings.instance_type)
        if size is not None and size.retired:
            what = f"Azure retired {size.name} on {size.retired}"
            yield Problem("deploy.instance_type", what, "docs/azure_vm_sizes.md lists others")

    @functools.cached_property
    def connection(self) -> Connection:
        s = self.launcher
        names = s.subscription, s.resource_group, s.workspace
        return Connection(Workspace.find(*names), s.cloud)

    @property
    def endpoints(self) -> Any:
        return getattr(self.connection.client, f"{self.kind}_endpoints")

    @property
    def deployments(self) -> Any:
        return getattr(self.connection.client, f"{self.kind}_deployments")

    def documents(self, model: ExportedModel) -> dict[str, dict[str, Any]]:
        """What must exist, in this order."""
        name, image, tags = self.settings.name, self.settings.image, {TAG: model.version}
        lines = (model.folder / "requirements.txt").read_text().splitlines()
        packages = [line for line in lines if line and not UNUSED.match(line)]
        python = ["python=3.11", "pip", {"pip": [*packages, *self.needs]}]
        conda = {"channels": ["conda-forge"], "dependencies": python}
        version = digest(json.dumps([image, conda]), 12)
        environment = {"name": f"distdl-{self.kind}-scoring", "version": version}
        folder = {"path": str(model.folder.resolve()), "type": "custom_model"}
        deployment = {
            "endpoint_name": name,
            "model": f"azureml:{name}:{model.version}",
            "environment": f"azureml:{environment['name']}:{version}",
            "code_configuration": {"code": ".", "scoring_script": self.script},
            "tags": tags,
            **self.size(),
        }
        return {
            "environment": {**environment, "image": image, "conda_file": conda},
            "model": {"name": name, "version": model.version, **folder, "tags": tags},
            "endpoint": {"name": name, "auth_mode": self.auth_mode, "tags": {TAG: "yes"}},
            "deployment": {"name": f"model-{digest(json.dumps(deployment), 12)}", **deployment},
        }

    def size(self) -> dict[str, Any]:
        """The keys of a deployment that only this kind of endpoint has."""
        kind, count = self.settings.instance_type, self.settings.instances
        return {"type": "managed", "instance_type": kind, "instance_count": count}

    def load(self, kind: str, document: dict[str, Any]) -> Any:
        """The SDK's object of a document, which the SDK checks."""
        from azure.ai import ml

        prefix = f"{self.kind}_" if kind in ("endpoint", "deployment") else ""
        return getattr(ml, f"load_{prefix}{kind}")(as_file(document))

    def price(self) -> str:
        size, count = vm_sizes.find(self.settings.instance_type), self.settings.instances
        if size is None or size.price_per_hour is None:
            return f"not known to distdl: {cost.PRICES}"
        about = f"list price, East US, of {size.price_date or 'an unknown date'}: indicative"
        price = f"{cost.money(count * size.price_per_hour)} ({count} x {size.name}; {about})"
        return f"{price}, and the same for the model before while it stays (deploy.keep=1)"

    def render(self, model: ExportedModel) -> str:
        documents = self.documents(model)
        with azure_errors("deploy"):
            for kind, document in documents.items():
                self.load(kind, document)
        parts = [f"# The {kind}.\n{to_yaml(node)}" for kind, node in documents.items()]
        last = f"# Its code is {self.script} of the model folder.\n{model.uploads}"
        return "---\n".join(
            [*parts, f"{last}# price per hour: {self.price()}\n# Azure was not asked."]
        )

    def name_of(self, model: ExportedModel) -> str:
        return str(self.documents(model)["deployment"]["name"])

    def get(self) -> Any:
        """The endpoint, None if there is none; refuses one that distdl did not create."""
        with azure_errors("deploy.name"):
            from azure.core.exceptions import ResourceNotFoundError

            try:
                endpoint = self.endpoints.get(self.settings.name)
            except ResourceNotFoundError:
                return None
        if TAG not in (endpoint.tags or {}):
            what = f"{self.settings.name} is an endpoint that distdl did not create"
            raise UserError.at("deploy.name", what, "choose another name")
        return endpoint

    def weights(self) -> dict[str, float]:
        if (endpoint := self.get()) is None:
            return {}
        with azure_errors("deploy.name"):
            listed = [d for d in self.deployments.list(self.settings.name) if TAG in (d.tags or {})]
        shares = {each.name: self.share(endpoint, each.name) for each in listed}
        ready = {each.name for each in listed if each.provisioning_state == "Succeeded"}
        return {name: share for name, share in shares.items() if share or name in ready}

    def share(self, endpoint: Any, deployment: str) -> float:
        return float(endpoint.traffic.get(deployment, 0))

    def create(self, name: str, model: ExportedModel) -> None:
        documents = self.documents(model)
        self.ensure_model(documents["model"])
        ensure_environment(self.connection, documents["environment"])
        if self.get() is None:
            endpoint = self.load("endpoint", documents["endpoint"])
            finish(self.endpoints.begin_create_or_update, endpoint)
        report(f"creating the deployment {name}, which takes some minutes")
        deployment = self.load("deployment", documents["deployment"])
        with tempfile.TemporaryDirectory() as code:
            shutil.copy(model.folder / self.script, code)
            deployment.code_configuration.code = code
            finish(self.deployments.begin_create_or_update, deployment)

    def ensure_model(self, wanted: dict[str, Any]) -> None:
        """Uploads and registers the model, unless this version exists already."""
        with azure_errors("deploy"):
            from azure.core.exceptions import ResourceNotFoundError

            models = self.connection.client.models
            try:
                models.get(wanted["name"], wanted["version"])
            except ResourceNotFoundError:
                report(f"uploading {wanted['path']}")
                with quiet():
                    models.create_or_update(self.load("model", wanted))

    def ask(self, name: str, example: Example) -> str:
        with azure_errors("the test request"), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "request.json"
            path.write_text(example.body)
            invoke = functools.partial(self.endpoints.invoke, self.settings.name)
            return str(invoke(request_file=path, deployment_name=name))

    def move(self, name: str) -> None:
        endpoint = self.get()
        endpoint.traffic = {name: 100}
        finish(self.endpoints.begin_create_or_update, endpoint)

    def log(self, name: str) -> str:
        with azure_errors("deploy"):
            return str(self.deployments.get_logs(name, self.settings.name, LOG_LINES))

    def remove(self, name: str) -> None:
        try:
            finish(self.deployments.begin_delete, name, self.settings.name)
        except UserError as error:
            if code_of(error.__cause__) != "ResourceNotFound":
                raise

    def usage(self) -> str:
        keys = f"az ml online-endpoint get-credentials --name {self.settings.name}"
        return f"POST {self.get().scoring_uri}, with a key: {keys}"

    def delete(self) -> None:
        if self.get() is None:
            raise UserError.at("deploy.name", f"there is no endpoint {self.settings.name}")
        finish(self.endpoints.begin_delete, self.settings.name)
        print(f"{self.settings.name} was deleted; its models stay registered in the workspace")


class BatchEndpoint(OnlineEndpoint):
    """A batch endpoint: images in, a CSV out, as a job on a cluster. It is not tested by a request,
    which would be a job of minutes."""

    kind, script, auth_mode, tested = "batch", "batch_score.py", "aad_token", False
    # Azure's examples also list azureml-dataset-runtime, which has no wheels for Python 3.11.
    needs = ("azureml-core", "pandas")

    def misfits(self) -> Iterator[Problem]:
        if not self.launcher.compute:
            what = "missing: a batch endpoint's jobs run on a cluster"
            yield Problem("launcher.compute", what, "launcher.compute=NAME")

    def size(self) -> dict[str, Any]:
        count, rows = {"instance_count": self.settings.instances}, self.settings.mini_batch
        parts = {"compute": f"azureml:{self.launcher.compute}", "resources": count}
        return {**parts, "mini_batch_size": rows, "output_action": "append_row"}

    def price(self) -> str:
        return f"nothing while no job runs, then that of {self.launcher.compute}'s nodes"

    def share(self, endpoint: Any, deployment: str) -> float:
        return float(getattr(endpoint.defaults, "deployment_name", None) == deployment)

    def move(self, name: str) -> None:
        endpoint = self.get()
        endpoint.defaults = {"deployment_name": name}
        finish(self.endpoints.begin_create_or_update, endpoint)

    def usage(self) -> str:
        return f"az ml batch-endpoint invoke --name {self.settings.name} --input FOLDER"

    def log(self, name: str) -> str:
        return "Azure ML Studio shows why, under Endpoints"


def finish(begin: Callable[..., Any], *arguments: Any) -> None:
    """Waits for one of the SDK's long operations, whose dots go to stderr."""
    with azure_errors("deploy"), redirect_stdout(sys.stderr):
        begin(*arguments).result()

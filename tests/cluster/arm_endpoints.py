"""The stand-in of `arm.py` with endpoints: resources can be listed and deleted, and there is a
scoring address behind which the uploaded model answers."""

from __future__ import annotations

import base64
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distdl.serving.scorer import Scorer
from tests.cluster.arm import WORKSPACE, Azure
from tests.cluster.azurite import CONTAINER
from tests.cluster.https import Answer, error

KEY = "key-of-the-endpoint"


class AzureEndpoints(Azure):
    """Its deployments answer by the model and the classes that were uploaded."""

    # "upload": no models are taken; "creation": deployments do not start; "answers": are wrong
    broken: str = ""

    def answer(self, method: str, path: str, body: Any, header: Any, query: str) -> None:
        short = self.short(path)
        if path.startswith("/score/"):
            self.score(path.removeprefix("/score/"), body, header)
        if header.get("Authorization") and short.count("/") > 1:
            self.endpoint(method, short, body)
        super().answer(method, path, body, header, query)

    def endpoint(self, method: str, short: str, body: Any) -> None:
        if method == "GET" and short.endswith("/deployments"):
            inside = [
                r for key, r in self.resources.items() if key.startswith(f"{WORKSPACE}{short}/")
            ]
            raise Answer(200, {"value": inside})
        if short.endswith("/listKeys"):
            raise Answer(200, {"primaryKey": KEY, "secondaryKey": KEY})
        if method == "DELETE":
            key = f"{WORKSPACE}{short}"
            if key not in self.resources:
                raise error(404, "ResourceNotFound", short)
            for name in [k for k in self.resources if k == key or k.startswith(f"{key}/")]:
                del self.resources[name]
            raise Answer(200)
        if method == "PUT" and re.fullmatch(r"/onlineEndpoints/[^/]+", short):
            body["properties"]["scoringUri"] = f"{self.url}/score/{short.rpartition('/')[2]}"
        if method == "PUT" and short.startswith("/models/"):
            if self.broken == "upload":
                raise error(403, "AuthorizationFailed", "no right to write models")
            body["properties"]["flavors"] = {}
        if method == "PUT" and short.startswith("/onlineEndpoints/") and "/deployments/" in short:
            body["properties"].setdefault("scaleSettings", {"scaleType": "Default"})
        if method == "PUT" and "/deployments/" in short and self.broken == "creation":
            self.resources[f"{WORKSPACE}{short}"] = {**body, "name": short.rpartition("/")[2]}
            raise error(400, "UserScriptException", "the container has crashed")

    def score(self, name: str, body: Any, header: Any) -> None:
        if header.get("Authorization") != f"Bearer {KEY}":
            raise error(401, "Unauthorized", "the key is wrong")
        endpoint = f"{WORKSPACE}/onlineEndpoints/{name}"
        shares = self.resources[endpoint]["properties"]["traffic"]
        chosen = header.get("azureml-model-deployment") or max(shares, key=shares.get)
        deployment = self.resources[f"{endpoint}/deployments/{chosen}"]["properties"]
        model = self.resources[self.full(deployment["model"])]["properties"]["modelUri"]
        with tempfile.TemporaryDirectory() as folder:
            self.azurite.download(place_of(model), Path(folder))
            scorer = Scorer(next(Path(folder).rglob("model.json")).parent)
        images = [base64.b64decode(each) for each in body["images"]]
        answers = scorer.score(images, body["top_k"])
        if self.broken == "answers":
            answers = [{**each, "probability": each["probability"] - 0.01} for each in answers]
        raise Answer(200, {"predictions": answers})

    def full(self, name: str) -> str:
        """The id of a resource as it is stored."""
        return WORKSPACE + self.short(name)

    def stored(self, kind: str) -> dict[str, dict[str, Any]]:
        """Name -> body of the resources of a kind: onlineEndpoints, deployments, models, ..."""
        found = {key.split("/")[-1]: r for key, r in self.resources.items() if f"/{kind}/" in key}
        return {name: body for name, body in found.items() if body["id"].split("/")[-2] == kind}

    def traffic(self, name: str) -> dict[str, int]:
        endpoint = self.resources[f"{WORKSPACE}/onlineEndpoints/{name}"]
        return {k: v for k, v in endpoint["properties"]["traffic"].items() if v}


def place_of(uri: str) -> str:
    """Container and path of an address of a blob or of a datastore."""
    if "/paths/" in uri:
        return f"{CONTAINER}/{uri.partition('/paths/')[2]}"
    return urlsplit(uri).path

"""The API server through the official client, and readable messages for its errors."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distdl.util.errors import Forgotten, NoRight, NotSignedIn, Problem, UserError
from distdl.util.tail import plain

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

INSTALL = "pip install 'distdl[kubernetes]'"
CHECK = "kubectl config get-contexts; launcher.context=NAME, or KUBECONFIG=FILE"
# Seconds for a connection and for an answer: the client has no limits of its own.
TIMEOUT = (5, 20)
TRAINER = ("trainer.kubeflow.org", "v1alpha1", "trainjobs")
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"


@dataclass
class Cluster:
    """One cluster by a context of the kubeconfig; without a name the current one, or in a pod the
    pod's own. It connects at its first use."""

    context: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def connection(self) -> tuple[ApiClient, str, str]:
        """The client, the context's name (in a pod: `in-cluster`) and its namespace.

        Raises:
            UserError: The client is not installed, or there is no such context.
        """
        with api_errors():
            from kubernetes import client, config

            settings = client.Configuration()
            settings.retries = 1
            try:
                # The client reads $KUBECONFIG only when it is imported.
                file = os.environ.get("KUBECONFIG") or "~/.kube/config"
                contexts, current = config.list_kube_config_contexts(file)
                chosen = self.context or current["name"]
                by_name = {each["name"]: each for each in contexts}
                if chosen not in by_name:
                    raise UserError.at(
                        "launcher.context",
                        what=f"the kubeconfig has no context {plain(chosen)!r}",
                        remedy=CHECK,
                        code="not-found",
                    )
                config.load_kube_config(file, chosen, client_configuration=settings)
                namespace = str(by_name[chosen]["context"].get("namespace") or "default")
            except config.ConfigException as error:
                if self.context is not None or IN_CLUSTER not in os.environ:
                    raise UserError.at(
                        "launcher.context",
                        what=f"no kubeconfig: {first_line(error)}",
                        remedy=CHECK,
                        code="unreadable",
                    ) from None
                config.load_incluster_config(client_configuration=settings)
                chosen = "in-cluster"
                namespace = own_namespace()
            return client.ApiClient(settings), chosen, namespace

    @property
    def api(self) -> ApiClient:
        with self._lock:
            return self.connection[0]

    @property
    def name(self) -> str:
        return self.connection[1]

    @property
    def namespace(self) -> str:
        """That of the context."""
        return self.connection[2]

    @property
    def server(self) -> str:
        """Its address, without what may be a password."""
        parts = urlsplit(str(self.api.configuration.host))
        return f"{parts.scheme}://{parts.hostname}:{parts.port or 443}"

    def read(self, path: str, **query: str) -> dict[str, Any]:
        """GET of a path below the API server's address, as the server writes it: the client's own
        classes know only the fields of their version."""
        answer: dict[str, Any] = json.loads(self.send("GET", path, query=query))
        return answer

    def create(self, path: str, body: Mapping[str, Any], dry_run: bool = False) -> dict[str, Any]:
        query = {"dryRun": "All"} if dry_run else {}
        # A field that the server does not know is an error, and not left out in silence.
        query["fieldValidation"] = "Strict"
        answer: dict[str, Any] = json.loads(self.send("POST", path, body, query))
        return answer

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merges fields into an object (RFC 7396); None removes one."""
        kind = "application/merge-patch+json"
        answer: dict[str, Any] = json.loads(self.send("PATCH", path, body, kind=kind))
        return answer

    def delete(self, path: str) -> None:
        """Deletes an object, and in the background what it owns. One that is gone is no error."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        with suppress(Forgotten):
            self.send("DELETE", path, options)

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> bytes:
        """A request with the client's own authentication and TLS; the answer's bytes.

        Raises:
            UserError: The server does not answer, or refuses.
        """
        with api_errors(path):
            response = self._call(method, path, body, query, kind, timeout=TIMEOUT)
            return bytes(response.data)

    def stream(self, path: str, follow: bool, **query: str) -> Iterator[bytes]:
        """The bytes of an answer as they come; with `follow`, for as long as the server sends any,
        also after a long silence."""
        more = {**query, "follow": "true"} if follow else query
        timeout = (TIMEOUT[0], None if follow else TIMEOUT[1])
        with api_errors(path):
            response = self._call("GET", path, None, more, "", timeout=timeout)
            yield from response.response.stream(1 << 14)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        kind: str,
        timeout: tuple[float, float | None],
    ) -> Any:  # noqa: ANN401 - urllib3's answer inside the client's own class
        api = self.api
        headers = {"Accept": "application/json, */*", **({"Content-Type": kind} if body else {})}
        request = api.param_serialize(
            method=method,
            resource_path=path,
            query_params=[*(query or {}).items()],
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        response = api.call_api(*request, _request_timeout=timeout)
        if path.endswith("/log") and response.status == 200:
            return response
        data = response.read()
        if response.status >= 400:
            from kubernetes.client import ApiException

            raise ApiException(status=response.status, reason=response.reason, body=text_of(data))
        return response


def text_of(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def own_namespace() -> str:
    """The namespace of the pod that runs this."""
    from pathlib import Path

    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return file.read_text(encoding="utf-8").strip() if file.exists() else "default"


def described(context: str | None, namespace: str | None) -> str:
    """The context, as far as it is known without a network, for a dry run."""
    name = f"{context or 'the current one of the kubeconfig'}"
    return f"{name}, namespace {namespace or 'of the context'}"


def first_line(error: object) -> str:
    return plain(str(error)).partition("\n")[0]


@contextmanager
def api_errors(path: str = "") -> Iterator[None]:
    """Turns the client's errors into UserErrors, since the user can fix them."""
    try:
        import kubernetes  # noqa: F401
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise UserError.at(
            "launcher",
            what="the package kubernetes is not installed",
            remedy=INSTALL,
            code="not-installed",
        ) from None
    try:
        yield
    except ApiException as error:
        raise refusal(error.status or 0, error.body, path, str(error.reason or "")) from None
    except HTTPError as error:
        raise UserError.at(
            "launcher.context",
            what=f"the API server does not answer: {first_line(getattr(error, 'reason', error))}",
            remedy="kubectl cluster-info; a VPN?",
            code="unreachable",
        ) from None


def refusal(status: int, body: object, path: str, reason: str) -> UserError:
    """An answer of the server, as an error that says what to do."""
    said = message_of(body) or reason
    if status == 401:
        return NotSignedIn(
            Problem(
                "launcher.context",
                what=f"the API server does not know you (401 {said})",
                remedy="sign in again: kubectl auth whoami",
            )
        )
    if status == 403 and "exceeded quota" in said:
        return UserError.at(
            "launcher.namespace",
            what=f"the quota is used up: {said}",
            remedy="kubectl describe quota; ask for less, or wait until something else has ended",
            code="not-enough",
        )
    if status == 403 and "violates PodSecurity" in said:
        return UserError.at(
            "launcher.pod_security",
            what=said,
            remedy="launcher.pod_security as the namespace allows it",
            code="platform-refuses",
        )
    if status == 403 and (
        ("namespace" in said and "not found" in said) or "being terminated" in said
    ):
        return UserError.at(
            "launcher.namespace", what=said, remedy="kubectl get namespaces", code="not-found"
        )
    if status == 403:
        return NoRight(
            Problem(
                "launcher.namespace",
                what=f"you have no right to: {said}",
                remedy="docs/launchers/kubernetes.md has the role that you need",
            )
        )
    if status == 404 and said.startswith("namespaces "):
        return UserError.at(
            "launcher.namespace", what=said, remedy="kubectl get namespaces", code="not-found"
        )
    # Of a kind that it does not have the server says so in plain text.
    if status == 404 and "/trainjobs" in path and not said.startswith("trainjobs"):
        return UserError.at(
            "launcher.kind",
            what="the cluster has no TrainJob (Kubeflow Trainer 2.2 or later)",
            remedy="launcher.kind=job, or install it",
            code="not-installed",
        )
    if status == 404:
        return Forgotten(Problem("launcher", what=said or f"{path} is not there"))
    code = "exists-already" if status == 409 else "platform-refuses"
    return UserError.at("launcher", what=f"the API server refuses it ({status}): {said}", code=code)


def message_of(body: object) -> str:
    """The message of a Status object, on one line; the text itself if it is none."""
    text = text_of(body) if isinstance(body, bytes) else str(body or "")
    try:
        answer = json.loads(text)
        said = answer.get("message") if isinstance(answer, dict) else ""
    except ValueError:
        said = text[:300]
    return " ".join(plain(said or "").split())

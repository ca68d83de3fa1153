"""Whether the user's credentials may go to an address.

The clients of MLflow, W&B, Comet, ClearML and Azure Blob send the credentials of the environment,
or of a file in the home folder, to whatever address they are given. An address that only a file of
somebody else names (a run's folder, `--config-dir`) must not get them. It gets them if the user's
own words name it (`distdl.config.own_words`), or a variable of the environment, `credentials.to` in
trust.yaml, or an option of the command. Where there is nothing to send, any address is used.
"""

from __future__ import annotations

import netrc
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distdl.config import trust
from distdl.config.own_words import OwnWords, Speaker
from distdl.config.recipe import values_at
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact

KEY = "credentials.to"  # in trust.yaml
_PORTS = {"http": 80, "https": 443}
_AZURE = (
    r"[a-z0-9-]+(\.z\d+)?\.(blob|dfs)\."
    r"(core\.(windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)|storage\.azure\.net)"
)


@dataclass(frozen=True)
class Client:
    """What sends credentials.

    Args:
        addresses: The variables with which the user's environment names the server.
        variables: Those that hold a credential, or choose a way to sign in.
        files: In the home folder, with a credential for any server.
    """

    addresses: Sequence[str]
    variables: Sequence[str]
    files: Sequence[str] = ()

    def sends(self, uri: str) -> str:
        """What the client would send to this address; "" if there is nothing."""
        names = [name for name in self.variables if os.environ.get(name)]
        names += [f"~/{name}" for name in self.files if (Path.home() / name).is_file()]
        signs_in = ("azureml", "abfs", "https") if self is BLOB else ("azureml", "abfs")
        scheme = urlsplit(uri).scheme
        if scheme.startswith(signs_in) and find_spec("azure"):
            names.append("your sign-in to Azure")
        if scheme in _PORTS and _has_default_netrc():
            names.append("the default of ~/.netrc")
        return ", ".join(names)


MLFLOW = Client(
    ("MLFLOW_TRACKING_URI",),
    (
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_AWS_SIGV4",
        "MLFLOW_TRACKING_AUTH",
        "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    ),
    (".mlflow/credentials",),
)
BLOB = Client((), ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"))
# By the class of a tracker.
TRACKERS = {
    "MLflowLogger": MLFLOW,
    "MLFlowLogger": MLFLOW,
    "WandbLogger": Client(("WANDB_BASE_URL",), ("WANDB_API_KEY",)),
    "CometLogger": Client(("COMET_URL_OVERRIDE",), ("COMET_API_KEY",), (".comet.config",)),
    "ClearMLLogger": Client(
        ("CLEARML_API_HOST",),
        ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
        ("clearml.conf",),
    ),
}


def refuse(config: DictConfig, words: OwnWords) -> list[Problem]:
    """The problems of a config's addresses that only a foreign file names, and that would get
    credentials."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    problems = []
    for path, written, client in _addresses(plain):
        uri = written
        if "${" in written:
            try:
                uri = str(OmegaConf.select(config, path))
            except OmegaConfBaseException:
                continue  # validation reports it
        if "://" not in uri or _is_own(uri, client) or not (sent := client.sends(uri)):
            continue
        if client is BLOB and not _takes_credentials(uri):
            continue
        if words.speaker(path, written) is Speaker.ELSEWHERE:
            typed = shlex.quote(f"{path}={redact(uri)}")
            problems.append(
                Problem(
                    path,
                    what=_what(uri, sent),
                    remedy=(
                        f"if you trust it: {typed}, or allow it in {trust.file()}: {_allowed(uri)}"
                    ),
                    code="unsupported",
                )
            )
    return problems


def names(key: str, override: str) -> bool:
    """Whether an override of the command line names a server that may get credentials."""
    return key.startswith("tracking.") and "://" in override


def confirm(file: str, uri: str, typed: str, confirmed: str | None) -> None:
    """Refuses the address of an MLflow server that a run's folder names, unless the user names it
    too, or nothing would be sent to it.

    Args:
        file: That names it.
        typed: What the user types before an address to confirm it in this command.
        confirmed: The address that the user has confirmed.

    Raises:
        UserError: with what to type.
    """
    if "://" not in uri or _is_own(uri, MLFLOW) or (confirmed and _same(uri, confirmed)):
        return
    if OwnWords().speaker("tracking.mlflow.tracking_uri", uri) is not Speaker.ELSEWHERE:
        return
    if sent := MLFLOW.sends(uri):
        address = shlex.quote(redact(uri))
        remedy = (
            f"if you trust it: {typed}{address}, or export MLFLOW_TRACKING_URI={address}, or in "
        )
        raise UserError.at(
            file,
            what=_what(uri, sent),
            remedy=f"{remedy}{trust.file()}: {_allowed(uri)}",
            code="unsupported",
        )


def _what(uri: str, sent: str) -> str:
    return f"{redact(uri)} would get {sent}, and only a file that may be somebody else's names it"


def _allowed(uri: str) -> str:
    parts = urlsplit(uri)
    return f"{KEY}: ['{parts.scheme}://{redact(parts.netloc.rpartition('@')[2])}']"


def _addresses(plain: dict[Any, Any]) -> Iterator[tuple[str, str, Client]]:
    """The texts of a config that may be an address to which credentials go: path, text, client."""
    trackers = plain.get("tracking")
    for key, node in trackers.items() if isinstance(trackers, dict) else ():
        name = str(node.get("_target_")).rpartition(".")[2] if isinstance(node, dict) else ""
        if name in TRACKERS:
            for path, text in _texts(node, f"tracking.{key}"):
                yield path, text, TRACKERS[name]
    for section in ("data", "task", "checkpoint"):
        for path, text in _texts(plain.get(section), section):
            yield path, text, BLOB


def _texts(node: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(value, f"{path}.{key}")
    elif isinstance(node, str) and ("://" in node or "${" in node):
        yield path, node


def _takes_credentials(uri: str) -> bool:
    """Whether a store at this address would get the user's own credentials, and is not Azure's: an
    address with a signature of its own gets that, and Azure itself shows a token to nobody."""
    parts = urlsplit(uri)
    host = (parts.hostname or "").lower()
    if parts.query or re.fullmatch(_AZURE, host):
        return False
    if parts.scheme in ("http", "https"):  # what `stores.address` takes for Blob
        return ".blob." in host or bool(re.fullmatch(r"localhost|[\d.]+", host))
    return parts.scheme in ("abfs", "abfss") and bool(parts.username)


def _is_own(uri: str, client: Client) -> bool:
    """Whether the user's environment or trust.yaml names the server; or it is none on a network,
    or one whose host the user's own settings hold (databricks://PROFILE, s3://BUCKET)."""
    if urlsplit(uri).scheme.startswith(("sqlite", "file", "databricks", "uc", "s3")):
        return True
    named = [os.environ.get(name, "") for name in client.addresses]
    named += [
        str(to) for each in trust.read() for given in values_at(each, KEY) for to in _list(given)
    ]
    return any(_same(uri, each) for each in named)


def _list(given: object) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _same(uri: str, other: str) -> bool:
    return uri == other or (_origin(uri) is not None and _origin(uri) == _origin(other))


def _origin(uri: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port. None for an address that two programs may read in two ways."""
    if re.search(r"[^\x21-\x7e]|\\", uri):
        return None
    with suppress(ValueError):
        parts = urlsplit(uri)
        host = (parts.hostname or "").lower()
        return (parts.scheme, host, parts.port or _PORTS.get(parts.scheme)) if host else None
    return None


def _has_default_netrc() -> bool:
    """Whether ~/.netrc has an entry for every host: `requests` sends it to any server."""
    with suppress(OSError, netrc.NetrcParseError):
        return "default" in netrc.netrc(os.environ.get("NETRC")).hosts
    return False

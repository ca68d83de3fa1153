"""The program that Azure ML starts for each rank. It sets variables, then becomes the worker.

    python -m distdl.launchers.azureml.entry BUNDLE STORE --attempt N
        --input imagenet=/mnt/... --output model=/mnt/...
        --secret HF_TOKEN=NAME_IN_KEY_VAULT [--identity user]

A job's definition has only the names of secrets. This program reads their values as the job's
identity, and only its own environment has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distdl.util.exit_codes import EXIT_REFUSED

if TYPE_CHECKING:
    from azure.core.credentials import AccessToken, TokenCredential


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Replaces the process with the worker, or exits with EXIT_REFUSED."""
    parser = argparse.ArgumentParser("python -m distdl.launchers.azureml.entry")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("store")
    parser.add_argument("--attempt", help="default: the number in the bundle's file `attempt`")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--output", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--secret", action="append", default=[], metavar="VARIABLE=SECRET")
    parser.add_argument("--identity", choices=("managed", "user"), default="managed")
    options = parser.parse_args(argv)
    code = Path("code").absolute()
    os.environ["PYTHONPATH"] = str(code)  # absolute, because processes may change their folder
    for name, _, path in (item.partition("=") for item in options.input):
        os.environ[f"DISTDL_INPUT_{name.upper()}"] = path
    for name, _, path in (item.partition("=") for item in options.output):
        os.environ[f"DISTDL_OUTPUT_{name.upper()}"] = path
    try:
        names = dict(item.split("=", 1) for item in options.secret)
        os.environ.update(secrets(names, options.identity))
    except Exception as error:  # of Azure's SDK, which may be missing
        reason = " ".join(str(error).split())[:500]
        vault = os.environ.get("DISTDL_KEY_VAULT")
        message = (
            f"distdl: the forwarded variables cannot be read from {vault}: {reason}\n"
            "    give the identity of the job (the cluster's managed identity, or you with "
            "launcher.identity=user) the role Key Vault Secrets User"
        )
        print(message, file=sys.stderr, flush=True)
        sys.exit(EXIT_REFUSED)
    if client := os.environ.get("DEFAULT_IDENTITY_CLIENT_ID"):
        os.environ.setdefault("AZURE_CLIENT_ID", client)  # by which azure-identity finds it
    if not (options.bundle / "code").exists():  # the members of a sweep share one copy
        with suppress(FileExistsError):  # another rank of this node was faster
            (options.bundle / "code").symlink_to(code)
    attempt = options.attempt or (options.bundle / "attempt").read_text().strip()
    worker = ["-m", "distdl.worker", str(options.bundle), options.store, "--attempt", attempt]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *worker])


def secrets(names: dict[str, str], identity: str) -> dict[str, str]:
    """Variable -> value, from the Key Vault that DISTDL_KEY_VAULT names."""
    if not names:
        return {}
    from azure.keyvault.secrets import SecretClient

    vault = SecretClient(
        os.environ["DISTDL_KEY_VAULT"],
        credential(identity),
        connection_timeout=10,  # seconds; by default 300 each
        read_timeout=30,
    )
    return {name: vault.get_secret(secret).value or "" for name, secret in names.items()}


def credential(identity: str) -> TokenCredential:
    """The credential of the user who submitted, or of the cluster's managed identity."""
    if identity == "user":
        return OnBehalfOf(os.environ["OBO_ENDPOINT"])
    from azure.identity import ManagedIdentityCredential

    # Azure ML names a user-assigned identity of the cluster in this variable.
    return ManagedIdentityCredential(client_id=os.environ.get("DEFAULT_IDENTITY_CLIENT_ID"))


class OnBehalfOf:
    """The user's tokens, from the endpoint of jobs with `identity: user`. It replaces
    `azure.ai.ml.identity.AzureMLOnBehalfOfCredential`, so that the image does not need the SDK."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def get_token(self, *scopes: str, **_: object) -> AccessToken:
        from azure.core.credentials import AccessToken

        query = urllib.parse.urlencode({"resource": scopes[0].removesuffix("/.default")})
        with urllib.request.urlopen(f"{self._endpoint}?{query}", timeout=60) as response:
            answer = json.load(response)
        expires = answer.get("expires_on") or time.time() + int(answer.get("expires_in", 3600))
        return AccessToken(answer["access_token"], int(expires))


if __name__ == "__main__":
    main()

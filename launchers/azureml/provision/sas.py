"""`python -m distdl provision azureml sas`: an expiring link to read and list one container.

It is for people and platforms without an identity in the workspace's directory. A key of the user
(a user delegation key) signs it, not an account key. So it is void when the user loses the rights.
learn.microsoft.com/rest/api/storageservices/create-user-delegation-sas
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from distdl.launchers.azureml.client import PATIENCE, azure_errors, sign_in
from distdl.launchers.common import matching
from distdl.util.errors import UserError
from distdl.util.typed import problems

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

HELP = """\
usage: python -m distdl provision azureml sas account=NAME container=NAME [days=1]

Prints the address of a container with a signature that only allows reading and listing, and expires
after `days` (at most 7). Keep the address secret until then.

account      the storage account
container    the container
days         1 to 7, default 1
endpoint     its address, default https://ACCOUNT.blob.core.windows.net
"""
NEEDED = "you need the role Storage Blob Data Reader on the account"


class SasSettings(BaseModel, extra="forbid", strict=True):
    """The keys of `HELP`."""

    account: str
    container: str
    days: Annotated[int, Field(ge=1, le=7)] = 1  # 7: Azure's limit for a user delegation key
    endpoint: Annotated[str, matching("https://.*", "an https address")] | None = None


def run(overrides: Mapping[str, Any], credential: TokenCredential | None = None) -> str:
    """The address; prints a description on stderr. `overrides` are keys of `HELP`;
    the address is signed with the credential (None: the signed-in user's).

    Raises:
        UserError: A setting is wrong, nobody is signed in, or Azure rejects the request.
    """
    try:
        settings = SasSettings(**overrides)
    except ValidationError as error:
        raise UserError(*problems(error, overrides, SasSettings.model_fields)) from error
    endpoint = settings.endpoint or f"https://{settings.account}.blob.core.windows.net"
    try:
        with azure_errors("account"):
            address, expiry = signed(settings, endpoint.rstrip("/"), credential or sign_in())
    except UserError as error:
        problem = error.problems[0]
        raise UserError(replace(problem, remedy=problem.remedy or NEEDED)) from error
    print(f"reads and lists {settings.container} until {expiry}:", file=sys.stderr)
    return address


def signed(settings: SasSettings, endpoint: str, credential: TokenCredential) -> tuple[str, str]:
    """The signed address, and the time when it expires."""
    from datetime import UTC, datetime, timedelta

    from azure.storage import blob

    now = datetime.now(UTC)
    # Clocks differ: a server whose clock is a second behind rejects a link that starts now.
    start = now - timedelta(minutes=5)
    expiry = now + timedelta(days=settings.days)
    client = blob.BlobServiceClient(endpoint, credential=credential, **PATIENCE)
    signature = blob.generate_container_sas(
        settings.account,
        settings.container,
        user_delegation_key=client.get_user_delegation_key(start, expiry),
        permission=blob.ContainerSasPermissions(read=True, list=True),
        start=start,
        expiry=expiry,
        protocol="https",
    )
    return f"{endpoint}/{settings.container}?{signature}", f"{expiry:%Y-%m-%d %H:%M} UTC"

"""`python -m distdl provision azureml sas`: a link to one container that reads, lists and expires.

For people and places that have no identity in the workspace's directory. It is signed with a key of
the user's own identity (a user delegation key): no account key is used, and it dies with the user's
rights. learn.microsoft.com/rest/api/storageservices/create-user-delegation-sas
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from distdl.errors import Problem, UserError

KEYS = ("account", "container", "days", "endpoint")
MOST_DAYS = 7  # Azure's limit for a user delegation key
HELP = """\
usage: python -m distdl provision azureml sas account=NAME container=NAME [days=1]

Prints the address of a container with a signature that can read and list, nothing else, and that
expires after `days` (at most 7). The address is a secret until then.

account      the storage account
container    the container
days         1 to 7, default 1
endpoint     its address, default https://ACCOUNT.blob.core.windows.net
"""


def run(overrides: Mapping[str, Any], credential: Any = None) -> int:
    """Prints the address on stdout, and what it is on stderr.

    Args:
        overrides: Keys of `HELP`.
        credential: Whose rights, None for whoever is logged in.

    Raises:
        UserError: A setting is wrong, nobody is logged in, or Azure refuses.
    """
    account, container, days, endpoint = _settings(overrides)
    try:
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.identity import DefaultAzureCredential
        from azure.storage.blob import (
            BlobServiceClient,
            ContainerSasPermissions,
            generate_container_sas,
        )
    except ModuleNotFoundError as error:
        what = f"the package of {error.name} is not installed"
        raise UserError(Problem("", what, "pip install 'distdl[azure]'")) from error
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)
    # Clocks differ: a link that begins now is refused by a server that is a second behind.
    start, expiry = now - timedelta(minutes=5), now + timedelta(days=days)
    client = BlobServiceClient(endpoint, credential=credential or DefaultAzureCredential())
    try:
        key = client.get_user_delegation_key(start, expiry)
    except ClientAuthenticationError as error:
        first = str(error.message).strip().splitlines()[0]
        remedy = "az login; it takes the role Storage Blob Data Reader on the account"
        raise UserError(Problem("", f"Azure does not know you: {first}", remedy)) from error
    except AzureError as error:
        what = f"Azure gives no key: {str(error).strip().splitlines()[0]}"
        remedy = "it takes the role Storage Blob Data Reader on the account"
        raise UserError(Problem("account", what, remedy)) from error
    signature = generate_container_sas(
        account,
        container,
        user_delegation_key=key,
        permission=ContainerSasPermissions(read=True, list=True),
        start=start,
        expiry=expiry,
        protocol="https",
    )
    print(f"reads and lists {container} until {expiry:%Y-%m-%d %H:%M} UTC:", file=sys.stderr)
    print(f"{endpoint.rstrip('/')}/{container}?{signature}")
    return 0


def _settings(overrides: Mapping[str, Any]) -> tuple[str, str, int, str]:
    from distdl.suggest import did_you_mean

    problems = [
        Problem(key, "no such key", did_you_mean(key, KEYS)) for key in overrides if key not in KEYS
    ]
    values = {"days": 1, **overrides}
    for key in ("account", "container"):
        if not isinstance(values.get(key), str):
            problems.append(Problem(key, "missing", f"write {key}=NAME"))
    days = values["days"]
    if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= MOST_DAYS:
        what = f"{days!r} is no number of days from 1 to {MOST_DAYS}"
        problems.append(Problem("days", what, f"write days={MOST_DAYS} at most"))
    endpoint = values.get("endpoint") or f"https://{values.get('account')}.blob.core.windows.net"
    if not str(endpoint).startswith("https://"):
        problems.append(Problem("endpoint", f"{endpoint} is no https address"))
    if problems:
        raise UserError(*problems)
    return str(values["account"]), str(values["container"]), days, str(endpoint)

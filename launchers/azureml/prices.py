"""Current prices of VM sizes: `python -m distdl provision azureml prices` reads and keeps them.

They come from Azure's public list, which wants no account: no credential is sent there. A dry run
works offline, and shows the kept prices with their date and region.
learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from distdl.launchers.azureml import vm_sizes
from distdl.launchers.azureml.client import Connection, Workspace, azure_errors, rest_client
from distdl.launchers.azureml.vm_sizes import VmSize
from distdl.launchers.common import matching
from distdl.util import table
from distdl.util.errors import UserError
from distdl.util.typed import problems

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

HELP = """\
usage: python -m distdl provision azureml prices [location=REGION]

Reads the current prices (USD per hour, Linux, pay as you go and spot) of the VM sizes that distdl
knows, and keeps them for the dry runs of launcher=azureml on this machine. No credential is sent.

location   such as westeurope; default: the workspace's, which is found as launcher=azureml finds it
server     default https://prices.azure.com
"""
SERVER = "https://prices.azure.com"
FILE = "azure_prices.json"
ANSWER_S = 10  # seconds for one answer
TOTAL_S = 60.0  # and for all
PAGES = 40  # of 100 prices
ABSENT = "no price is listed for: "


class PriceSettings(BaseModel, extra="forbid", strict=True):
    """The keys of `HELP`."""

    location: (
        Annotated[str, matching("[a-z0-9]{3,40}", "a region", "westeurope or the like")] | None
    ) = None
    server: Annotated[str, matching("https://.*", "an https address")] = SERVER


@dataclass(frozen=True)
class Prices:
    """Prices in USD per hour, by the name of a VM size: pay as you go, and spot."""

    location: str
    date: str  # YYYY-MM-DD, when they were read
    dedicated: Mapping[str, float]
    spot: Mapping[str, float]

    def of(self, size: VmSize) -> VmSize:
        """The size with these prices; unchanged if they do not have it."""
        if size.name not in self.dedicated:
            return size
        return replace(
            size,
            price_per_hour=self.dedicated[size.name],
            spot_price_per_hour=self.spot.get(size.name),
            price_date=self.date,
            price_location=self.location,
        )


def run(overrides: Mapping[str, Any], credential: TokenCredential | None = None) -> str:
    """Reads and keeps the prices, and returns them as a table. `overrides` are keys of
    `HELP`; the credential (None: the signed-in user's) is for the workspace alone.

    Raises:
        UserError: A setting is wrong, there is no region, or the list cannot be read.
    """
    try:
        settings = PriceSettings(**overrides)
    except ValidationError as error:
        raise UserError(*problems(error, overrides, PriceSettings.model_fields)) from error
    location = settings.location or workspace_location(credential)
    sizes = [size for size in vm_sizes.known() if not size.retired]
    prices = fetch(settings.server.rstrip("/"), location, sizes)
    write(prices)
    rows = []
    for size in sizes:
        found = (prices.dedicated.get(size.name), prices.spot.get(size.name))
        rows.append((size.name, *(f"{price:.2f}" if price else "?" for price in found)))
    print(
        f"USD per hour in {location}, {prices.date}; dry runs show them. {kept()}", file=sys.stderr
    )
    if missing := [size.name for size in sizes if size.name not in prices.dedicated]:
        print(f"{ABSENT}{', '.join(missing)}", file=sys.stderr)
    return table.text(("VM size", "dedicated", "spot"), rows, numbers=True).rstrip("\n")


def workspace_location(credential: TokenCredential | None = None) -> str:
    """The region of the workspace, as Azure says."""
    try:
        workspace = Workspace.find(None, None, None)
    except UserError as error:
        raise UserError.at(
            "location",
            what="missing, and no workspace is named that would have one",
            remedy="write location=westeurope",
            code="missing-key",
        ) from error
    connection = Connection(workspace, None)
    if credential is not None:
        connection.__dict__["credential"] = credential
    with azure_errors("location"):
        return str(connection.client.workspaces.get(workspace.name).location)


def fetch(server: str, location: str, sizes: Iterable[VmSize]) -> Prices:
    """The prices of sizes in a region, from the list at an https address."""
    names = {size.name.lower(): size.name for size in sizes}
    dedicated: dict[str, float] = {}
    spot: dict[str, float] = {}
    for item in items(server, location, names.values()):
        name = names.get(str(item.get("armSkuName")).lower())
        price: Any = item.get("retailPrice")
        if name is None or not is_price(price) or not is_by_the_hour(item):
            continue
        found = str(item.get("skuName"))
        if "Low Priority" not in found:  # which Azure lists still, and sells no more
            (spot if "Spot" in found else dedicated)[name] = float(price)
    if not dedicated:
        raise UserError.at(
            "location",
            what=f"{server} lists no price for a region {location}",
            remedy="az account list-locations --query [].name",
            code="wrong-choice",
        )
    return Prices(location, time.strftime("%Y-%m-%d", time.gmtime()), dedicated, spot)


def is_by_the_hour(item: Mapping[str, Any]) -> bool:
    wanted = {"currencyCode": "USD", "unitOfMeasure": "1 Hour", "type": "Consumption"}
    product = str(item.get("productName"))
    return wanted.items() <= item.items() and "Windows" not in product and "Cloud" not in product


def is_price(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def items(server: str, location: str, names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Every entry of the list, from all its pages. A page of another server is refused."""
    from azure.core.rest import HttpRequest

    skus = " or ".join(f"armSkuName eq '{name}'" for name in names)
    region = f"serviceName eq 'Virtual Machines' and armRegionName eq '{location}'"
    query = {"$filter": f"{region} and priceType eq 'Consumption' and ({skus})"}
    request = HttpRequest("GET", f"{server}/api/retail/prices", params=query)
    started = time.monotonic()
    client = rest_client()  # without a credential
    limits: dict[str, Any] = {
        "connection_timeout": ANSWER_S,
        "read_timeout": ANSWER_S,
        "retry_total": 1,
    }
    for _ in range(PAGES):
        with azure_errors("prices"):
            response = client.send_request(request, **limits)
            response.raise_for_status()
        try:
            page = response.json()
            found = page["Items"]
            after = page.get("NextPageLink")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError.at(
                "prices", what=f"{server} answers something else than prices", code="damaged-file"
            ) from None
        yield from (item for item in found if isinstance(item, dict))
        if not after:
            return
        if urlsplit(str(after))[:2] != urlsplit(server)[:2]:
            raise UserError.at(
                "prices", what=f"{server} sends us to another server, {after}", code="private"
            )
        if time.monotonic() - started > TOTAL_S:
            raise UserError.at(
                "prices", what=f"{server} takes longer than {TOTAL_S:.0f} s", code="unreachable"
            )
        request = HttpRequest("GET", str(after))
    raise UserError.at("prices", what=f"{server} lists more than {PAGES} pages", code="failed")


# ---- kept on this machine -----------------------------------------------------------------------


def kept() -> Path:
    """The file with the prices that were read last."""
    from distdl.util.cache_folder import default_root

    return default_root() / FILE


def current(size: VmSize) -> VmSize:
    """The size with the prices that were read last; unchanged if there are none."""
    found = read()
    return found.of(size) if found else size


def write(prices: Prices) -> None:
    from distdl.util.atomic_files import write_bytes

    kept().parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(vars(prices), indent=2)
    write_bytes(kept(), f"{text}\n".encode(), durable=False)


def read() -> Prices | None:
    """The prices that were read last; None if there are none, or if the file is damaged."""
    try:
        found = json.loads(kept().read_text(encoding="utf-8"))
        dedicated, spot = (
            {str(name): float(price) for name, price in found[key].items() if is_price(price)}
            for key in ("dedicated", "spot")
        )
        location, date = found["location"], found["date"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    plain = [re.fullmatch(r"[\w-]{1,40}", str(text), re.ASCII) for text in (location, date)]
    return Prices(location, date, dedicated, spot) if all(plain) else None

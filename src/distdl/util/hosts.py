"""Names of hosts, as users, ssh and ranks write them."""

from __future__ import annotations

import ipaddress
from contextlib import suppress


def short(host: str) -> str:
    """A host's name without its domain, as lists of hosts have it. An address stays whole."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return host.partition(".")[0]

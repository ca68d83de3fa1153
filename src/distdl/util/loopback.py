"""The address that only this machine can reach: 127.0.0.1, or ::1 where IPv4 is switched off."""

from __future__ import annotations

import errno
import socket

from distdl.util.errors import UserError

ADDRESSES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen() -> socket.socket:
    """A socket that listens at a free port of the loopback address.

    Raises:
        UserError: This machine has no such address.
    """
    for address, family in ADDRESSES.items():
        try:
            return socket.create_server((address, 0), family=family)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
    raise UserError.at(
        "",
        what=f"this machine has neither {' nor '.join(ADDRESSES)}, at which its processes meet",
        remedy="bring its loopback interface up: ip link set lo up",
        code="incomplete",
    )


def address() -> str:
    """The loopback address. Raises a UserError as `listen` does."""
    with listen() as probe:
        return str(probe.getsockname()[0])

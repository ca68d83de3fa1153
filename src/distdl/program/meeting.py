"""How the ranks of a program learn of each other before it starts: addresses, and the tracked run.

Rank 0 listens on the main port. Each rank tells it one value, and gets those of all ranks. Only
JSON of a limited size is read, from whoever names the job. No file system need be shared, and
nothing beyond Python is needed on a node.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO

from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.util.errors import NotRun

log = logging.getLogger(__name__)

PATIENCE_S = 900.0  # as long as torch's agent waits for the other nodes
TELL_S = 10.0  # between two lines about those who have not come
TICK_S = 0.2
HELLO_S = 5.0  # for a connection to say who it is
LONGEST = 1 << 20  # bytes of a message
ENDED = b"ended\n"


class NotMet(NotRun):
    """Some ranks did not come, could not be reached, or have no port to meet at."""


class Meeting:
    """What the ranks have told, by rank. Rank 0 may keep the connections, to say that it has
    ended (`end`); the others see it by `has_ended`."""

    def __init__(self, told: list[dict[str, Any]], kept: Mapping[int, socket.socket]) -> None:
        self.told = told
        self._kept = kept

    def end(self) -> None:
        """Says that rank 0's program has succeeded."""
        for each in self._kept.values():
            with suppress(OSError):
                each.sendall(ENDED)

    def has_ended(self) -> bool:
        """Whether rank 0 has said so. A connection that is lost says nothing."""
        for each in self._kept.values():
            with suppress(OSError):
                each.settimeout(0.0)
                return each.recv(len(ENDED), socket.MSG_PEEK) == ENDED
        return False

    def close(self) -> None:
        for each in self._kept.values():
            each.close()


def meet(
    place: Environment,
    told: Mapping[str, Any],
    job: str,
    stop: StopRequest,
    *,
    keep: bool = False,
    patience: float = PATIENCE_S,
) -> Meeting:
    """Exchanges a value with all ranks.

    Args:
        place: Of this rank.
        told: Its value.
        job: Names the job: whoever names another one is turned away.
        stop: Ends the wait.
        keep: Keep the connections.
        patience: Seconds to wait for the others.

    Raises:
        NotMet: Not all ranks came in time, rank 0 is not there any more, or the main port cannot
            be used.
        Stopped: The rank was asked to end.
    """
    if place.world_size == 1:
        return Meeting([dict(told)], {})
    deadline = time.monotonic() + patience
    if place.rank == 0:
        return _receive(place, told, job, stop, deadline, keep)
    return _visit(place, told, job, stop, deadline, keep)


def own_address(place: Environment) -> str:
    """The address of this host under which rank 0's host reaches it.

    Raises:
        NotMet: This host does not know the name of rank 0's.
    """
    if place.rank == 0:
        return place.main_address
    try:
        found = socket.getaddrinfo(place.main_address, place.main_port, type=socket.SOCK_DGRAM)
    except OSError as error:
        what = f"{socket.gethostname()} does not know {place.main_address}, the host of rank 0"
        raise NotMet(f"{what}: {error.strerror}") from None
    family, kind, *_, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


def reserve_port(place: Environment) -> socket.socket:
    """A socket that holds a free port of this host. Closed once all ranks have told theirs, so that
    no two of a host have the same."""
    family = socket.AF_INET6 if ":" in place.main_address else socket.AF_INET
    held = socket.socket(family)
    held.bind(("", 0))
    return held


def with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _receive(
    place: Environment,
    told: Mapping[str, Any],
    job: str,
    stop: StopRequest,
    deadline: float,
    keep: bool,
) -> Meeting:
    try:
        listener = _listen(place)
    except OSError as error:
        what = f"port {place.main_port} of {socket.gethostname()} cannot be used: {error.strerror}"
        raise NotMet(what) from None
    values: dict[int, Any] = {0: dict(told)}
    came: dict[int, socket.socket] = {}
    with ExitStack() as stack, listener:
        listener.settimeout(TICK_S)
        next_line = time.monotonic() + TELL_S
        while len(values) < place.world_size:
            stop.check()
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                stack.enter_context(connection)
                if hello := _hello(connection, job, place.world_size):
                    came[hello["rank"]] = connection
                    values[hello["rank"]] = hello["told"]
            now = time.monotonic()
            if now > min(next_line, deadline):
                missing = [rank for rank in range(place.world_size) if rank not in values]
                some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                where = with_port(place.main_address, place.main_port)
                what = (
                    f"{len(missing)} of {place.world_size} ranks have not come to {where}: {some}"
                )
                if now > deadline:
                    raise NotMet(what)
                log.warning("%s; waiting", what)
                next_line = now + 3 * TELL_S
        table = [values[rank] for rank in range(place.world_size)]
        answer = json.dumps(table).encode() + b"\n"
        for connection in came.values():
            connection.sendall(answer)
        if keep:
            stack.pop_all()
            return Meeting(table, came)
        # Each closes its end first, so that the port is free at once.
        for connection in came.values():
            with suppress(OSError):
                connection.settimeout(HELLO_S)
                connection.recv(1)
    return Meeting(table, {})


def _listen(place: Environment) -> socket.socket:
    """Listens for ranks of this host alone, or of any."""
    if place.local_world_size == place.world_size:
        family = socket.getaddrinfo(place.main_address, place.main_port)[0][0]
        address = (place.main_address, place.main_port)
        return socket.create_server(address, family=family, backlog=place.world_size)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(
        ("", place.main_port), family=family, backlog=place.world_size, dualstack_ipv6=both
    )


def _hello(connection: socket.socket, job: str, world_size: int) -> dict[str, Any] | None:
    """What a connection says of itself; None if it is no rank of this job."""
    connection.settimeout(HELLO_S)
    with suppress(OSError, ValueError), connection.makefile("rb") as file:
        hello = json.loads(_line(file))
        if isinstance(hello, dict) and hello.get("job") == job:
            rank, told = hello.get("rank"), hello.get("told")
            if type(rank) is int and 0 < rank < world_size and isinstance(told, dict):
                return {"rank": rank, "told": told}
    connection.close()
    return None


def _line(file: BinaryIO) -> bytes:
    line = file.readline(LONGEST)
    if not line.endswith(b"\n"):
        raise ValueError("no line")
    return line


def _visit(
    place: Environment,
    told: Mapping[str, Any],
    job: str,
    stop: StopRequest,
    deadline: float,
    keep: bool,
) -> Meeting:
    at = with_port(place.main_address, place.main_port)
    hello = json.dumps({"job": job, "rank": place.rank, "told": dict(told)}).encode() + b"\n"
    why = "no answer"
    while True:
        stop.check()
        with suppress(ValueError):  # an answer that is none: of another program on this port
            try:
                return _ask(place, hello, stop, keep)
            except OSError as error:
                why = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise NotMet(f"rank 0 at {at} cannot be reached: {why}")
        time.sleep(TICK_S)


def _ask(place: Environment, hello: bytes, stop: StopRequest, keep: bool) -> Meeting:
    address = (place.main_address, place.main_port)
    connection = socket.create_connection(address, timeout=HELLO_S)
    with ExitStack() as stack:
        stack.enter_context(connection)
        connection.sendall(hello)
        connection.settimeout(TICK_S)
        answer = b""
        while not answer.endswith(b"\n"):
            stop.check()
            with suppress(TimeoutError):
                part = connection.recv(1 << 16)
                if not part or len(answer) > 64 * LONGEST:
                    raise ConnectionError("connection closed by peer")
                answer += part
        table = json.loads(answer)
        if not isinstance(table, list) or len(table) != place.world_size:
            raise ValueError("no table")
        if keep:
            stack.pop_all()
            return Meeting(table, {0: connection})
    return Meeting(table, {})

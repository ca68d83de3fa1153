"""Whether the hosts reach each other, before the process group waits for them for half an hour."""

from __future__ import annotations

import datetime
import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator

import torch.distributed as dist

from distdl.distributed import process_group
from distdl.ranks.environment import Environment
from distdl.tools.doctor import node
from distdl.util.errors import UserError

ANSWER_S = 8.0  # a host that is up answers, if only that nobody listens at the port
LISTEN_S = 60.0  # until rank 0 listens, since hosts do not start at the same time
PORT_S = 3.0  # for one connection to another host
MOST = 3  # problems that a host reports
OR_EXPORT = "or export GLOO_SOCKET_IFNAME=INTERFACE"
NAMES = "give the hosts names by DNS or /etc/hosts, or use addresses"
OPEN = "let the job's hosts reach each other at all TCP ports (firewall, network security group)"


def rendezvous(environment: Environment, attempt: int) -> dist.Store:
    """The store by which the ranks find each other, once all hosts have reached each other.

    Raises:
        UserError: A name, the rendezvous port, or a port of another host cannot be reached.
    """
    who = f"rank {environment.rank} on {socket.gethostname()}"
    main = f"{environment.main_address}:{environment.main_port}"
    try:
        address = node.local_address(environment)
    except OSError as error:
        raise UserError.at(
            "MASTER_ADDR",
            what=f"{who} cannot reach the host of rank 0, {main}: {error.strerror}",
            remedy=NAMES,
            code="unreachable",
        ) from error
    if environment.rank:
        _await_rank_0(environment, who, main)
    try:
        limit = datetime.timedelta(seconds=LISTEN_S)
        store = process_group.attempts_store(attempt, limit)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        what = f"not all ranks came to {main} within {LISTEN_S:.0f} s: {str(error).splitlines()[0]}"
        raise UserError.at(
            "MASTER_PORT", what=f"{who}: {what}", remedy=OPEN, code="unreachable"
        ) from error
    if environment.world_size > environment.local_world_size:
        _reach_all(environment, dist.PrefixStore("distdl/reach", store), address)
    store.set_timeout(process_group.TIMEOUT)
    return store


def _await_rank_0(environment: Environment, who: str, main: str) -> None:
    """Waits until rank 0 listens. Raises a UserError if that takes too long."""
    started = time.monotonic()
    target = (environment.main_address, environment.main_port)
    while True:
        try:
            socket.create_connection(target, PORT_S).close()
            return
        except OSError as error:
            failure = error
        # A host that refuses is there, and its rank 0 may only be slower to start.
        refused = failure.errno == errno.ECONNREFUSED
        limit = LISTEN_S if refused else ANSWER_S
        if time.monotonic() - started > limit:
            reason = "nobody listens there" if refused else "no answer"
            raise UserError.at(
                "MASTER_PORT",
                what=f"{who} cannot reach rank 0 at {main}: {reason}",
                remedy=OPEN,
                code="unreachable",
            ) from failure
        time.sleep(0.2)


def _reach_all(environment: Environment, store: dist.Store, address: str) -> None:
    """One rank of each host listens at a free port, as gloo and NCCL do, and the others connect."""
    nodes = range(environment.world_size // environment.local_world_size)
    host = socket.gethostname()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(nodes)) as server:
        if environment.local_rank == 0:
            where = [address, server.getsockname()[1], host]
            store.set(f"at/{environment.node_rank}", json.dumps(where))
            problems = [*_name_problems(host)]
            for to, port, name in (json.loads(store.get(f"at/{number}")) for number in nodes):
                try:
                    socket.create_connection((to, port), PORT_S).close()
                except OSError as error:
                    problems.append(f"{host} cannot reach {name} at {to}:{port}: {error}")
            store.set(f"problems/{environment.node_rank}", json.dumps(problems[:MOST]))
        every = [each for n in nodes for each in json.loads(store.get(f"problems/{n}"))]
    if every:
        raise UserError.at("", what="; ".join(every), remedy=OPEN, code="failed")


def _name_problems(host: str) -> Iterator[str]:
    """What would make gloo listen where no other host can reach it."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])  # of IPv4 or IPv6, as gloo has it
        if ipaddress.ip_address(address).is_loopback:
            yield f"{host} takes its own name for {address}: correct /etc/hosts, {OR_EXPORT}"
    except OSError:
        yield f"{host} cannot resolve its own name: {NAMES}, {OR_EXPORT}"

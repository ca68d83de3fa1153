"""How the ranks of one machine find each other: a store on the loopback interface.

torch's own rendezvous listen on every interface. This one opens the store that the ranks use on a
socket that it has bound itself; as there is one agent, nothing is to be agreed on.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

NAME, HOST, TIMEOUT = "distdl-loopback", "127.0.0.1", 600  # seconds


def register() -> str:
    """Makes it known to torch; returns its name."""
    rendezvous_handler_registry.register(NAME, Loopback)
    return NAME


class Loopback(StaticTCPRendezvous):
    """One agent, one store, one address that nobody else can reach."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(HOST, 0, 0, 1, parameters.run_id, TIMEOUT)

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((HOST, 0))
            self.master_port = listener.getsockname()[1]
            self._store = TCPStore(
                HOST,
                self.master_port,
                world_size=1,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # without it, every interface
            )
        return super().next_rendezvous()

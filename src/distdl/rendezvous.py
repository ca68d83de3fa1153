"""How the ranks of one machine find each other: a store on the loopback interface.

torch's own rendezvous for one machine listens on every interface and unpickles what it is sent.
This one has nothing to agree on, as there is one agent: it opens the store that the ranks use, on a
socket that it has bound itself.
"""

from __future__ import annotations

import datetime
import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME, HOST = "distdl-loopback", "127.0.0.1"


def register() -> str:
    """Makes it known to torch; returns its name."""
    rendezvous_handler_registry.register(NAME, Loopback)
    return NAME


class Loopback(RendezvousHandler):
    """One agent, one store, one address that nobody else can reach."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        listener = socket.create_server((HOST, 0))
        self.port = listener.getsockname()[1]
        self.store = TCPStore(
            HOST,
            self.port,
            world_size=1,
            is_master=True,
            timeout=datetime.timedelta(minutes=10),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # without it, every interface
        )

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self.run_id, self.store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HOST, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True

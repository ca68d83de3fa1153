"""How ranks find each other on one machine. torch's own handlers listen on every interface."""

from __future__ import annotations

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distdl.util import loopback

NAME = "distdl-loopback"
TIMEOUT = 600  # seconds


def register() -> str:
    """Registers `Loopback` with torch; returns its name."""
    registry.register(NAME, Loopback)
    return NAME


class Loopback(StaticTCPRendezvous):
    """A rendezvous of one agent, with a store at an address that no other machine can reach."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("", 0, 0, 1, parameters.run_id, TIMEOUT)

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = loopback.listen()
            self.master_addr, self.master_port = listener.getsockname()[:2]
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                world_size=1,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # else the store listens on every interface
            )
        return super().next_rendezvous()

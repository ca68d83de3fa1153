"""The hosts of a training job, as SageMaker tells each of them."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from distdl.launchers.sagemaker.instances import known

RESOURCES = "input/config/resourceconfig.json"


@dataclass(frozen=True)
class Hosts:
    """Who takes part, and who this is. The first host is the primary one: rank 0 lives there."""

    names: tuple[str, ...]
    current: str
    interface: str = ""
    instance_type: str = ""

    @property
    def number(self) -> int:
        return self.names.index(self.current)

    @property
    def primary(self) -> str:
        return self.names[0]

    def environment(self) -> dict[str, str]:
        """How the libraries that carry gradients are to talk; a variable that is set already wins.

        EFA: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
        """
        found: dict[str, str] = {}
        if self.interface:
            found |= {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface}
        instance = known().get(self.instance_type)
        if instance is not None and instance.efa and len(self.names) > 1:
            found["FI_PROVIDER"] = "efa"
        return found

    def await_primary(self, seconds: float = 300) -> None:
        """The name of the other host may be known to DNS a little later than this one runs."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.getaddrinfo(self.primary, None)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def read(root: Path) -> Hosts:
    """From resourceconfig.json below `root`.

    Source: "Distributed training configuration" of
    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    """
    told = json.loads((root / RESOURCES).read_text())
    # By number: algo-10 comes after algo-2, and every host must see the same order.
    names = sorted(told["hosts"], key=lambda n: [int(x) if x.isdigit() else x for x in split(n)])
    return Hosts(
        tuple(names),
        told["current_host"],
        told.get("network_interface_name", ""),
        told.get("current_instance_type", ""),
    )


def split(name: str) -> list[str]:
    """`algo-10` -> ["algo-", "10"]: names of one job have the same shape."""
    return [part for part in re.split(r"(\d+)", name) if part]

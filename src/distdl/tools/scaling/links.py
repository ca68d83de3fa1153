"""The time of a collective: latency per message, and bytes over bandwidth.

Sources, by the letters used below:

- [R] Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
  workstations", section 3, https://doi.org/10.1016/j.jpdc.2008.09.002: in a ring of n, each device
  sends 2 (n - 1) / n of the bytes, in 2 (n - 1) messages.
- [T] Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in
  MPICH", sections 3 and 4.5, https://doi.org/10.1177/1094342005051521: seconds = messages x latency
  + bytes / bandwidth; halving and doubling sends as many bytes in 2 log2(n) messages.
- [N] NVIDIA 2019, "Massively Scale Your Deep Learning Training with NCCL 2.4",
  https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/: rings inside a
  node and double binary trees between nodes; the number of messages grows with log2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distdl.util.typed import Above0, Checked, From0

RING, HIERARCHICAL, TREE = "ring", "hierarchical", "tree"
ALGORITHMS = (RING, HIERARCHICAL, TREE)


@dataclass(frozen=True)
class Link(Checked):
    """One kind of link.

    Args:
        bandwidth: Bytes per second in each direction, as sustained.
        latency: Seconds that an empty message takes.
    """

    bandwidth: Above0
    latency: From0 = 0.0


@dataclass(frozen=True)
class Links(Checked):
    """The two kinds of links. The bandwidth of `inside` is that of *one device* inside a node. The
    bandwidth of `between` is that of *one node*: all its adapters together."""

    inside: Link
    between: Link


@dataclass(frozen=True)
class Group:
    """The devices that take part in a collective."""

    devices: int
    per_node: int  # devices of this group in each of its nodes
    sharing: int = 1  # groups that use a node's network at the same time

    @property
    def nodes(self) -> int:
        return self.devices // self.per_node


def all_reduce(size: float, group: Group, links: Links, algorithm: str) -> float:
    """Seconds to sum `size` bytes over all devices and give each the result.

    Args:
        size: Bytes on each device.
        algorithm: "ring": one ring through all devices, which enters and leaves each node once [R].
            "hierarchical": a reduce-scatter in each node, a ring between the nodes for each
            device's share, an all-gather in each node. "tree": as hierarchical, but with halving
            and doubling, or trees, between the nodes [T] [N].
    """
    count = group.devices
    if count == 1 or size <= 0:
        return 0.0
    network = links.between.bandwidth / group.sharing
    if group.nodes == 1:
        return _ring(size, count, links.inside)
    if algorithm == RING:
        if group.per_node == 1:
            return _ring(size, count, Link(network, links.between.latency))
        # Every message waits for the slowest hop of the ring.
        latency = max(links.inside.latency, links.between.latency)
        return _ring(size, count, Link(min(links.inside.bandwidth, network), latency))
    nodes = group.nodes
    messages = 2 * (nodes - 1) if algorithm == HIERARCHICAL else 2 * math.ceil(math.log2(nodes))
    # Each device of a node sends its share, so the node sends the bytes of all of them.
    sent = 2 * (nodes - 1) / nodes * size
    inside = _ring(size, group.per_node, links.inside)
    return inside + messages * links.between.latency + sent / network


def _ring(size: float, count: int, link: Link) -> float:
    return 2 * (count - 1) * (link.latency + size / count / link.bandwidth)


def fastest(size: float, group: Group, links: Links) -> tuple[float, str]:
    """Seconds of the fastest algorithm, and its name. NCCL chooses by such a model, too."""
    return min((all_reduce(size, group, links, name), name) for name in ALGORITHMS)


def exposed(parts: int, seconds: float, window: float) -> float:
    """Seconds of communication that no computation hides.

    The computation finishes `parts` equal pieces at equal intervals within `window`. The pieces are
    sent one after the other. The last piece is never hidden. If sending takes longer than the
    computation, the excess is not hidden either. Buckets of gradients are sent this way during the
    backward: Li et al. 2020, "PyTorch Distributed", section 3.2.3,
    https://arxiv.org/abs/2006.15704.

    Args:
        seconds: Time to send one piece.
        window: Time of the computation.
    """
    return max(seconds, parts * seconds - window * (parts - 1) / parts)

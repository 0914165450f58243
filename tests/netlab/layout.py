"""What a lab consists of, and whether it can exist."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import msgspec

MAX_NODES = 200  # one /24
MIN_SHARE = 0.1  # of a core: the kernel has no quota below 1 ms
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,30}")


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine. `cpu_share` is of its cores, `rate_mbps` is its network card's, each way.

    The memory limit holds for the data of each process (over it an allocation raises, as on a full
    GPU); a process with torch begins at about 0.25 GB.
    """

    name: str
    cores: tuple[int, ...] = ()  # () means all
    cpu_share: float = 1.0
    memory_bytes: int | None = None
    rate_mbps: float | None = None  # None means as fast as the machine can
    switch: str = "s0"


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between two switches: a trunk. Between two nodes: a limit on top of their cards'."""

    a: str
    b: str
    rate_mbps: float | None = None

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.a, self.b))


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes and links of a lab, as in the JSON file of the command line."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        _check_links(self)
        if not _is_tree(self.switches, [link.ends for link in self.trunks]):
            raise ValueError(f"the trunks must join all switches in a tree: {self.switches}")

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    @property
    def switches(self) -> list[str]:
        ends = {end for link in self.links for end in link.ends}
        return sorted({node.switch for node in self.nodes} | (ends - set(self.names)))

    @property
    def trunks(self) -> list[Link]:
        return [link for link in self.links if not link.ends & set(self.names)]

    @property
    def pairs(self) -> list[Link]:
        return [link for link in self.links if link.ends <= set(self.names)]


def usable_cores(node: Node) -> tuple[int, ...]:
    return node.cores or tuple(sorted(os.sched_getaffinity(0)))


def check_share(share: float) -> None:
    if not MIN_SHARE <= share <= 1:
        raise ValueError(f"a CPU share is from {MIN_SHARE} to 1, not {share}")


def check_rate(rate_mbps: float | None) -> None:
    if rate_mbps is not None and not 0.1 <= rate_mbps <= 100_000:
        raise ValueError(f"a rate is from 0.1 to 100000 Mbit/s or None, not {rate_mbps}")


def _check_nodes(nodes: Sequence[Node]) -> None:
    names = [node.name for node in nodes]
    if not 1 <= len(set(names)) == len(names) <= MAX_NODES:
        raise ValueError(f"a lab has 1 to {MAX_NODES} nodes of different names, not {names}")
    for node in nodes:
        if not NAME.fullmatch(node.name):
            raise ValueError(f"a node's name is letters, digits and '-', not {node.name!r}")
        missing = set(node.cores) - os.sched_getaffinity(0)
        if missing:
            raise ValueError(f"node {node.name}: this machine has no cores {sorted(missing)}")
        check_share(node.cpu_share)
        check_rate(node.rate_mbps)


def _check_links(layout: Layout) -> None:
    names = set(layout.names)
    if names & {node.switch for node in layout.nodes}:
        raise ValueError("a switch cannot have a node's name")
    if len({link.ends for link in layout.links}) < len(layout.links):
        raise ValueError("a link is given twice")
    for link in layout.links:
        check_rate(link.rate_mbps)
        if len(link.ends) != 2 or len(link.ends & names) == 1:
            ends = f"{link.a} and {link.b}; a card's rate is Node(rate_mbps=...)"
            raise ValueError(f"a link joins two nodes or two switches, not {ends}")


def _is_tree(points: Sequence[str], edges: Sequence[frozenset[str]]) -> bool:
    reached = {points[0]}
    for _ in points:
        reached |= {end for edge in edges if edge & reached for end in edge}
    return len(reached) == len(points) == len(edges) + 1

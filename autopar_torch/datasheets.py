"""Datasheets of devices and networks, and clusters by their names: `2x8xH100 + 4x8xA100-80`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta, Struct, structs

from . import files
from .cluster import Cluster, Device, Link, Zone, ZoneLink, slowest_of
from .errors import PlanError
from .limits import Fraction, Name

T = TypeVar("T")
MOST_DEVICES = 2**17
PART = re.compile(r"(?:([0-9]{1,7})x)?([0-9]{1,7})x([0-9]*[A-Za-z][^\s@+]*)(?:@(\S+))?", re.ASCII)
RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?([MGT])(b|B)/s", re.ASCII)
SCALE = {"M": 1e6, "G": 1e9, "T": 1e12}
BITS = {"b": 8, "B": 1}  # in a byte
SIZE_APART = 0.2  # of its memory: a driver keeps some
LEAST_RATE, MOST_RATE = 1e3, 1e15  # bytes per second


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """What joins nodes: a link per device and direction, as its datasheet has it, and the part of
    it that collectives get."""

    link: Link
    reached: Fraction = 1.0
    sources: dict[str, str] = {}  # number -> the datasheet it is from
    calibrated: dict[str, str] = {}  # number -> what it was fitted on

    @property
    def across(self) -> Link:
        return _reached(self.link, self.reached)


class Hardware(Struct, frozen=True, forbid_unknown_fields=True):
    """A datasheet: one device, how many share a node, what joins them, and where that is from.

    The link is per device and direction, as the datasheet has it; `inside_reached` is the part of
    it that collectives get. `network` is the usual one, by the name of its file.
    """

    device: Device
    per_node: Annotated[int, Meta(ge=1, le=2**16)]
    inside: Link
    network: Name | Network
    inside_reached: Fraction = 1.0
    # Part of a kind of exchange that hides behind computing.
    overlap: dict[str, Annotated[float, Meta(ge=0.0, le=1.0)]] = {}
    aliases: tuple[Name, ...] = ()
    sources: dict[str, str] = {}  # number -> the datasheet it is from
    calibrated: dict[str, str] = {}  # number -> what it was fitted on

    @property
    def fabric(self) -> Network:
        """The network itself."""
        return self.network if isinstance(self.network, Network) else networks()[self.network]

    def cluster(self, num_nodes: int = 1, per_node: int = 0, network: Network | None = None
                ) -> Cluster:
        node = (self.device,) * (per_node or self.per_node)
        return Cluster((node,) * num_nodes, _reached(self.inside, self.inside_reached),
                       (network or self.fabric).across)


def _reached(link: Link, part: float) -> Link:
    return structs.replace(link, bytes_per_s=link.bytes_per_s * part)


@cache
def known() -> dict[str, Hardware]:
    """Hardware by name: the files of `profiling/hardware`, which a wheel carries along."""
    return dict(_described("*.json", Hardware))


@cache
def networks() -> dict[str, Network]:
    """Networks by name: the files of `profiling/hardware/networks`."""
    return dict(_described("networks/*.json", Network))


def _described(pattern: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    here = Path(__file__).resolve().parent
    for folder in (here / "hardware", here.parent / "profiling" / "hardware"):
        for path in sorted(folder.glob(pattern)):
            yield path.stem, files.load(path, kind)


def hardware(name: str) -> Hardware:
    """A description by its name or an alias, whatever the case."""
    for key, found in known().items():
        if name.lower() in {text.lower() for text in (key, *found.aliases)}:
            return found
    near = [f"{meant}, or " for meant in get_close_matches(name.upper(), known(), 1)]
    raise PlanError(f"no hardware is called {name!r}", where="the name of a device",
                    fix=f"write {''.join(near)}one of {', '.join(known())}")


def of_product(product: str, memory_bytes: int) -> Hardware | None:
    """The datasheet of a device by the name that its driver gives it ("NVIDIA H100 80GB HBM3") and
    its memory, as one name stands for several sizes."""
    words = set(re.split(r"[^A-Z0-9]+", product.upper()))
    likely = [own for name, own in known().items() if name.upper().split("-")[0] in words]
    like = [own for own in likely if ("PCIE" in words) == ("PCIE" in own.device.name.upper())]

    def apart(own: Hardware) -> float:
        return abs(own.device.memory_bytes / memory_bytes - 1)

    found = min(like or likely, key=apart, default=None)
    return found if found and apart(found) < SIZE_APART else None


def network(text: str, usual: Network) -> Network:
    """A network by its name, whatever the case, or by its rate per device: `400Gb/s` of the usual
    one of a device, of which collectives get the same part."""
    if match := RATE.fullmatch(text):
        rate = float(match[1]) * SCALE[match[2]] / BITS[match[3]]
        if LEAST_RATE <= rate <= MOST_RATE:
            link = structs.replace(usual.link, bytes_per_s=rate)
            return structs.replace(usual, link=link)
    for name, found in networks().items():
        if name.lower() == text.lower():
            return found
    raise PlanError(f"{text[:80]!r} is no network", where="network", fix="give a rate per device, "
                    f"400Gb/s (bits) or 50GB/s (bytes), or a name: {', '.join(networks())}")


class Pool(NamedTuple):
    """Equal nodes, and the network that joins them."""

    nodes: Cluster
    network: Network


def named(text: str, given: str = "") -> Cluster:
    """`8xH200`: one node of eight devices; `16x8xH100@ib400`: sixteen nodes on a network by name;
    `2x8xH100 + 4x8xA100-80`: nodes that differ. `given`: a network between all nodes whose part
    does not name its own."""
    pools = [_pool(part.strip(), text, given) for part in text.split("+")]
    nodes = tuple(node for pool in pools for node in pool.nodes.nodes)
    if sum(map(len, nodes)) > MOST_DEVICES:
        raise _no_cluster(text)
    return _joined(nodes, pools, given)


def _pool(part: str, text: str, given: str) -> Pool:
    match = PART.fullmatch(part)
    num_nodes, per_node = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if not match or not 0 < num_nodes * per_node <= MOST_DEVICES:
        raise _no_cluster(text)
    found = hardware(match[3])
    own = match[4] or given
    joined = network(own, found.fabric) if own else found.fabric
    return Pool(found.cluster(num_nodes, per_node, joined), joined)


def _no_cluster(text: str) -> PlanError:
    return PlanError(
        f"{text[:80]!r} names no cluster of 1 to {MOST_DEVICES} devices", where="cluster",
        fix="write 8xH200, 16x8xH100 for 16 nodes, 4x8xA100-40@efa for another network, or "
        "2x8xH100 + 4x8xA100-80")


def _joined(nodes: tuple[tuple[Device, ...], ...], pools: list[Pool], given: str) -> Cluster:
    """Nodes with equal links are one zone. Between zones lies the slower of both networks, if none
    was given."""
    numbers: dict[tuple[Link, Link], list[int]] = {}
    between: dict[tuple[Link, Link], Link] = {}
    count = 0
    for pool in pools:
        links, more = (pool.nodes.inside, pool.nodes.across), len(pool.nodes.nodes)
        numbers.setdefault(links, []).extend(range(count, count + more))
        between.setdefault(links, network(given, pool.network).across if given else links[1])
        count += more
    inside, across = (slowest_of(links) for links in zip(*numbers, strict=True))
    pairs = tuple(ZoneLink((a, b), slowest_of((one, other))) for (a, one), (b, other)
                  in combinations(enumerate(between.values()), 2))
    if not pairs:
        return Cluster(nodes, inside, across)
    zones = tuple(Zone(tuple(own), *links) for links, own in numbers.items())
    across = slowest_of((across, *(pair.link for pair in pairs)))
    return Cluster(nodes, inside, across, zones=zones, links=pairs)


__all__ = ["Hardware", "Network", "hardware", "known", "named", "network", "networks"]

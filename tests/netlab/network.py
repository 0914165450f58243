"""The cables: a card for each node, switches as bridges in a namespace of their own, and rates."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from netlab.layout import Layout
from netlab.namespaces import Box

NET = "198.18.0"  # RFC 2544 gives this range to test networks
MTU = 9000
UNLIMITED_MBPS = 100_000
BURST_S = 250e-6  # what may pass at once, so that short messages are slowed too
QUEUE_S, MIN_QUEUE_BYTES = 0.05, 512 * 1024
FLOOR = "8kbit"  # classes borrow all they use from their card


class Network:
    """Builds the network of a layout between boxes, and changes its rates."""

    def __init__(self, layout: Layout, boxes: dict[str, Box], fabric: Box) -> None:
        self.layout, self.boxes, self.fabric = layout, boxes, fabric
        self.index = {name: i for i, name in enumerate(layout.names)}
        self.paired = {end for link in layout.pairs for end in link.ends}
        self._wire()
        for name in self.paired:
            boxes[name].batch("tc", self._partners(name))
        for node in layout.nodes:
            if node.rate_mbps or node.name in self.paired:
                self.set_rate([node.name], node.rate_mbps)
        for link in layout.links:
            self.set_rate(link.ends, link.rate_mbps)

    def set_rate(self, ends: Collection[str], rate_mbps: float | None) -> None:
        """Of a card (one end), a trunk or a pair, each way."""
        links = [i for i, link in enumerate(self.layout.links) if link.ends == set(ends)]
        are_nodes = set(ends) <= set(self.index)
        if len(ends) == 1 and are_nodes:
            self._set_card(next(iter(ends)), rate_mbps)
        elif not links:
            raise ValueError(f"the lab was built without a link between {sorted(ends)}")
        elif are_nodes:
            for here, there in itertools.permutations(ends):
                line = _class("1:1", self._class_of(there), rate_mbps)
                self.boxes[here].batch("tc", [line])
        else:
            self.fabric.batch("tc", [_bucket(f"t{links[0]}{side}", rate_mbps) for side in "ab"])

    def set_up(self, name: str, up: bool) -> None:
        """Plug a node's card in or out at its switch."""
        self.fabric.batch("ip", [f"link set p{self.index[name]} {'up' if up else 'down'}"])

    def _set_card(self, name: str, rate_mbps: float | None) -> None:
        """Out of the node (at its card) and into it (at the switch)."""
        out = [_bucket("eth0", rate_mbps)]
        if name in self.paired:
            out = [_class("1:", "1:1", rate_mbps), _class("1:1", "1:2", rate_mbps)]
        self.boxes[name].batch("tc", out)
        self.fabric.batch("tc", [_bucket(f"p{self.index[name]}", rate_mbps)])

    def _wire(self) -> None:
        lines = []
        for i, _ in enumerate(self.layout.switches):
            lines.append(f"link add br{i} mtu {MTU} type bridge stp_state 0 mcast_snooping 0")
            lines.append(f"link set br{i} up")
        for i, node in enumerate(self.layout.nodes):
            card = f"eth0 mtu {MTU} netns {self.boxes[node.name].holder}"
            lines.append(f"link add p{i} mtu {MTU} type veth peer name {card}")
            lines.append(self._plug(f"p{i}", node.switch))
        for i, link in enumerate(self.layout.links):
            if link in self.layout.trunks:
                lines.append(f"link add t{i}a mtu {MTU} type veth peer name t{i}b mtu {MTU}")
                lines += [self._plug(f"t{i}a", link.a), self._plug(f"t{i}b", link.b)]
        self.fabric.batch("ip", lines)
        for i, name in enumerate(self.layout.names):
            up = ["link set lo up", f"addr add {address(i)}/24 dev eth0", "link set eth0 up"]
            self.boxes[name].batch("ip", up)

    def _plug(self, device: str, switch: str) -> str:
        return f"link set {device} master br{self.layout.switches.index(switch)} up"

    def _partners(self, name: str) -> list[str]:
        """What goes to the partners of a pair has classes of its own, below the card's."""
        lines = ["qdisc add dev eth0 root handle 1: htb default 2"]
        pairs = [link.ends for link in self.layout.pairs if name in link.ends]
        for there in frozenset[str]().union(*pairs) - {name}:
            match = f"match ip dst {address(self.index[there])}/32 flowid {self._class_of(there)}"
            lines.append(f"filter add dev eth0 parent 1: protocol ip u32 {match}")
        return lines

    def _class_of(self, name: str) -> str:
        return f"1:{0x10 + self.index[name]:x}"


def address(index: int) -> str:
    return f"{NET}.{index + 1}"


def hosts(names: list[str]) -> str:
    """The nodes know each other by name."""
    known = [f"{address(i)} {name}\n" for i, name in enumerate(names)]
    return "".join(["127.0.0.1 localhost\n", *known])


def _bucket(device: str, rate_mbps: float | None) -> str:
    bits = _bits(rate_mbps)
    queue = max(MIN_QUEUE_BYTES, int(bits / 8 * QUEUE_S))
    limits = f"rate {bits}bit burst {_burst(bits)} limit {queue}"
    return f"qdisc replace dev {device} root tbf {limits}"


def _class(parent: str, name: str, rate_mbps: float | None) -> str:
    bits = _bits(rate_mbps)
    floor = f"{bits}bit" if parent == "1:" else FLOOR
    limits = f"ceil {bits}bit burst {_burst(bits)} cburst {_burst(bits)} quantum 60000"
    return f"class replace dev eth0 parent {parent} classid {name} htb rate {floor} {limits}"


def _bits(rate_mbps: float | None) -> int:
    return round((rate_mbps or UNLIMITED_MBPS) * 1e6)


def _burst(bits: int) -> int:
    return max(int(MTU * 1.1), min(int(bits / 8 * BURST_S), 4_000_000))

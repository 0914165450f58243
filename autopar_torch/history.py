"""What happened to machines and their links, from a measured or a composed trace."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .cluster import SLOWEST
from .limits import Count, Factor, Name, Rank, refuse

Moment = Annotated[float, Meta(ge=0.0, le=1e9)]  # seconds; a trace may last for years
GONE = (0.0, 0.0)


class Incident(Struct, frozen=True, forbid_unknown_fields=True):
    """From `at_s` on a node's link or its devices run at `factor` of their speed; or the node is
    lost, or back, as fast as it was."""

    at_s: Moment
    node: Rank
    what: Literal["link", "speed", "lost", "back"]
    factor: Factor = 1.0

    def __post_init__(self) -> None:
        refuse(not SLOWEST <= self.factor <= 1, f"a factor of {self.factor}; it is a part of the "
               "full speed (a node that is gone is `lost`)")
        refuse(self.what in ("lost", "back") and self.factor != 1, f"{self.what} with a factor")


class History(Struct, frozen=True, forbid_unknown_fields=True):
    """The events of a run on equal nodes, in order of time; in the beginning all nodes are there,
    except those that are lost at 0 s."""

    num_nodes: Count
    end_s: Moment
    events: tuple[Incident, ...]
    devices_per_node: Count = 1
    source: Name = "given by the user"

    def __post_init__(self) -> None:
        gone: set[int] = set()
        for event in self.events:
            refuse(event.node >= self.num_nodes, f"an event of node {event.node} of "
                   f"{self.num_nodes}, which are numbered from 0")
            if event.what in ("lost", "back"):
                refuse((event.what == "lost") == (event.node in gone), f"at {event.at_s} s node "
                       f"{event.node} is {event.what}, and was so already")
                gone ^= {event.node}
        times = [event.at_s for event in self.events]
        refuse(any(a > b for a, b in pairwise([*times, self.end_s])) or not self.end_s,
               "events out of order, or after the end")

    def states(self) -> list[tuple[float, tuple[tuple[float, float], ...]]]:
        """From when on how nodes are: per node the factors of its link and devices, or GONE."""
        factors, gone = [[1.0, 1.0] for _ in range(self.num_nodes)], set[int]()
        found: dict[float, tuple[tuple[float, float], ...]] = {}

        def now() -> tuple[tuple[float, float], ...]:
            return tuple(GONE if n in gone else (own[0], own[1]) for n, own in enumerate(factors))

        found[0.0] = now()
        for event in self.events:
            if event.what in ("lost", "back"):
                gone ^= {event.node}
            else:
                factors[event.node][event.what == "speed"] = event.factor
            found[event.at_s] = now()
        return [(at_s, state) for at_s, state in found.items() if at_s < self.end_s]

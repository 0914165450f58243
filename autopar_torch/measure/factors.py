"""What a short look at machines saw, and what is left of what was usual. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from msgspec import Struct

from ..limits import Fraction, Seconds
from .stats import APART, STEP

LINK_APART = 0.25  # two looks at one link may differ by so much
LEAST = 1e-4
FEW_NODES = 4  # all pairs are looked at


class Look(Struct, frozen=True):
    """What one look saw."""

    computing_s: tuple[Seconds, ...]  # per rank, some work
    sending_s: tuple[Seconds, ...]  # per pair of `pairs`; empty where there is one node
    seconds: Seconds  # that looking took


class Factors(Struct, frozen=True, forbid_unknown_fields=True):
    """What is left of the speed of each rank, and of each node's link."""

    speeds: tuple[Fraction, ...]
    links: tuple[Fraction, ...]

    @property
    def usual(self) -> bool:
        return set(self.speeds + self.links) == {1.0}


def pairs(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """The first ranks of nodes that are looked at together: all, or each node and the next."""
    own = list({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())[::-1]
    if len(own) <= FEW_NODES:
        return list(combinations(own, 2))
    return [(a, b) for a, b in zip(own, own[1:] + own[:1], strict=True)]


def compared(nodes: Sequence[str], usual: Look, now: Look, known: Factors) -> Factors:
    """What is left of what was usual. What is the same for all ranks is no change of any of them:
    other work is there, and makes what they exchange slower too."""
    own = [a / b for a, b in zip(usual.computing_s, now.computing_s, strict=True)]
    speeds = [left(factor / max(own), old, APART)
              for factor, old in zip(own, known.speeds, strict=True)]
    ends = pairs(nodes)
    by_pair = [a / b / min(1.0, max(own))
               for a, b in zip(usual.sending_s, now.sending_s, strict=True)]
    links = []
    for node, old in zip(dict.fromkeys(nodes), known.links, strict=True):
        # A pair is as slow as the slower of its links: the best of its pairs tells of a node.
        own = [f for f, pair in zip(by_pair, ends, strict=True)
               if node in (nodes[pair[0]], nodes[pair[1]])]
        links.append(left(max(own, default=1.0), old, LINK_APART))
    return Factors(tuple(speeds), tuple(links))


def left(factor: float, known: float, apart: float) -> float:
    """In steps, downwards from the usual; about the usual counts as it, about what was known too.
    """
    if factor > 1 - apart:
        return 1.0
    if abs(factor / known - 1) < apart:
        return known
    return max(LEAST, round(round(factor / STEP) * STEP, 2), float(f"{min(factor, STEP):.1g}"))

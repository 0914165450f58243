"""Which rank sends which box of a tensor to whom when its cut changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .atoms import atoms, common
from .holdings import Box

Boxes = Mapping[int, Sequence[Box]]  # rank -> what it holds


class Transfer(NamedTuple):
    """A box that a rank holds and another one (or itself) will hold."""

    source: int
    target: int
    box: Box


def transfers(before: Boxes, after: Boxes, sent: dict[int, int]) -> Iterator[Transfer]:
    """All boxes that new holders need: from themselves if they can, else from the holder that has
    sent the fewest elements so far (`sent`, which is added to)."""
    cells = [(atom.holders, box) for atom in atoms(before) for box in atom.boxes]
    for target in sorted(after):
        for wanted in after[target]:
            for holders, box in cells:
                shared = common(box, wanted) if all(wanted[1]) else None
                if shared is None:
                    continue
                source = target if target in holders else min(
                    holders, key=lambda rank: (sent.get(rank, 0), rank))
                if source != target:
                    sent[source] = sent.get(source, 0) + math.prod(shared[1])
                yield Transfer(source, target, shared)

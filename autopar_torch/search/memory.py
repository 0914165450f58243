"""Bytes of a position of a pipeline at its worst moment, for any range of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..shard.reduction import BUCKET_BYTES
from .space import Candidate
from .tables import Array, Blocks, Params

STATES = 2  # moments that an Adam keeps of a parameter


class Memory:
    """What does not depend on the borders of one candidate; then `peak` is a few sums.

    At the worst moment a position holds its parameters and what the optimizer keeps; and either
    activations in flight, what one block works with and the gradients so far, or the gradients and
    the messages that they are packed into.
    """

    def __init__(self, c: Candidate, params: Params, blocks: Blocks, ahead: Array,
                 fixed_bytes: float, copies: bool) -> None:  # fmt: skip
        self.candidate, self.fixed = c, fixed_bytes
        self.params = _sums(lasting(c, params, copies))
        owned = params.trained / c.dp if c.zero else params.trained
        self.lasting = {"parameters": lasting(c, params, copies) - STATES * owned,
                        "optimizer": STATES * owned}  # fmt: skip
        self.grads, self.kept = _sums(params.trained), _sums(blocks.kept)
        self.working, self.sent = blocks.working.tolist(), ahead.tolist()

        self.flight = [in_flight(c, k) for k in range(c.pp)]

    def parts(self, position: int, stages: Sequence[tuple[int, int]]) -> dict[str, float]:
        """What the bytes of `peak` are made of."""
        span = [slice(a, b) for a, b in stages]
        found = {"fixed": self.fixed}
        for name, column in self.lasting.items():
            found[name] = float(sum(column[s].sum() for s in span))
        grads = sum(self.grads[b] - self.grads[a] for a, b in stages)
        found |= {"gradients": grads, "working": max(max(self.working[s]) for s in span)}
        rest = self.peak(position, stages) - sum(found.values())
        if rest < 0:
            found["working"] = max(0.0, found["working"] + rest)
            rest = self.peak(position, stages) - sum(found.values())
        packed = 0.0 if self.candidate.dp == 1 else BUCKET_BYTES + grads * bool(self.candidate.zero)
        kept = sum(self.kept[b] - self.kept[a] for a, b in stages)
        flight = self.flight[position] / len(stages) * kept
        return found | {"activations" if flight >= packed else "messages": max(0.0, rest)}

    def peak(self, position: int, stages: Sequence[tuple[int, int]]) -> float:
        """Most bytes on a device of a position that holds these stages."""
        base, grads, kept, working = self.fixed, 0.0, 0.0, 0.0
        for a, b in stages:
            base += self.params[b] - self.params[a]
            grads += self.grads[b] - self.grads[a]
            kept += self.kept[b] - self.kept[a] + self.sent[b]
            working = max(working, max(self.working[a:b]))
        c, count, flight = self.candidate, len(stages), self.flight[position]
        running = flight / count * kept
        if flight >= c.micro_batches * count:  # gradients come when the first of them is gone
            running = max(running, (flight - 1) / count * kept + grads)
        else:
            running += grads
        packed = 0.0 if c.dp == 1 else BUCKET_BYTES + (2 if c.zero else 1) * grads
        return base + max(running + working, packed, grads)


def lasting(c: Candidate, params: Params, copies: bool) -> Array:
    """Per block: parameters, their leaves where those are copies, and the optimizer's states."""
    owned = params.trained / c.dp if c.zero else params.trained
    leaf = 0.0 if c.zero == 3 else params.leaf if c.zero or copies else 0.0
    return params.held - params.trained + (1 + STATES) * owned + leaf


def in_flight(c: Candidate, position: int) -> float:
    """Micro-batches whose activations a position holds at its peak, counted per stage of it."""
    count = c.micro_batches
    if c.schedule == "gpipe":
        return float(count * c.virtual)
    if c.schedule == "zero_bubble":
        return float(min(count, c.pp))
    if c.schedule == "interleaved":
        ahead = 2 * (c.pp - position - 1) + (c.virtual - 1) * c.pp + 1
        return float(min(count * c.virtual, ahead))
    return float(min(count, c.pp - position))


def _sums(values: Array) -> list[float]:
    return [0.0, *np.cumsum(values).tolist()]

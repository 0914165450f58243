"""Price one candidate with its borders: the closed formula for time, and bytes per position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..profile import Curve
from ..shard.reduction import BUCKET_BYTES
from ..simulate.formula import Pipeline, ends
from .space import Candidate
from .tables import Array, Blocks, Tables

STATES = 2  # moments that an Adam keeps of a parameter


class Found(NamedTuple):
    """A priced plan; `comm_s` is what a device spends exchanging inside its pipeline."""

    step_s: float
    memory_bytes: float
    candidate: Candidate
    borders: tuple[int, ...]

    @property
    def order(self) -> tuple[float, float, Candidate, tuple[int, ...]]:
        """Ties fall the same way everywhere: less memory, then the plainer plan."""
        return (self.step_s, self.memory_bytes, self.candidate, self.borders)


class Pricer:
    """Everything about one candidate that does not depend on its borders, and then the rest."""

    def __init__(self, tables: Tables, candidate: Candidate, num_rows: int) -> None:
        self.tables, self.candidate = tables, candidate
        option, c = tables.options[candidate.option], candidate
        self.tp = option.degree
        self.rows = max(1, num_rows // (c.dp * c.micro_batches))
        split = c.schedule == "zero_bubble"
        self.params = tables.params(c.option)
        blocks = tables.blocks(c.option, self.rows, split, c.recompute)
        self.blocks = self._with_gathers(blocks)
        self.over = tables.profile.profile.overheads
        self.sums = {name: _sums(getattr(self.blocks, name)) for name in Blocks._fields}
        self.held, self.trained = _sums(self.params.held), _sums(self.params.trained)

    def _team(self, position: int) -> tuple[int, ...]:
        """Ranks that hold the same part of a stage in all replicas."""
        c = self.candidate
        return tuple((r * c.pp + position) * self.tp for r in range(c.dp))

    def _with_gathers(self, blocks: Blocks) -> Blocks:
        """ZeRO 3 gathers every block before it runs, forward and backward."""
        if self.candidate.zero < 3 or self.candidate.dp == 1:
            return blocks
        curve = self.tables.profile.curve("gather", self._team(0))
        seconds = np.array([curve.seconds(size) if size else 0.0 for size in self.params.trained])
        return blocks._replace(forward=blocks.forward + seconds, backward=blocks.backward + seconds,
                               input=blocks.input + seconds,
                               working=blocks.working + 2 * self.params.trained)  # fmt: skip

    # --- time -----------------------------------------------------------------------------------

    def price(self, borders: tuple[int, ...]) -> Found:
        pipe = self._pipeline(borders)
        c = self.candidate
        stops = ends(c.schedule, pipe, c.micro_batches, c.virtual)
        stages = list(pairwise(borders))
        last = max(self._reduced(stop, stages[p], p) for p, stop in enumerate(stops))
        memory = max(self.memory(p, stages[p :: c.pp]) for p in range(c.pp))
        seconds = self._before(stages) + last + self._after(stages)
        return Found(float(seconds), float(memory), c, borders)

    def _pipeline(self, borders: tuple[int, ...]) -> Pipeline:
        c, over = self.candidate, self.over

        def part(name: str) -> Array:
            total = self.sums[name]
            return total[list(borders[1:])] - total[list(borders[:-1])]

        again = np.diff(self.trained[list(borders)]) * over.add_s_per_byte
        again *= (c.micro_batches - 1) / c.micro_batches
        send, back = self._messages(borders)
        forward = part("forward") + over.action_s + over.micro_batch_s
        backward, early = part("backward") + again + over.action_s, part("input") + over.action_s
        late = part("weight") + again
        return Pipeline(forward.tolist(), backward.tolist(), early.tolist(), late.tolist(), send,
                        back)  # fmt: skip

    def _messages(self, borders: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Seconds of the messages at every border; none within a position."""
        c = self.candidate
        ahead, back = self.tables.sends(c.option, self.rows)
        send, ret = [0.0] * c.stages(), [0.0] * c.stages()
        for s, border in enumerate(borders[1:-1]):
            here, there = s % c.pp, (s + 1) % c.pp
            if here != there:
                curve = self.tables.profile.curve("send", (here * self.tp, there * self.tp))
                send[s], ret[s + 1] = curve.seconds(ahead[border]), curve.seconds(back[border])
        return send, ret

    def _before(self, stages: Sequence[tuple[int, int]]) -> float:
        """The batch is taken, and ZeRO 1 and 2 gather the parameters."""
        c = self.candidate
        seconds = self.over.step_s
        if c.zero in (1, 2):
            curve = self.tables.profile.curve("gather", self._team(0))
            size = max(self._trained(p, stages) for p in range(c.pp))
            seconds += curve.seconds(size) + size * self.over.copy_s_per_byte
        return seconds

    def _after(self, stages: Sequence[tuple[int, int]]) -> float:
        """The loss is summed over everyone, then the optimizer runs."""
        c = self.candidate
        world = self.tp * c.pp * c.dp
        seconds = 0.0
        if world > 1:
            seconds += self.tables.profile.curve("sum", range(world)).seconds(4.0)
        owned = max(self._trained(p, stages) for p in range(c.pp)) / (c.dp if c.zero else 1)
        tensors = sum(self.params.number) / c.pp
        return (
            seconds + owned * self.over.update_s_per_byte + tensors * self.over.update_s_per_tensor
        )

    def _trained(self, position: int, stages: Sequence[tuple[int, int]]) -> float:
        own = stages[position :: self.candidate.pp]
        return float(sum(self.trained[b] - self.trained[a] for a, b in own))

    def _reduced(self, stop: float, stage: tuple[int, int], position: int) -> float:
        """When the sums of a position are there: buckets leave as its last backward fills them."""
        c = self.candidate
        if c.dp == 1:
            return stop
        curve = self.tables.profile.curve("scatter" if c.zero else "sum", self._team(position))
        ready, done, size = stop, 0.0, 0.0
        todo = list(range(stage[0], stage[1]))
        starts = self.sums["backward"]
        for block in reversed(todo):
            size += self.params.trained[block]
            ready = stop - float(starts[block] - starts[stage[0]])
            full = c.zero >= 2 or size >= BUCKET_BYTES or block == todo[0]
            if full and size:
                done = max(done, ready) + self._bucket_seconds(curve, size)
                size = 0.0
        return max(done, stop)

    def _bucket_seconds(self, curve: Curve, size: float) -> float:
        return curve.seconds(size) + size * self.over.copy_s_per_byte

    # --- memory ---------------------------------------------------------------------------------

    def memory(self, position: int, stages: Sequence[tuple[int, int]]) -> float:
        """Most bytes on a device of a position that holds these stages."""
        c = self.candidate
        held = sum(float(self.held[b] - self.held[a]) for a, b in stages)
        trained = sum(float(self.trained[b] - self.trained[a]) for a, b in stages)
        owned = trained / c.dp if c.zero else trained
        params = {0: held, 3: held - trained + owned}.get(c.zero, held + owned)
        base = params + STATES * owned + self.over.fixed_bytes
        kept = sum(float(self.sums["kept"][b] - self.sums["kept"][a]) for a, b in stages)
        working = max(float(self.blocks.working[a:b].max()) for a, b in stages)
        flight = in_flight(c, position) / len(stages) * kept
        again = c.micro_batches > 1
        grads = trained if again and c.zero < 2 else owned if again else 0.0
        largest = max(float(self.params.largest[a:b].max()) for a, b in stages)
        running = flight + working + grads
        return base + max(running, self._packed(trained, owned, largest, again))

    def _packed(self, trained: float, owned: float, largest: float, again: bool) -> float:
        """Messages of gradients beside what they were packed from (see simulate/memory.py)."""
        c = self.candidate
        if c.dp == 1 or not c.zero:
            return trained + 2 * largest
        if c.zero == 1:
            return 2 * trained + min(owned, BUCKET_BYTES)
        return 2 * trained + largest / c.dp + (owned if again else 0.0)


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


def _sums(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])

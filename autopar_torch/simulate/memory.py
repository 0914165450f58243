"""Bytes of every rank at the worst moment of a step, and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Replica
from ..schedule import Action, Op
from ..timeline import Memory
from .costs import BlockWork, Costs, RankCost
from .tasks import schedule_of

STATES = 2  # an Adam keeps two moments of every parameter


class Peak:
    """The largest state seen so far of one rank."""

    def __init__(self, fixed: Memory) -> None:
        self.fixed, self.most = fixed, fixed

    def see(self, activations: float, working: float, grads: float, buffers: float = 0.0) -> None:
        now = Memory(self.fixed.params, int(grads), self.fixed.optimizer, int(activations),
                     int(working), int(buffers), self.fixed.fixed)  # fmt: skip
        if now.peak_bytes > self.most.peak_bytes:
            self.most = now


def peaks(costs: Costs, num_rows: int, states: int = STATES) -> tuple[Memory, ...]:
    """Per rank of the plan."""
    rows = costs.plan.micro_batches(num_rows)
    found: dict[int, Memory] = {}
    for r, replica in enumerate(costs.plan.replicas):
        counts = [end - start for start, end in rows[r]]
        lanes = schedule_of(costs, replica, len(counts)).actions
        for lane in lanes:
            found |= _position(costs, r, replica, lane, counts, states)
    return tuple(found[rank] for rank in sorted(found))


def _position(costs: Costs, index: int, replica: Replica, lane: Sequence[Action],
              counts: Sequence[int], states: int) -> dict[int, Memory]:  # fmt: skip
    """All ranks of one device group run the same list."""
    stages = sorted({action.stage for action in lane})
    found = {}
    for place, rank in enumerate(replica.stages[stages[0]].devices):
        per_stage = {s: {n: costs.stage(index, s, n).ranks[place] for n in set(counts)}
                     for s in stages}  # fmt: skip
        came = {s: costs.stage(index, s, counts[0]).back_bytes for s in stages}
        found[rank] = _rank(costs, per_stage, came, lane, counts, states)
    return found


def _rank(costs: Costs, per_stage: dict[int, dict[int, RankCost]], came: dict[int, float],
          lane: Sequence[Action], counts: Sequence[int], states: int) -> Memory:  # fmt: skip
    own = [next(iter(by_rows.values())) for by_rows in per_stage.values()]
    owned = sum(cost.owned_bytes for cost in own)
    fixed = Memory(params=int(sum(c.param_bytes for c in own)), optimizer=int(states * owned),
                   fixed=int(costs.profile.profile.overheads.fixed_bytes))  # fmt: skip
    peak = Peak(fixed)
    kept = grads = 0.0
    started: set[int] = set()
    for action in lane:
        if action.op not in (Op.F, Op.B, Op.I, Op.W):
            continue
        rows = counts[action.micro_batch]
        cost = per_stage[action.stage][rows]
        size = sum(b.kept_bytes for b in cost.blocks) + came[action.stage]
        if action.op is Op.F:
            _forward(peak, cost.blocks, kept, grads)
            kept += size
            continue
        if action.stage not in started and action.op is not Op.W:
            started.add(action.stage)
            _backward(peak, cost.blocks, kept, grads, cost.grad_bytes)
            grads += cost.grad_bytes
        else:
            _backward(peak, cost.blocks, kept, grads, 0.0)
        if action.op is not Op.I:
            kept -= size
    again = costs.plan.zero >= 2 and len(counts) > 1
    _sums(peak, own, grads, again)
    peak.see(0.0, max((2 * c.largest_bytes for c in own), default=0.0), owned)
    return peak.most


def _forward(peak: Peak, blocks: Sequence[BlockWork], kept: float, grads: float) -> None:
    for block in blocks:
        peak.see(kept, block.forward_bytes, grads)
        kept += block.kept_bytes


def _backward(peak: Peak, blocks: Sequence[BlockWork], kept: float, grads: float,
              growth: float) -> None:  # fmt: skip
    """Kept values go block by block, from the last; gradients come, the first time."""
    share = growth / len(blocks) if blocks else 0.0
    for block in reversed(blocks):
        peak.see(kept, block.backward_bytes, grads)
        kept -= block.kept_bytes
        grads += share
        peak.see(kept, 0.0, grads)


def _sums(peak: Peak, own: Sequence[RankCost], grads: float, again: bool) -> None:
    """Messages lie beside the gradients that they are packed from; ZeRO receives as much as it
    sends, and adds the first sum before it lets go of anything."""
    buckets = [b for cost in own for b in cost.buckets if len(b.ranks) > 1]
    zero = [b for b in buckets if b.op == "scatter"]
    packed = sum(b.num_bytes * (2 if b.op == "scatter" else 1) for b in buckets)
    first = max((b.num_bytes / len(b.ranks) for b in zero), default=0.0)
    whole = max((b.num_bytes for b in buckets if b.op == "sum"), default=0.0)
    sums = sum(b.num_bytes / len(b.ranks) for b in zero) if again else 0.0
    peak.see(0.0, 0.0, max(0.0, grads - packed) + sums, packed + max(first, whole))

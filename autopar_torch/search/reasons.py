"""Why this plan: what a step is spent on, what else would cost, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from .. import progress
from ..errors import SearchError
from ..model import ModelGraph
from ..plan import Plan
from ..profile import Profile
from ..simulate import simulate
from ..simulate.network import lookup
from ..units import GIB, ranges
from .best import Choice, Result
from .evaluate import Pricer
from .explain import short
from .out_of_memory import memory_parts
from .space import Candidate, Constraints, Option
from .tables import Tables
from .unequal import fastest

MAY_BE_0 = ("zero", "recompute")


@dataclass(frozen=True)
class Case:
    """All that a search depends on, so that it can be repeated with something changed."""

    graph: ModelGraph
    options: Sequence[Option]
    profile: Profile
    num_rows: int
    limits: Constraints

    def best(self, num_rows: int = 0, profile: Profile | None = None, **limits: Any) -> Result:
        """The same search with something changed."""
        progress.tell("searching")
        changed = msgspec.structs.replace(self.limits, **limits)
        return fastest(self.graph, self.options, lookup(profile or self.profile),
                       num_rows or self.num_rows, changed)

    def pricer(self, plan: Plan) -> tuple[Pricer, tuple[int, ...]]:
        tables = Tables(self.options, self.graph, lookup(self.profile), plan.precision,
                        plan.grad_dtype)
        found, borders = candidate_of(plan, self.options)
        return Pricer(tables, found, self.num_rows), borders


def candidate_of(plan: Plan, options: Sequence[Option]) -> tuple[Candidate, tuple[int, ...]]:
    """A plan of equal replicas as the search sees it."""
    replica = plan.replicas[0]
    stages, pp = replica.stages, len(replica.positions)
    mesh = () if len(stages[0].devices) == 1 else stages[0].axes
    index = next((i for i, option in enumerate(options) if option.mesh == mesh), None)
    alike = all((r.num_micro_batches, r.rows) == (replica.num_micro_batches, replica.rows)
                and [s.blocks for s in r.stages] == [s.blocks for s in stages]
                for r in plan.replicas) and len({s.recompute for s in stages}) == 1
    alike = alike and (len(stages) == pp or plan.schedule == "interleaved")
    if index is None or not alike or any(s.blocks is None for s in stages):
        raise SearchError("only plans of equal replicas, with borders, are compared part by part",
                          where="Plan.replicas", fix="use autopar_torch.simulate")
    borders = (0, *((s.blocks or (0, 0))[1] for s in stages))
    return Candidate(index, pp, len(plan.replicas), replica.num_micro_batches, plan.schedule,
                     len(stages) // pp, plan.zero, stages[0].recompute), borders


def time_parts(pricer: Pricer, borders: tuple[int, ...]) -> dict[str, float]:
    """Seconds of a step by what its busiest position does; they sum to the step."""
    c, step_s = pricer.candidate, pricer.price(borders).step_s
    last, summed = max(pricer.ends(borders)), pricer.summed(borders)
    closing = pricer.closing(borders)
    busy = [sum(pricer.busy(borders)[k :: c.pp]) for k in range(c.pp)]
    busiest = max(range(c.pp), key=busy.__getitem__)
    begin = pricer.begins(borders)[busiest]
    exchange = c.micro_batches * _exchanged(pricer, list(pairwise(borders))[busiest :: c.pp])
    return {
        "computing": busy[busiest] - exchange, "exchange in tensor groups": exchange,
        "waiting in the pipeline": last - begin - busy[busiest],
        "gradient sums": summed - last, "gathers and update": begin + closing,
        "waiting for the core": step_s - closing - summed,
    }


def _exchanged(pricer: Pricer, stages: Sequence[tuple[int, int]]) -> float:
    """Seconds per micro-batch that the tensor group of a position exchanges."""
    tables, c = pricer.tables, pricer.candidate
    programs, which = tables.programs[c.option]
    total = 0.0
    for a, b in stages:
        for number in which[a:b]:
            kind, own = programs[number]
            cost = tables.cost(kind, own, pricer.rows, c.recompute)
            total += cost.comm_forward_s + cost.comm_backward_s
    return total


def against(case: Case, plan: Plan, best: Plan) -> list[str]:
    """Where a plan loses against the best, by parts of time and of memory."""
    rows = []
    (own, cut), (other, best_cut) = case.pricer(plan), case.pricer(best)
    tables = (("ms", 1e3, time_parts(own, cut), time_parts(other, best_cut)),
              ("GiB", 1 / GIB, memory_parts(own, cut), memory_parts(other, best_cut)))
    for unit, scale, mine, its in tables:
        rows.append(f"{unit:>28}      this      best  difference")
        for name in dict.fromkeys((*mine, *its, "all")):
            a, b = (sum(p.values()) if name == "all" else p.get(name, 0.0) for p in (mine, its))
            rows.append(f"{name:>28}  {a * scale:8.2f}  {b * scale:8.2f}  {(a - b) * scale:+9.2f}")
    return rows


def why(case: Case, best: Choice) -> list[str]:
    """Why this sharding, why these degrees, and what would change them."""
    if len(case.profile.cluster.classes) > 1:
        return ["what each device does:", *_by_device(case, best.plan)]
    pricer, borders = case.pricer(best.plan)
    rows = ["a step is spent on:"]
    for name, seconds in time_parts(pricer, borders).items():
        seconds = seconds if seconds > 1e-9 else 0.0  # what rounding leaves has no sign
        rows.append(f"  {name:<28} {seconds * 1e3:9.2f} ms  {seconds / best.step_s:6.1%}")
    rows += ["the fullest device holds:"]
    rows += [f"  {name:<28} {size / GIB:9.2f} GiB"
             for name, size in memory_parts(pricer, borders).items()]
    rows += ["how blocks are split:", *_splits(pricer)]
    rows += ["with one choice made otherwise, the rest chosen again:", *_otherwise(case, best)]
    return [*rows, "what would change the plan:", *_changes(case, best)]


def _by_device(case: Case, plan: Plan) -> Iterator[str]:
    """A row for each rank, or for all that do the same at the same time."""
    cluster = case.profile.cluster
    timeline = simulate(plan, case.graph, case.profile, case.num_rows)
    spans = plan.micro_batches(case.num_rows)
    alike = {ranks[0]: len(ranks) for ranks in timeline.alike}
    later = {rank for ranks in timeline.alike for rank in ranks[1:]}
    yield (f"{'rank':>6}  {'device':16} {'blocks':>9} {'rows':>5}  computing  exchanging   idle"
           "  memory")
    for r, replica in enumerate(plan.replicas):
        rows = sum(end - start for start, end in spans[r])
        for stage in replica.stages:
            for rank in (rank for rank in stage.devices if rank not in later):
                part, memory = timeline.parts(rank), timeline.memory[rank]
                shares = (x / part.step_s for x in (part.compute_s, part.comm_s, part.idle_s))
                yield (f"{rank:>6}  {cluster.devices[rank].name[:16]:16} "
                       f"{'{}:{}'.format(*(stage.blocks or (0, 0))):>9} {rows:>5}  "
                       + "  ".join(f"{share:9.1%}" for share in shares)
                       + f"  {memory.peak_bytes / GIB:.1f} GiB"
                       + (f", as {alike[rank] - 1} more" if rank in alike else ""))
    if idle := plan.idle(cluster.num_devices):
        yield f"device(s) {ranges(idle)} idle: no plan looked at was faster with them"


def _splits(pricer: Pricer) -> Iterator[str]:
    """Per kind: how many of its ops are shared, and what that costs in exchange."""
    option = pricer.tables.options[pricer.candidate.option]
    programs, which = pricer.tables.programs[pricer.candidate.option]
    for number, (kind, key) in enumerate(programs):
        blocks = [i for i, n in enumerate(which) if n == number]
        sharding, cost = option.shardings[blocks[0]], pricer.tables.profile.cost(
            kind, key, pricer.rows)
        name = f"  {kind} x {len(blocks)}: "
        if sharding is None:
            yield name + "whole, as no tensor group is used"
            continue
        split = sum("S" in text for text in sharding.ops.values())
        comm = cost.comm_forward_s + cost.comm_backward_s
        whole = comm + cost.forward_s + cost.backward_s
        yield (f"{name}{split} of {len(sharding.ops)} ops shared by {option.degree} devices, "
               f"{comm / whole if whole else 0.0:.1%} of its time is exchange")


class Variant(NamedTuple):
    """The best plan with one choice made otherwise: `tp=2`, by which part of its time it is slower
    (None: there is none), and in words."""

    change: str
    slower: float | None
    said: str


def variants(case: Case, best: Choice) -> Iterator[Variant]:
    """The best plans that differ in one degree: why each degree is what it is."""
    c, _ = candidate_of(best.plan, case.options)
    tp = case.options[c.option].degree
    near: dict[str, tuple[float, list[Any]]] = {
            "tp": (tp, [tp // 2, tp * 2]), "pp": (c.pp, [c.pp // 2, c.pp * 2]),
            "dp": (c.dp, [c.dp // 2, c.dp * 2]), "zero": (c.zero, [0, 1, 2, 3]),
            "recompute": (c.recompute, [False, True])}
    for name, (own, others) in near.items():
        if getattr(case.limits, name) is not None:
            yield Variant(f"{name}={own}", None, "was asked for")
            continue
        for other in dict.fromkeys(o for o in others if o != own and (o or name in MAY_BE_0)):
            try:
                found = case.best(**{name: other}).best
            except SearchError as error:
                yield Variant(f"{name}={other}", None, error.what.splitlines()[0])
                continue
            yield Variant(f"{name}={other}", found.step_s / best.step_s - 1, short(found.plan))


def _otherwise(case: Case, best: Choice) -> Iterator[str]:
    for change, slower, said in variants(case, best):
        yield f"  {change}: {said}" if slower is None else f"  {change}: {slower:+.1%}  {said}"


def _changes(case: Case, best: Choice) -> Iterator[str]:
    """The same search with more memory, another batch, faster or slower networks."""
    cluster = case.profile.cluster
    memory = case.limits.capacity_bytes(cluster)

    def network(factor: float) -> dict[str, Any]:
        changed = cluster.with_network(factor)
        return {"profile": msgspec.structs.replace(case.profile, cluster=changed)}

    asked: dict[str, dict[str, Any]] = {
        "twice the memory": {"memory_bytes": 2 * memory},
        "half the memory": {"memory_bytes": memory // 2},
        "twice the batch": {"num_rows": 2 * case.num_rows},
    }
    if case.profile.assumed and len(cluster.nodes) > 1:
        asked |= {"a network twice as fast": network(2.0), "a network half as fast": network(0.5)}
    for name, change in asked.items():
        try:
            found = case.best(**change).best
        except SearchError:
            yield f"  {name}: nothing would fit"
            continue
        same = short(found.plan) == short(best.plan)
        yield f"  {name}: {'the same plan' if same else short(found.plan)}"

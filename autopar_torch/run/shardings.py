"""Solve what a plan leaves open, the sharding of every block on several devices, and check what it
says, against the rules."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher

import msgspec

from ..cluster import CPU_CORE, LOOPBACK
from ..errors import PlanError, ShardingError
from ..model import Block, ModelGraph
from ..plan import (
    Plan,
    Replica,
    Sharding,
    Stage,
    as_plan,
    check as check_devices,
    check_rows,
    fit,
)
from ..shard.allowed import check as check_sharding
from ..shard.layout import Forms, parse_forms, parts_of
from ..shard.price import Prices
from ..shard.solve import KindTable, Spatial, solve_chain, tabulate
from ..trace import Traced
from . import doors
from .world import World

log = logging.getLogger("autopar_torch")

# A user who pins tp wants parameters cut. In small models cutting does not pay in time alone: then
# the price of a kept byte is raised until enough is cut, or nothing more can be.
WORTHS = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5)
SLACK = 0.25
Stretch = tuple[int, int]  # blocks
Pins = dict[str, dict[tuple[int, ...], Forms]]  # parameter -> mesh -> form


def ordinary(num_axes: int, rows: int) -> Prices:
    """The prices for choosing shardings if nothing was measured.

    No message hides behind computing: the cores that compute also copy messages.
    """
    return Prices(CPU_CORE, (LOOPBACK,) * num_axes, 0.0, rows, hides=0.0)


def complete(plan: Plan, traced: Traced, rows: int, pins: Pins | None = None,
             priced: Mapping[tuple[int, ...], Prices] | None = None,
             spatial: Spatial = "free") -> Plan:
    """The plan with a sharding for every block on several devices; given ones are kept. `priced`:
    the prices on every mesh."""
    found = list(plan.shardings)  # each once
    replicas, known = [], dict[object, list[Stage]]()
    for replica in plan.replicas:
        key = _alike(replica)
        if key in known:
            pairs = zip(replica.stages, known[key], strict=True)
            replicas.append(msgspec.structs.replace(replica, stages=tuple(
                msgspec.structs.replace(own, shardings=like.shardings) for own, like in pairs)))
            continue
        stages = known[key] = list(replica.stages)
        for group in groups(replica):
            if len(group) == len(stages) and all(s.shardings is not None for s in stages):
                continue
            axes = stages[group[0]].axes
            own = (priced or {}).get(axes) or ordinary(len(axes), rows)
            solved = _solve(traced, [stages[s] for s in group], own, whole_values(
                traced.graph, replica, group), pins or {}, spatial)
            for sharding in solved:
                if sharding is not None and sharding not in found:
                    found.append(sharding)
            numbers = [-1 if s is None else found.index(s) for s in solved]
            start = (stages[group[0]].blocks or (0, 0))[0]
            for s in group:
                first, last = stages[s].blocks or (0, 0)
                if stages[s].shardings is None:
                    indices = tuple(numbers[first - start : last - start])
                    stages[s] = msgspec.structs.replace(stages[s], shardings=indices)
        replicas.append(msgspec.structs.replace(replica, stages=tuple(stages)))
    return msgspec.structs.replace(plan, replicas=tuple(replicas),
                                   shardings=tuple(found))


def _alike(replica: Replica) -> object:
    """Equal for replicas that differ in their devices only."""
    return replica.position_of, *((s.blocks, s.axes, s.shardings) for s in replica.stages)


def groups(replica: Replica) -> list[list[int]]:
    """Runs of stages with the same mesh: solved as one chain."""
    groups: list[list[int]] = []
    for s, stage in enumerate(replica.stages):
        if groups and replica.stages[groups[-1][-1]].axes == stage.axes:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def whole_values(graph: ModelGraph, replica: Replica, group: list[int]) -> frozenset[str]:
    """Values that other meshes read too, and what the model returns."""
    first = (replica.stages[group[0]].blocks or (0, 0))[0]
    last = (replica.stages[group[-1]].blocks or (0, 0))[1]
    return frozenset({*graph.outputs.values(), *graph.crossing(first), *graph.crossing(last)})


def _solve(traced: Traced, stages: Sequence[Stage], prices: Prices, whole: frozenset[str],
           pins: Pins, spatial: Spatial) -> Sequence[Sharding | None]:
    first, last = (stages[0].blocks or (0, 0))[0], (stages[-1].blocks or (0, 0))[1]
    mesh = stages[0].axes
    blocks = traced.graph.blocks[first:last]
    if all(parts == 1 for parts in mesh):
        return [None] * len(blocks)
    chosen: list[Sharding] = []
    slowest = min(link.bytes_per_s for link in prices.links)
    for worth in WORTHS:  # a kept byte is worth so often what it costs to move it once
        priced = prices._replace(memory_s_per_byte=worth / slowest)
        chosen = _solve_chain(traced, blocks, priced, mesh, whole, pins, spatial)
        if _shares(traced.graph, blocks, chosen) <= 1.0 / math.prod(mesh) + SLACK:
            break
    if not all(sharding.is_proven for sharding in chosen):
        log.info("sharding: the blocks are so entangled that the cheapest split on %s devices was "
                 "not proven; a cheap one was found by trial", "x".join(map(str, mesh)))
    return chosen


def _solve_chain(traced: Traced, blocks: Sequence[Block], priced: Prices, mesh: tuple[int, ...],
                 whole: frozenset[str], pins: Pins,
                 spatial: Spatial) -> list[Sharding]:
    graph = traced.graph
    tables: dict[tuple[str, str], KindTable] = {}
    chain = []
    for block in blocks:
        fixed = {slot: [pins[p][mesh]] for slot, p in block.params.items()
                 if mesh in pins.get(p, {})}
        key = (block.kind, " ".join(f"{slot}={forms[0].text}" for slot, forms in fixed.items()))
        if key not in tables:
            alike = [b for b in blocks if b.kind == block.kind]
            shared = frozenset(slot for b in alike for slot, p in b.params.items()
                               if len(graph.users(p)) > 1)
            tables[key] = tabulate(traced.programs[block.kind], mesh, priced, shared=shared,
                                   pinned=fixed, spatial=spatial)
        chain.append(tables[key])
    return solve_chain(blocks, chain, whole)


def _shares(graph: ModelGraph, blocks: Sequence[Block], chosen: Sequence[Sharding]) -> float:
    """Part of the parameters that one device holds."""
    held = full = 0.0
    for block, sharding in zip(blocks, chosen, strict=True):
        for slot, name in block.params.items():
            size = graph.params[name].num_elements
            full += size
            held += size / parts_of(sharding.mesh, parse_forms(sharding.forms[slot]).value)
    return held / full if full else 0.0


def again(plan: Plan, first: ModelGraph, traced: Traced, rows: int,
          unread: Collection[str]) -> Plan:
    """The plan for another trace of the same model: parameters lie as they do, ops follow. What the
    first did not read may be read, where every rank has it; what one stage writes, others miss."""
    new = traced.graph.params.keys() - first.params.keys()
    if any(len(replica.stages) > 1 for replica in plan.replicas):
        unread = {*unread} - traced.graph.written
    replicas = []
    for replica in plan.replicas:
        before = [stage.blocks or (0, 0) for stage in replica.stages]
        now = min((_by_names(first, traced.graph, before),
                   _by_params(first, traced.graph, before, unread)),
                  key=lambda found: len(_unheld(first, traced.graph, before, found)))
        new |= _unheld(first, traced.graph, before, now) - {*unread}
        replicas.append(msgspec.structs.replace(replica, stages=tuple(
            msgspec.structs.replace(stage, shardings=None, blocks=blocks)
            for stage, blocks in zip(replica.stages, now, strict=True))))
    if new:
        raise PlanError(
            f"this call uses {min(new)} where the first did not", where="parameters and buffers",
            fix="make the first call, or example_inputs=, with the modules in the modes (train, "
            "eval) and the branches that need it; or use replicas (tp=1, pp=1), which have all "
            "of the model")
    bare = msgspec.structs.replace(plan, shardings=(), replicas=tuple(replicas))
    check_rows(bare, traced.graph)
    return complete(bare, traced, rows, pins_of(plan, first, unread))


def _by_names(first: ModelGraph, now: ModelGraph, spans: Sequence[Stretch]) -> list[Stretch]:
    """Where blocks of the same names begin and end in another trace. Only one of them may have a
    block, as a dropout layer is none in evaluation."""
    before, after = ([block.name.split("~")[0] for block in graph.blocks] for graph in (first, now))
    pairs = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    same = {a + i: b + i for a, b, size in pairs for i in range(size)}
    found = [len(after)]
    for block in reversed(range(1, len(before))):
        found.append(same.get(block, found[-1]))
    borders = [0, *reversed(found)]
    return [(borders[start], borders[end]) for start, end in spans]


def _by_params(first: ModelGraph, now: ModelGraph, spans: Sequence[Stretch],
               unread: Collection[str]) -> list[Stretch]:
    """Each block in the first stage, from that of the block before on, that has its parameters."""
    held, ends, stage = [_read(first, *span) for span in spans], [0] * len(spans), 0
    for i, block in enumerate(now.blocks):
        mine = {*block.params.values()} - {*unread}
        stage = next((s for s in range(stage, len(spans)) if mine <= held[s]), stage)
        ends[stage:] = [i + 1] * (len(spans) - stage)
    return [*itertools.pairwise([0, *ends])]


def _unheld(first: ModelGraph, now: ModelGraph, before: Sequence[Stretch],
            spans: Sequence[Stretch]) -> set[str]:
    """What stages would read of another trace, and have not."""
    return {name for was, span in zip(before, spans, strict=True)
            for name in _read(now, *span) - _read(first, *was)}


def _read(graph: ModelGraph, start: int, end: int) -> set[str]:
    return {name for block in graph.blocks[start:end] for name in block.params.values()}


def pins_of(plan: Plan, graph: ModelGraph, unread: Collection[str]) -> Pins:
    """The forms that parameters have under a plan, for other traces of the same model."""
    pins: Pins = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            for name in unread:
                pins.setdefault(name, {})[stage.axes] = Forms.whole(len(stage.axes))
            first, _ = stage.blocks or (0, 0)
            for i, number in enumerate(stage.shardings or ()):
                if number >= 0:
                    for slot, name in graph.blocks[first + i].params.items():
                        form = parse_forms(plan.shardings[number].forms[slot])
                        pins.setdefault(name, {})[stage.axes] = form
    return pins


# --- whether a plan is right ----------------------------------------------------------------------


def agreed(world: World, given: Plan, traced: Traced, num_rows: int) -> Plan:
    """The plan with everything written down, the same on all ranks."""
    def completed() -> Plan:
        plan = fit(given, traced.graph)
        _check_compiled(plan, traced)
        plan = complete(plan, traced, max(1, num_rows // plan.num_micro_batches))
        check(plan, traced)
        return plan

    return world.told(world.jointly(completed), Plan)


def another(world: World, now: Plan, plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan to move to, or an error on every rank."""
    def read() -> Plan:
        given = as_plan(plan)
        check_devices(given, world.size)
        doors.refuse_other_numbers(now, given)
        return given

    return world.jointly(read)


def _check_compiled(plan: Plan, traced: Traced) -> None:
    kinds = traced.graph.kinds
    if unknown := sorted(set(plan.compiled) - set(kinds)):
        raise PlanError(f"no kinds of blocks are called {', '.join(unknown)}, only "
                        f"{', '.join(kinds)}", where="Plan.compiled",
                        fix="is it the plan of another model?")
    if changing := [kind for kind in plan.compiled if kinds[kind].mutates]:
        raise PlanError(f"{', '.join(changing)} changes buffers, so it cannot run compiled",
                        where="Plan.compiled", fix="leave it out")


def check(plan: Plan, traced: Traced) -> None:
    """Every sharding is one of its kind's, and neighbours agree on what they share."""
    used = {number for replica in plan.replicas for stage in replica.stages
            for number in stage.shardings or () if number >= 0}
    for number in sorted(used):
        check_sharding(traced.programs[plan.shardings[number].kind], plan.shardings[number])
    numbered = reversed(list(enumerate(plan.replicas)))
    distinct = {_alike(replica): (r, replica) for r, replica in numbered}
    for r, replica in distinct.values():
        held: dict[tuple[object, str], str] = {}  # of these devices, or in this group of stages
        for group in groups(replica):
            where = f"Plan.replicas[{r}].stages{group}.shardings"
            stages = [replica.stages[s] for s in group]
            plain = Forms.whole(len(stages[0].axes)).text
            held |= {(where, name): plain for name in whole_values(traced.graph, replica, group)}
            for stage in stages:
                for index in range(*(stage.blocks or (0, 0))):
                    block, own = traced.graph.blocks[index], plan.sharding(stage, index)
                    for slot, name in {**block.inputs, **block.outputs, **block.params}.items():
                        text = own.forms[slot] if own else plain
                        _same(held, (where, name), text, block.name, where)
                        if slot in block.params:
                            _same(held, (stage.devices, name), text, block.name, where)


def _same(held: dict[tuple[object, str], str], key: tuple[object, str], text: str, block: str,
          where: str) -> None:
    """A value lies one way for all of a group, a parameter on its devices too."""
    if (first := held.setdefault(key, text)) != text:
        raise ShardingError(
            f"{key[1]} lies as {text} in {block}, and as {first} for others that share it",
            where=where, fix="leave the shardings out to have them found",
        )

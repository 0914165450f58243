"""The prologue of a step: what every stage computes for itself from the batch.

Values without rows (rotary tables, the number of labels that count) are computed once, on the whole
batch, as are those whose rows depend on each other, and numbers that are drawn, which all ranks
draw alike; other values once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..shard.parts import rows_of
from ..shard.rows import at_batch
from ..shard.rules import is_mutable, is_random
from ..trace import Traced
from ..trace.call import Call


def split_names(traced: Traced, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(values to compute on the whole batch, values to compute per micro-batch)."""
    nodes = {node.name: node for node in traced.prologue.nodes}
    once = traced.rowless.union(traced.mixed)
    rowful = [n for n in names if n not in once]
    whole = {n for n in names if n in once} | {n.name for n in nodes.values() if is_random(n)}
    stack = [nodes[n] for n in rowful]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_given(node, traced):
            whole.add(node.name)
        else:
            stack.extend(node.all_input_nodes)
    return sorted(whole), rowful


def _is_given(node: fx.Node, traced: Traced) -> bool:
    """Whether it is taken from the whole batch instead of being computed again."""
    written = any(is_mutable(user) for user in node.users if user.op == "call_function")
    return is_random(node) or (
        node.op == "call_function" and node.name in traced.rowless and not written)


def program(traced: Traced, names: Sequence[str], given: Iterable[str], rows: int,
            device: torch.device, writes: bool = True) -> fx.GraphModule:
    """Prologue nodes as a module, with all that `writes`; `given` values become its inputs."""
    given_names, wanted = set(given), set(names)
    needed: set[fx.Node] = set()
    graph, env = fx.Graph(), {}
    for node in reversed(list(traced.prologue.nodes)):
        users = any(user in needed and user.name not in given_names for user in node.users)
        written = node.op == "call_function" and is_mutable(node)
        if node.name in wanted or users or (written and writes):
            needed.add(node)
    for node in traced.prologue.nodes:
        if node in needed and node.name in given_names:
            env[node] = graph.placeholder(node.name)
        elif node in needed:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].name = node.name
    graph.output(tuple(env[n] for n in traced.prologue.nodes if n.name in wanted))
    return fx.GraphModule(nn.Module(), at_batch(graph, rows, device), "Prologue")


class Prologue:
    """Runs the prologue of one traced call for the names that this rank needs."""

    def __init__(self, traced: Traced, names: Iterable[str], buffers: dict[str, Tensor],
                 device: torch.device) -> None:
        self.traced, self.buffers, self.device = traced, buffers, device
        self.whole, self.rowful = split_names(traced, dict.fromkeys(names))
        self.modules: dict[tuple[bool, int], tuple[fx.GraphModule, list[str], list[str]]] = {}
        self.order = [n.name for n in traced.prologue.nodes]
        self.inputs = [n for n, s in traced.sources.items() if s.kind == "input"]
        self.consts = {name: value.to(device) for name, value in traced.consts.items()}

    def _run(self, per_micro_batch: bool, rows: int, known: dict[str, Any]) -> dict[str, Any]:
        names = self.rowful if per_micro_batch else self.whole
        if not names:
            return {}
        key = (per_micro_batch, rows)
        if key not in self.modules:
            nodes = self.traced.prologue.nodes if per_micro_batch else ()
            given = {n.name for n in nodes if n.name in self.whole and _is_given(n, self.traced)}
            made = program(self.traced, names, given, rows, self.device)
            args = [node.name for node in made.graph.find_nodes(op="placeholder")]
            self.modules[key] = made, args, sorted(names, key=self.order.index)
        module, args, results = self.modules[key]
        with torch.no_grad():
            values = module(*(known[name] for name in args))
        return dict(zip(results, values, strict=True))

    def decided(self, call: Call, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        """The answers for this batch to what the trace was asked."""
        names = [name for name, _ in self.traced.decided]
        if not names:
            return ()
        known = self._sources(call, tensors)
        made = program(self.traced, names, (), call.num_rows, self.device, writes=False)
        places = [node.name for node in made.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            values = made(*(known[name] for name in places))
        by_name = dict(zip(sorted({*names}, key=self.order.index), values, strict=True))
        return tuple(bool(by_name[name]) for name in names)

    def _sources(self, call: Call, tensors: Sequence[Tensor]) -> dict[str, Any]:
        known: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for name, source in self.traced.sources.items():
            if source.kind == "buffer" and source.name in self.buffers:
                known[name] = self.buffers[source.name]
            elif source.kind == "const":
                known[name] = self.consts[source.name]
        return known

    def for_batch(self, call: Call, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Values without rows, from the whole batch."""
        return self._run(False, call.num_rows, self._sources(call, tensors))

    def for_rows(self, call: Call, tensors: Sequence[Tensor], whole: dict[str, Any], start: int,
                 end: int) -> dict[str, Any]:
        """Everything for one micro-batch."""
        known = {**self._sources(call, call.slice(tensors, start, end)), **whole}
        known |= {name: rows_of(whole[name], layout, start, end, call.num_rows)
                  for name, layout in self.traced.mixed.items() if name in whole}
        return {**known, **self._run(True, end - start, known)}

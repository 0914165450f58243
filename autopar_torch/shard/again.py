"""Values that backward computes again, instead of keeping them: which, and how.

All of a block, or a part: what frees the most bytes per second of computing again, until so much of
the time of forward would be spent again. A value is dropped where autograd packs it and made anew
when the first of its block is needed, from what is kept; so gradients are the same to the last bit.
Nothing that draws random numbers or exchanges runs twice, but where all of a block does.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..cluster import CPU_CORE, GPU
from ..plan import Recompute
from .by_rows import first_run
from .linear import least_delivered
from .price import Prices, op_seconds
from .rules import is_random


class Drop(NamedTuple):
    """One more value to drop: bytes freed so far, and seconds to make all dropped ones again."""

    name: str
    freed: float
    seconds: float


class Savings(NamedTuple):
    """What choosing looks at, by name of node: bytes that autograd keeps of it, and seconds; and
    what is there in any case."""

    saved: Mapping[str, float]
    seconds: Mapping[str, float]
    there: Collection[str]


def path(graph: fx.Graph, costs: Savings) -> list[Drop]:
    """Values in the order in which they are dropped, each that which frees the most bytes per
    second beside those before it: the Pareto set of bytes and seconds, as far as greed finds it."""
    nodes = {node.name: node for node in graph.nodes}
    names = [name for name in costs.saved if _more(nodes[name], {}, costs, {name}) is not None]
    left = [(-math.inf, name) for name in sorted(names)]  # less bytes per second, as last known
    found, gone, run = list[Drop](), set[str](), dict[fx.Node, None]()
    freed, spent = 0.0, 0.0
    while left:
        _, best = heapq.heappop(left)
        more = _more(nodes[best], run, costs, gone | {best}) or {}
        seconds = sum(costs.seconds.get(node.name, 0.0) for node in more)
        known = -costs.saved[best] / max(seconds, 1e-12)
        if left and known > left[0][0]:  # another may be better by now
            heapq.heappush(left, (known, best))
            continue
        freed, spent = freed + costs.saved[best], spent + seconds
        found.append(Drop(best, freed, spent))
        gone.add(best)
        run |= more
    return found


def within(steps: Sequence[Drop], seconds: float) -> Sequence[Drop]:
    """The longest beginning of a path that spends at most so many seconds."""
    return steps[: max((k + 1 for k, s in enumerate(steps) if s.seconds <= seconds), default=0)]


def _rerun(graph: fx.Graph, costs: Savings, dropped: Sequence[str]) -> list[fx.Node]:
    """What runs again to make some values from those that are kept."""
    gone, run = set(dropped), dict[fx.Node, None]()
    for node in graph.nodes:
        if node.name in gone:
            run |= _more(node, run, costs, gone) or {}
    return [node for node in graph.nodes if node in run]


def _more(node: fx.Node, run: Collection[fx.Node], costs: Savings,
          gone: Collection[str]) -> dict[fx.Node, None] | None:
    """What runs again besides `run` to make one more of the values that are gone, in an order that
    is the same on all ranks; None if not all of it may."""
    more, todo = dict[fx.Node, None](), [node]
    while todo:
        node = todo.pop()
        if node in run or node in more or _is_there(node, costs, gone):
            continue
        if node.op != "call_function" or node.kwargs.get("overwrite") or is_random(node):
            return None
        more[node] = None
        todo += node.all_input_nodes
    return more


def _is_there(node: fx.Node, costs: Savings, gone: Collection[str]) -> bool:
    return node.name not in gone and (
        node.op == "placeholder" or node.name in costs.there or node.name in costs.saved)


def is_retained() -> bool:
    """Whether the backward that runs retains its graph, so that another may follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


# --- running --------------------------------------------------------------------------------------


def run_again(program: fx.GraphModule, args: Sequence[Any], recompute: Recompute) -> Any:
    """Run a block so that backward computes values of it again."""
    if not recompute:
        return program(*args)
    if recompute is True:
        with first_run():
            return cast(Any, checkpoint)(program, *args, use_reentrant=False)
    flags = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    known, way = program.meta.setdefault("again", {}), (recompute, least_delivered(), flags)
    if way not in known:  # the first run keeps all
        look = PackReader(program)
        results = look.run(*args)
        known[way] = Dropping(look, recompute)
        return results
    return known[way](*args)


class Pack(NamedTuple):
    """A tensor that an op packs for its backward: whose memory it shows ("": of nothing that could
    be made again), and its shape."""

    owner: str
    shape: tuple[int, ...]


class PackReader(fx.Interpreter):
    """A run that notes what autograd packs in each node: its inputs, its result, or what is inside
    of it."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.program = program
        self.owners: dict[str, dict[int, str]] = {}  # of each memory that a node's result shows
        self.packs: dict[str, list[Pack]] = {}
        self.saved: dict[str, float] = {}
        self.dtypes: dict[str, torch.dtype] = {}  # of results that are one tensor

    def run_node(self, node: fx.Node) -> Any:
        packed: list[Tensor] = []

        def pack(value: Tensor) -> Tensor:
            packed.append(value)
            return value.detach()  # a result that is packed as it is would hold itself

        with saved_tensors_hooks(pack, _unpack):
            result = super().run_node(node)
        seen: dict[int, str] = {}
        for n in node.all_input_nodes:
            seen |= self.owners[n.name]
        self.owners[node.name] = {m: seen.get(m, node.name) for m in _memory(result)}
        seen |= self.owners[node.name]
        if isinstance(result, Tensor):
            self.dtypes[node.name] = result.dtype
        self.packs[node.name] = [self._pack(value, seen) for value in packed]
        return result

    def _pack(self, value: Tensor, seen: Mapping[int, str]) -> Pack:
        owner = next((seen[m] for m in _memory(value) if m in seen), "")
        if self.dtypes.get(owner) != value.dtype:
            owner = ""
        if owner:
            self.saved[owner] = float(value.untyped_storage().nbytes())
        return Pack(owner, tuple(value.shape))

    @property
    def costs(self) -> Savings:
        """Others keep parameters, inputs and results of the block."""
        graph = self.program.graph
        ends = [*graph.find_nodes(op="placeholder"),
                *graph.find_nodes(op="output")[0].all_input_nodes]
        others = {own for n in ends for own in (n.name, *self.owners[n.name].values())}
        return Savings({name: size for name, size in self.saved.items() if name not in others},
                     {n.name: _node_seconds(n) for n in graph.nodes if n.op != "output"}, others)


def _memory(value: Any) -> list[int]:
    """Of one tensor, or of several."""
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return [t.untyped_storage().data_ptr() for t in tensors
            if isinstance(t, Tensor) and t.numel()]


def _node_seconds(node: fx.Node) -> float:
    """By datasheet, of this rank's part; what was added in lowering takes nothing."""
    source, share, rows = node.meta.get("part", (None, 1, 1))
    base = GPU if torch.cuda.is_available() else CPU_CORE
    return op_seconds(source, Prices(base, rows=rows), share) if source is not None else 0.0


class Dropping:
    """A block that drops some values, and makes them again."""

    def __init__(self, look: PackReader, part: float) -> None:
        graph, costs = look.program.graph, look.costs
        steps = within(path(graph, costs), part * sum(costs.seconds.values()))
        self.dropped = [step.name for step in steps]
        self.packs = {name: packs for name, packs in look.packs.items()
                      if any(pack.owner in self.dropped for pack in packs)}
        run = _rerun(graph, costs, self.dropped)
        read = {n for node in run for n in node.all_input_nodes} - set(run)
        self.reads = [node for node in graph.nodes if node in read]
        self.again = self._again(look.program, run)
        self.marks = _Marks()
        self.program = self._marked(look.program)

    def _again(self, program: fx.GraphModule, run: Sequence[fx.Node]) -> fx.GraphModule:
        """Kept values -> dropped values."""
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in self.reads}
        for node in run:
            env[node] = graph.node_copy(node, env.__getitem__)
        named = {node.name: env[node] for node in run}
        graph.output(tuple(named[name] for name in self.dropped))
        return fx.GraphModule(program, graph, "Again")

    def _marked(self, program: fx.GraphModule) -> fx.GraphModule:
        """The program, with a mark before each op that packs what is dropped, and at what is read
        to make it again."""
        root, graph, env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
        root._modules |= program._modules
        root.add_module("again_marks", self.marks)
        for node in program.graph.nodes:
            if node.name in self.packs:
                graph.call_module("again_marks", (node.name,))
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.name in self.packs:
                graph.call_module("again_marks", ("",))
            if node in self.reads:
                graph.call_module("again_marks", (node.name, env[node]))
        return fx.GraphModule(root, graph, program._get_name())

    def __call__(self, *args: Any) -> Any:
        cell = _Cell(self)
        marks = self.marks
        marks.now, marks.count, marks.held = "", 0, {}

        def pack(value: Tensor) -> Tensor | _Box:
            packs, k = self.packs.get(marks.now, ()), marks.count
            marks.count += 1
            fits = k < len(packs) and packs[k].shape == tuple(value.shape)
            if not fits or packs[k].owner not in self.dropped:
                return value.detach()
            return cell.box(packs[k].owner, value)

        with saved_tensors_hooks(pack, _unpack):
            results = self.program(*args)
        cell.held, marks.held = marks.held, {}
        return results


class _Marks(nn.Module):
    """Where a run is, and what it holds to make values again."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.count = "", 0
        self.held: dict[str, Any] = {}

    def forward(self, name: str, value: Any = None) -> None:
        if value is None:
            self.now, self.count = name, 0
        else:
            self.held[name] = value.detach() if isinstance(value, Tensor) else value


class _Cell:
    """One run: what it holds, and from the first need on the values made again."""

    def __init__(self, own: Dropping) -> None:
        self.own = own
        self.held: dict[str, Any] = {}
        self.uses = Counter[str]()  # of each dropped value
        self.left = Counter[str]()
        self.values: dict[str, Tensor] = {}

    def box(self, name: str, value: Tensor) -> _Box:
        self.uses[name] += 1
        return _Box(self, name, value.size(), value.stride(), int(value.storage_offset()))

    @torch.no_grad()
    def take(self, name: str) -> Tensor:
        if name not in self.values:
            with saved_tensors_hooks(_same, _same):
                made = self.own.again(*[self.held[node.name] for node in self.own.reads])
            self.values = dict(zip(self.own.dropped, made, strict=True))
            self.left = self.uses.copy()
            if not is_retained():
                self.held.clear()
        self.left[name] -= 1
        return self.values[name] if self.left[name] else self.values.pop(name)


class _Box(NamedTuple):
    """In the place of a dropped tensor."""

    cell: _Cell
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Any) -> Tensor:
    if not isinstance(packed, _Box):
        return cast(Tensor, packed)
    return packed.cell.take(packed.name).as_strided(packed.size, packed.stride, packed.offset)


def _same(value: Tensor) -> Tensor:
    return value.detach()

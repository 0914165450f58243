"""Whether a block may run on a part of the batch, where rules cannot say: it is tried.

Experts sort their tokens: rows mix inside and are independent outside. What lies between the first
and the last op that couples rows runs on few rows together and apart, on made-up values in float64.
Outputs with rows have to be those of the parts, one after the other; outputs without have to be
their sum, and so have gradients. Large sizes are shrunk alike in the whole region.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..model import ROWS, TensorInfo
from ..shard.layout import PARTIAL, WHOLE, Layout, Split, Strategy
from ..shard.parts import join
from ..shard.rows import rows_dim
from ..shard.rules import ShapedOp, flops, is_mutable, is_random, op_name
from ..shard.strategies import strategies
from . import apart, shares, together, values
from .blocks import TracedBlock, Traits, carried, signature, traits
from .clean import each_info, has_rows, info_of
from .together import between, copied, leaving

log = logging.getLogger("autopar_torch")
# Limit of differences; what a gradient of zero may come out as, of the largest. Some ops have no
# float64.
TYPES = (torch.float64, 1e-6, 1e-11), (torch.float32, 1e-4, 1e-5)
ROUGH = 0.1
MOST_FLOPS, MOST_ELEMENTS = 5e7, 1 << 23  # of a row, and of all rows
ERRORS = (AssertionError, RuntimeError, ValueError, IndexError, TypeError)


class Surroundings(NamedTuple):
    """What makes the values of a batch that blocks read."""

    prologue: dict[str, fx.Node]
    rowless: frozenset[str]
    consts: Mapping[str, Tensor]  # by the name of a placeholder of the prologue
    num_rows: str  # the node that counts the rows of the global batch
    local: bool  # what looks at the whole batch may look at the rows of a part
    shared: bool  # there are rows, so the batch may be shared out
    least_rows: int  # that have to be tried
    answers: dict[str, str]  # why rows depend on each other, by the text of what was tried


@dataclass
class _Region:
    """The nodes that are tried, as a graph of their own."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    leaving: list[str] = field(default_factory=list)
    sums: set[str] = field(default_factory=set)  # inputs that are sums over the rows
    learns: set[str] = field(default_factory=set)  # inputs that get gradients
    fixed: set[str] = field(default_factory=set)  # made once, for the whole batch
    consts: dict[str, Tensor] = field(default_factory=dict)
    outer: dict[str, int] = field(default_factory=dict)  # inputs with all rows in several parts
    num_rows: int = apart.FEW_ROWS

    def cuts(self) -> Iterator[tuple[list[int], list[int]]]:
        """The rows of two parts."""
        rows = list(range(self.num_rows))
        half = len(rows) // 2
        yield from ((rows[:half], rows[half:]), (rows[:1], rows[1:]), (rows[:0:-2], rows[::2]))


def tested_traits(piece: TracedBlock, given: Collection[tuple[str, Layout]],
                  around: Surroundings) -> tuple[Traits, fx.Graph]:
    """The traits of a block and its graph, in which replicas may do together what couples rows, if
    a test does not find that it couples none."""
    before = replace(piece, graph=copied(piece.graph))
    found = _traits(piece, given, around, joins=False)
    if drawn := around.shared and [*filter(_is_drawn_for_all, piece.graph.nodes)]:
        return found._replace(coupled=(*found.coupled, *drawn), why=f"{op_name(drawn[0])} draws "
                              "numbers that all rows share"), piece.graph
    if found.why:
        joined = _traits(before, given, around, joins=True)
        if not joined.why:
            return joined, before.graph
    return found, piece.graph


def _is_drawn_for_all(node: fx.Node) -> bool:
    return node.op == "call_function" and is_random(node) and not has_rows(info_of(node))


def _traits(piece: TracedBlock, given: Collection[tuple[str, Layout]], around: Surroundings,
            joins: bool) -> Traits:
    """If rules say that a block couples rows, a test has the last word; batch statistics need none.
    Where it finds that so it is, replicas do it together, if it `joins` and they can."""
    known: dict[fx.Node, Layout] = {}
    settled: list[fx.Node] = []
    loose: list[fx.Node] = []
    joined: list[fx.Node] = []
    inside: set[fx.Node] = set()  # tried as a part of more, and to be left as it was tried
    carries, options = carried(piece.graph, given), dict[fx.Node, list[Strategy]]()
    while True:  # the first coupled op changes what is known of those after it
        if len(options) != sum(n.op == "call_function" for n in piece.graph.nodes):
            options = strategies(piece.graph, carries)  # scaling puts new ops in
        found = traits(piece.graph, carries, known, options)
        left = [n for n in found.coupled if op_name(n) != "batch_norm"
                or found.flow.get(n.all_input_nodes[0]) == PARTIAL]
        if not left:
            break
        if left[0] in inside:
            known[left[0]] = _lies(left[0])
            continue
        if shares.added_once(piece, left[0], found.flow, known, around.num_rows):
            continue
        groups = [left[:k] for k in range(1, len(left) + 1)]
        why = ""
        for group in [*groups, *([settled + left] if settled else [])]:
            if not (why := refusal(piece, group, found.flow, around)):
                settled += group
                tried = between(piece.graph, group)
                known |= {node: _lies(node) for node in (*group, *leaving(tried))}
                inside |= tried
                break
        if why and around.local and not _moves(piece.graph):
            shares.local(piece, left[0], found.flow, known, around.num_rows)
            loose.append(left[0])
        elif why:
            log.debug("%s: %s", piece.name, why)
            more = together.join(piece, left[0], found.flow, known) if joins else []
            if not more:
                return found._replace(why=why)
            joined, settled = ([n for n in some if not n._erased]
                               for some in ([*joined, *more], settled))
            options = {}
    if loose or joined:
        shares.leaving(piece, loose + joined, found.flow, known, around.num_rows)
        carries = carried(piece.graph, given)
        found = traits(piece.graph, carries, known, strategies(piece.graph, carries))
    return found._replace(local=tuple(dict.fromkeys(map(op_name, loose))),
                          joined=tuple(dict.fromkeys(map(op_name, joined))),
                          tested=tuple(dict.fromkeys(map(op_name, settled))))


def _lies(node: fx.Node) -> Layout:
    """Where the rows of what was tried are; it is a sum over them if it has none."""
    at = rows_dim(ShapedOp(node).out)
    return PARTIAL if at == WHOLE else at


def refusal(piece: TracedBlock, coupled: Sequence[fx.Node], flow: Mapping[fx.Node, Layout],
            around: Surroundings) -> str:
    """Why the rows of a block depend on each other; nothing if they do not."""
    inside = between(piece.graph, coupled)
    region = _region(piece, inside, flow, around)
    for node in region.graph.nodes:
        if node.op == "call_function" and is_mutable(node):
            return f"{op_name(node)} changes a value"
        if node.name not in region.fixed and is_random(node) and not _chance(node):
            return f"{op_name(node)} draws at random"
    key = _text(region)
    if key not in around.answers:
        around.answers[key] = _answer(region, piece.name, around.least_rows)
    return around.answers[key]


def _text(region: _Region) -> str:
    """Equal for regions that are tried alike: loops that were unrolled have many."""
    number = {node.name: k for k, node in enumerate(region.graph.nodes)}
    sets = [sorted(number[name] for name in names)
            for names in (region.leaving, region.sums, region.learns, region.fixed)]
    consts = sorted((number[name], id(value)) for name, value in region.consts.items())
    outer = sorted((number[name], count) for name, count in region.outer.items())
    return f"{signature(region.graph)} {sets} {consts} {outer}"


def _answer(region: _Region, name: str, least_rows: int) -> str:
    try:
        region.num_rows = apart.enough_rows(region.graph, region.consts, least_rows)
    except ValueError as error:
        return str(error)
    small = next(_small(region.graph, region.num_rows), None)
    if small is None:
        return "it is too large to be tried"
    region.graph = small
    said = "it does not run on made-up values"
    for dtype, limit, noise in TYPES:
        learnt = 0
        for seed, change in enumerate((*values.EACH, *apart.thresholds(small))):
            if learnt and change in values.PARTICULAR:
                continue
            try:
                said = _tried(region, dtype, (limit, noise), seed, change)
            except ERRORS as error:
                log.debug("%s does not run in %s: %s", name, dtype, error)
                continue
            if said:
                return said
            learnt += change in values.ORDINARY
        if learnt:
            return ""
    return said or "all that was tried is not finite"


# --- the region -----------------------------------------------------------------------------------


def _region(piece: TracedBlock, inside: set[fx.Node], flow: Mapping[fx.Node, Layout],
            around: Surroundings) -> _Region:
    """Indices and masks are run from what makes them: made-up ones would be out of range."""
    run, given, stack = set(inside), dict[fx.Node, None](), list(inside)
    source = {p: around.prologue[piece.context[str(p.target)]]
              for p in piece.graph.find_nodes(op="placeholder") if str(p.target) in piece.context}
    while stack:
        for arg in stack.pop().all_input_nodes:
            arg = source.get(arg, arg)
            if arg.op == "call_function" and (not arg.all_input_nodes or not _is_float(arg)):
                stack += [] if arg in run else [arg]
                run.add(arg)
            else:
                given[arg] = None
    region, made = _Region(), dict[fx.Node, fx.Node]()
    ours = set(around.prologue.values())
    for node in (n for n in given if n not in run):
        made[node] = region.graph.placeholder(f"g{len(made)}")
        made[node].meta = {"info": info_of(node)}
        name = made[node].name
        if node.name in around.consts and node in ours:
            region.consts[name] = around.consts[node.name]
        if node not in ours and info_of(node).is_float:
            region.learns.add(name)
        lies = node.meta.get("rows") if node in ours else flow.get(node)
        region.sums |= {name} if lies == PARTIAL else set()
        if isinstance(lies, Split) and lies.outer != 1:
            region.outer[name] = lies.outer
    made |= {place: made[node] for place, node in source.items() if node in made}
    for node in (n for n in (*around.prologue.values(), *piece.graph.nodes) if n in run):
        made[node] = region.graph.node_copy(node, lambda n: made[source.get(n, n)])
        made[node].meta = {"info": info_of(node)}
        if node in ours and (node.name in around.rowless or is_random(node)):
            region.fixed.add(made[node].name)
    region.leaving = [made[n].name for n in leaving(inside)]
    return region


def _is_float(node: fx.Node) -> bool:
    info = info_of(node)
    return isinstance(info, TensorInfo) and info.dtype.startswith(("float", "bfloat", "complex"))


# --- shrunk ---------------------------------------------------------------------------------------


def _small(graph: fx.Graph, num_rows: int) -> Iterator[fx.Graph]:
    """The graph if it is small, else with sizes divided: all multiples of a number alike."""
    units = [1 << k for k in range(12, 1, -1)]
    ways = [(1, 1), *((step, unit) for step in units[::-1] for unit in units if unit >= 2 * step)]
    for step, unit in ways:
        made = _shrunk(graph, unit, step)
        size = sum(torch.Size(i.at(num_rows)).numel()
                   for n in made.nodes for i in each_info(info_of(n)))
        work = sum(flops(n) for n in made.nodes if n.op == "call_function") / ROWS
        if work <= MOST_FLOPS and size <= MOST_ELEMENTS and (
                step == 1 or _fits(made, num_rows)):
            yield made


def _chance(node: fx.Node) -> list[int]:
    """Where the chance of a dropout stands among the arguments of an op."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema and is_random(node) else []
    return [i for i, name in enumerate(names) if name in ("p", "dropout", "dropout_p")]


def _shrunk(graph: fx.Graph, unit: int, step: int) -> fx.Graph:
    def less(value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or step == 1:
            return value
        last = int((value + 1) % unit == 0)  # the last of so many, as a bound
        return (value + last) // step - last if (value + last) % unit == 0 else value

    def smaller(info: Any) -> Any:
        if isinstance(info, tuple):
            return tuple(map(smaller, info))
        return info and TensorInfo(tuple(map(less, info.shape)), info.dtype, info.grad)

    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        own = env[node] = made.node_copy(node, env.__getitem__)
        own.name = node.name
        own.args, own.kwargs = fx.node.map_aggregate((own.args, own.kwargs), less)  # type: ignore
        for place in _chance(own):
            if len(own.args) > place:
                own.update_arg(place, 0.0)
        own.meta = {"info": smaller(info_of(node))}
    return made


def _fits(graph: fx.Graph, num_rows: int) -> bool:
    """Whether every value has the shape that its shrunk description says."""
    empty = {n.name: torch.empty(info_of(n).at(num_rows), device="meta",
                                 dtype=getattr(torch, info_of(n).dtype))
             for n in graph.find_nodes(op="placeholder")}
    names = {n.name for n in graph.nodes}
    try:
        with torch.no_grad():
            found = apart.run(graph, empty, num_rows, names, torch.device("meta"))
    except ERRORS as error:
        log.debug("not shrunk so: %s", error)
        return False
    return all(tuple(value.shape) == info_of(n).at(num_rows) for n in graph.nodes
               if isinstance(value := found[n.name], Tensor))


# --- together and apart ---------------------------------------------------------------------------


def _tried(region: _Region, dtype: torch.dtype, limits: tuple[float, float], seed: int,
           change: Any) -> str:
    """What of the whole is not that of the parts; an error if the whole does not run."""
    draw, graph = torch.Generator("cpu").manual_seed(seed), _as_type(region.graph, dtype)
    infos = {n.name: info_of(n) for n in graph.nodes}
    given = {n.name: apart.made_up(info_of(n), region.consts.get(n.name), draw, region.num_rows)
             for n in graph.find_nodes(op="placeholder")}
    sums = region.sums if change is values.tiny else ()
    given = {n: change(v) if has_rows(infos[n]) or n in sums else v
             for n, v in given.items()}
    whole = _RegionRun(region, graph, given, region.num_rows, {})
    cots = {n: torch.randn(v.shape, generator=draw, dtype=torch.float64, device="cpu").to(v.dtype)
            for n, v in whole.outs.items()}
    whole.differentiate(cots)
    if not all(v.isfinite().all() for v in (*whole.outs.values(), *whole.grads.values())):
        raise ValueError("the whole is not finite")
    largest = max((float(v.abs().max()) for v in whole.grads.values() if v.numel()), default=0.0)
    limit, noise = limits[0], limits[1] * largest
    if change is values.tiny:  # a constant that counts twice is seen, and rounding is not
        limit, whole.grads = ROUGH, {}
    for cut in region.cuts():
        parts = []
        addends = {n: _in_two(given[n], draw) for n in region.sums}
        for k, rows in enumerate(cut):
            own = {n: addends[n][k] if n in addends else apart.rows_of(
                v, infos[n], rows, region.outer.get(n, 1)) for n, v in given.items()}
            try:
                part = _RegionRun(region, graph, own, len(rows), {
                    n: apart.rows_of(v, infos[n], rows) for n, v in whole.fixed.items()})
                part.differentiate({n: apart.rows_of(v, infos[n], rows) for n, v in cots.items()})
            except ERRORS as error:
                return f"{len(rows)} row(s) alone do not run ({str(error).splitlines()[0]})"
            parts.append(part)
        order = [row for rows in cut for row in rows]
        for what in ("outs", "grads"):
            for n, want in getattr(whole, what).items():
                found = [getattr(part, what)[n] for part in parts]
                outer = region.outer.get(n, 1)
                if not _joined(apart.rows_of(want, infos[n], order, outer), found,
                               infos[n].rows_dim, outer, n in region.sums, limit,
                               noise if what == "grads" else 0.0):
                    return f"{'values' if what == 'outs' else 'gradients'} of parts do not join"
    return ""


def _in_two(whole: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two addends, of no common factor: a norm is the sum of those of `0.3 * x` and `0.7 * x`."""
    shares = torch.randn(whole.shape, generator=draw, dtype=torch.float64, device="cpu") + 0.5
    first = (whole * shares).to(whole.dtype)
    return first, whole - first


class _RegionRun:
    """One run of the region: its outputs, and gradients of its inputs."""

    def __init__(self, region: _Region, graph: fx.Graph, given: apart.ByName, rows: int,
                 fixed: apart.ByName) -> None:
        self.leaves = {n: given[n].detach().clone().requires_grad_() for n in region.learns}
        found = apart.run(graph, {**given, **self.leaves, **fixed}, rows,
                          {*region.leaving, *region.fixed})
        self.fixed = {n: found[n] for n in region.fixed}
        self.outs: dict[str, Tensor] = {n: found[n] for n in region.leaving}
        self.grads: dict[str, Tensor] = {}

    def differentiate(self, cots: Mapping[str, Tensor]) -> None:
        ends = [n for n, v in self.outs.items() if v.requires_grad and v.is_floating_point()]
        found: Sequence[Tensor | None] = (None,) * len(self.leaves)
        if ends and self.leaves:
            found = torch.autograd.grad([self.outs[n] for n in ends], list(self.leaves.values()),
                                        [cots[n] for n in ends], allow_unused=True)
        self.grads = {n: torch.zeros_like(leaf) if grad is None else grad
                      for (n, leaf), grad in zip(self.leaves.items(), found, strict=True)}
        self.outs = {n: v.detach() for n, v in self.outs.items()}


def _as_type(graph: fx.Graph, dtype: torch.dtype) -> fx.Graph:
    """The graph with one type for all floats."""
    def typed(value: Any) -> Any:
        wide = isinstance(value, torch.dtype) and value.is_floating_point
        return dtype if wide else value

    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        own = env[node] = made.node_copy(node, env.__getitem__)
        own.name = node.name
        own.args, own.kwargs = fx.node.map_aggregate((own.args, own.kwargs), typed)  # type: ignore
        info = info_of(node)
        if own.op == "call_function" and not own.all_input_nodes and _is_float(node):
            own.update_kwarg("dtype", dtype)
        if isinstance(info, TensorInfo) and _is_float(node) and "complex" not in info.dtype:
            info = TensorInfo(info.shape, str(dtype).removeprefix("torch."), info.grad)
        own.meta = {"info": info}
    return made


def _joined(whole: Tensor, parts: Sequence[Tensor], dim: int | None, outer: int, same: bool,
            limit: float, noise: float) -> bool:
    """Parts with rows follow each other; others are summed, or the same for all."""
    shapes = [[*p.shape[:dim], *p.shape[dim + 1:]] if dim is not None else [*p.shape]
              for p in (whole, *parts)]
    if any(shape != shapes[0] for shape in shapes):
        return False
    rounds = [join(parts, Split(dim, outer))] if dim is not None else [
        *parts] if same else [torch.stack(list(parts)).sum(0)]
    if whole.dtype == torch.bool:
        return all(torch.equal(whole, one) for one in rounds)
    size = whole.double().abs().max() if whole.numel() else 0.0
    return all(one.shape == whole.shape and bool(((one.double() - whole.double()).abs()
               <= limit * (size + 1e-30) + noise).all()) for one in rounds)


def _moves(graph: fx.Graph) -> bool:
    """Whether something but batch norm writes to a buffer: parts would make different ones."""
    return any(is_mutable(node) and op_name(node) != "batch_norm" for node in graph.nodes)

"""Whether the prologue mixes rows: it runs on all rows of a small batch, and on its parts.

Everything that depends on no parameter is computed by every stage from its own rows. Masks and
indices are made with ops that no rule knows, so nothing is guessed: values with rows have to be
the joined values of the parts, or they are made of the whole batch, as values without rows are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..model import ROWS, TensorInfo, at_rows
from ..shard.layout import WHOLE, Layout, Split
from ..shard.parts import join
from ..shard.rows import at_batch
from ..shard.rules import is_mutable, is_random, op_name
from . import values
from .blocks import TracedBlock
from .capture import InputSource
from .clean import each_info, has_rows, info_of, largest
from .picks import Picked
from .row_numbers import counts_rows, picks_rows, written
from .together import is_tangled

log = logging.getLogger("autopar_torch")
CPU = torch.device("cpu")
FEW_ROWS, MOST_ROWS, MOST_ELEMENTS, SEEDS, FEW_CONSTS = 4, 2000, 1 << 24, range(3), 64
_PICKS = {"index", "index_put", "index_put_", "_unsafe_index"}  # rows by their numbers
_PICKS_ALONG = {"index_select", "index_add", "index_add_", "index_copy", "gather", "scatter",
                "scatter_add", "scatter_add_"}
_COMPARED, MOST_NUMBERS = {"gt", "ge", "lt", "le", "eq", "ne"}, 8
ByName = dict[str, Any]
Ran = tuple[TracedBlock, fx.Graph]  # a block, and what of it is run


def mixing(prologue: fx.Graph, rowless: frozenset[str], blocks: Sequence[Ran],
           outputs: Iterable[str], sources: Mapping[str, InputSource],
           consts: Mapping[str, Tensor], least_rows: int) -> frozenset[str]:
    """What blocks read or the model returns of the prologue, and rows of which depend on others."""
    nodes = {node.name: node for node in prologue.nodes}
    leaving = {name for piece, _ in blocks for name in piece.context.values()} | set(outputs)
    asked = [n for n in map(nodes.get, sorted(leaving)) if n is not None and n.name not in rowless
             and n.op != "placeholder" and not _only_picks(n, blocks)]
    drawn = {n.name for n in prologue.nodes if is_random(n)}  # parts take of the numbers of all
    once, found = rowless | drawn, [drawn - rowless]
    asked = [n for n in asked if n.name not in once]
    if not any(map(_is_suspect, _upstream(asked, once))):
        return frozenset().union(*found)
    # Few rows may hide it: of pairs that are counted, say, and numbers that are at least one.
    found.append({n.name for n in asked if any(map(is_tangled, _upstream([n], once)))})
    try:
        with torch.no_grad():
            graph = _without_others(prologue, asked)
            own = [n for n in graph.nodes if n.name in {node.name for node in asked}]
            steps = {n.name: _step(n, blocks) for n in own}
            known = {n.name: value for n in graph.find_nodes(op="placeholder")
                     if (value := consts.get(sources[n.name].name)) is not None}
            num_rows = enough_rows(graph, known, least_rows)
            if num_rows > FEW_ROWS and any(
                    largest(n, num_rows) > MOST_ELEMENTS for n in graph.nodes):
                raise ValueError(f"{num_rows} rows are too large to be tried")
            splits = (1, num_rows - 1), (num_rows // 2, num_rows - num_rows // 2)
            places = {n.name: n for n in graph.find_nodes(op="placeholder")}
            for seed, cut in itertools.product(SEEDS, splits):  # few numbers may be alike by chance
                draw = torch.Generator("cpu").manual_seed(seed)
                given = {n.name: made_up(info_of(n), known.get(n.name), draw, num_rows)
                         for n in graph.find_nodes(op="placeholder")}
                found.append(_apart(graph, own, once, given, cut, steps))
                for change in (thresholds(graph) if seed == SEEDS[0] else ()):
                    changed = {name: change(v) if has_rows(info_of(places[name])) else v
                               for name, v in given.items()}
                    with contextlib.suppress(RuntimeError, ValueError, IndexError):
                        found.append(_apart(graph, own, once, changed, cut, steps))
    except (RuntimeError, ValueError, IndexError) as error:
        log.debug("the prologue does not run on made-up rows: %s", error)
        found.append({n.name for n in asked if any(map(_is_suspect, _upstream([n], once)))})
    return frozenset().union(*found)


def thresholds(graph: fx.Graph) -> list[values.Remade]:
    """Values around what others are compared with, of which few that are made up would be."""
    inner = [node.target.graph for node in graph.nodes if isinstance(node.target, Picked)]
    numbers = dict.fromkeys(
        node.args[1] for own in (graph, *inner) for node in own.nodes
        if op_name(node) in _COMPARED and type(node.args[-1]) in (int, float) and node.args[-1])
    return [change for number in [*numbers][:MOST_NUMBERS]
            for change in values.around(cast(float, number))]


def enough_rows(graph: fx.Graph, consts: Mapping[str, Tensor], least: int) -> int:
    """So many that the numbers of rows which are written in it, as in `x[4:]`, are among theirs."""
    numbered, found = set[fx.Node](), list[float]()
    known = {n: float(value.detach().double().abs().max()) for n in graph.nodes
             if (value := consts.get(n.name)) is not None
             and 0 < value.numel() <= FEW_CONSTS and not value.is_complex()}
    for node in graph.nodes:
        given = [known[arg] for arg in node.all_input_nodes if arg in known]
        if counts_rows(node) or not numbered.isdisjoint(node.all_input_nodes):
            numbered.add(node)
            found += given
        elif given and len(node.all_input_nodes) == 1:
            known[node] = given[0]  # a copy, or another type or shape
    found += [abs(number) for node, _, number, is_value in written(graph)
              if (is_value and node in numbered) or picks_rows(node)]
    most = max([least / 2, *(number for number in found if number < ROWS // 2)])
    if most > MOST_ROWS:
        raise ValueError(f"{most:g} rows are too many to be tried")
    return max(FEW_ROWS, 2 * math.ceil(most) + 2 if most > 1 else 0)


def _upstream(asked: Iterable[fx.Node], once: Collection[str]) -> list[fx.Node]:
    """What is computed per part: up to what comes from the whole batch."""
    seen: dict[fx.Node, None] = {}
    stack = list(asked)
    while stack:
        node = stack.pop()
        if node not in seen and node.op == "call_function" and node.name not in once:
            seen[node] = None
            stack += node.all_input_nodes
    return list(seen)


def _is_suspect(node: fx.Node) -> bool:
    """Whether an op has to be tested: pointwise ops on equal shapes keep rows apart."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise not in tags and op_name(node) not in ("to", "detach", "clone")


def _only_picks(node: fx.Node, blocks: Sequence[Ran]) -> bool:
    """Whether a value only picks rows by number (`x[arange(rows), last]`): right for parts, too."""
    return _are_numbers(node) and all(picks := [*_picks(node.name, blocks)]) and bool(picks)


def picks_too(prologue: fx.Graph, mixed: Collection[str],
              blocks: Sequence[Ran]) -> tuple[str, ...]:
    """Numbers of rows that are to be those of the whole batch, and that pick rows of a part."""
    return tuple(n.name for n in prologue.nodes
                 if n.name in mixed and _are_numbers(n) and any(_picks(n.name, blocks)))


def count_alone(graph: fx.Graph) -> None:
    """An op that picks rows by number counts them for itself: those of a part, where another reader
    needs those of the whole batch."""
    for node in graph.nodes:
        for value in node.all_input_nodes if op_name(node) in _PICKS | _PICKS_ALONG else ():
            if op_name(value) == "arange" and len(value.users) > 1:
                with graph.inserting_before(value):
                    own = graph.node_copy(value)
                own.meta = dict(value.meta)
                node.replace_input_with(value, own)


def _are_numbers(node: fx.Node) -> bool:
    """Whether a value is whole numbers that are made of nothing else: of rows, or of where they
    begin."""
    made = _upstream([node], frozenset())
    given = {arg for n in made for arg in n.all_input_nodes if arg.op == "placeholder"}
    return has_rows(info_of(node)) and all(map(_is_whole, made)) and not any(
        has_rows(info_of(arg)) for arg in given) and not any(map(is_random, made))


def _is_whole(node: fx.Node) -> bool:
    return all(info.dtype.startswith("int") for info in each_info(info_of(node)))


def _picks(name: str, blocks: Sequence[Ran]) -> Iterator[int]:
    """Of each op that reads a value, a view of it, or what is counted on from it: of how many for
    each row of the batch it takes some by these numbers, or by where they begin; 0 if it does not.
    """
    values = [place for piece, graph in blocks for slot, own in piece.context.items()
              if own == name for place in graph.find_nodes(op="placeholder", target=slot)]
    for value in values:  # grows
        for user in value.users:
            if picks := _picks_by(user, value):
                yield picks
            elif user.op == "call_function" and _is_whole(user):
                values.append(user)
            else:
                yield 0


def _picks_by(user: fx.Node, value: fx.Node) -> int:
    """The same of one op."""
    if op_name(user) == "embedding_bag":
        return int(value in user.args[2:3])
    data, dims = cast(fx.Node, user.args[0]), list[Any]()
    if op_name(user) in _PICKS:
        dims = [dim for dim, index in enumerate(cast(Any, user.args[1])) if index is value]
    elif op_name(user) in _PICKS_ALONG and value in user.args[2:3]:
        dims = [cast(int, user.args[1]) % len(info_of(data).shape)]
    if not dims or dims != [info_of(data).rows_dim]:
        return 0
    return at_rows(info_of(data).shape[dims[0]], 1)


def _step(node: fx.Node, blocks: Sequence[Ran]) -> int:
    """By how much the numbers of a part are lower for each row before it, where all that reads them
    takes rows of the part by them."""
    picks = [*_picks(node.name, blocks)] if _is_whole(node) and has_rows(info_of(node)) else []
    return picks[0] if len(set(picks)) == 1 else 0


def made_up(info: TensorInfo, known: Tensor | None, generator: torch.Generator,
            num_rows: int) -> Tensor:
    """Random values of the right shape; numbers of tokens, labels and masks are 0 or 1."""
    shape, dtype = info.at(num_rows), getattr(torch, info.dtype)
    if known is not None:
        return known.detach().to("cpu", dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(dtype)


def _without_others(prologue: fx.Graph, asked: Sequence[fx.Node]) -> fx.Graph:
    """The graph of the asked values and of what they read, without the unused placeholders."""
    read = set(asked)
    for node in reversed(prologue.nodes):
        writes = is_mutable(node) and bool(read & set(node.all_input_nodes))
        if node in read or writes:
            read |= {node, *node.all_input_nodes}
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (node for node in prologue.nodes if node in read):
        made[node] = graph.node_copy(node, made.__getitem__)
    return graph


def run(graph: fx.Graph, given: ByName, rows: int, wanted: Collection[str],
        device: torch.device = CPU) -> ByName:
    """Some values of a graph. Masks of long sequences are large: each is freed once used."""
    real = at_batch(graph, rows, device)
    names = {own: node.name for node, own in zip(graph.nodes, real.nodes, strict=True)}
    last = {arg: own for own in real.nodes for arg in own.all_input_nodes}
    made: dict[fx.Node, Any] = {}
    for own in real.nodes:
        if names[own] in given:
            made[own] = given[names[own]]
        elif own.op == "call_function":
            args, kwargs = fx.node.map_arg((own.args, own.kwargs), made.__getitem__)
            made[own] = own.target(*args, **kwargs)
        for arg in own.all_input_nodes:
            if last[arg] is own and names[arg] not in wanted:
                made.pop(arg, None)
    return {names[own]: value for own, value in made.items() if names[own] in wanted}


def _apart(graph: fx.Graph, asked: Sequence[fx.Node], once: Collection[str], given: ByName,
           cut: tuple[int, ...], steps: Mapping[str, int]) -> set[str]:
    """The nodes whose parts, joined, are not the whole. `steps`: see `_step`."""
    fixed = {n.name: n for n in graph.nodes
             if n.op == "call_function" and n.name in once and not is_mutable(n)}
    wanted = {node.name for node in asked}
    whole = run(graph, given, sum(cut), wanted | fixed.keys())
    parts, start = [], 0
    for rows in cut:
        own = {n.name: rows_of(whole[n.name] if n.name in fixed else given[n.name], info_of(n),
                               range(start, start + rows))
               for n in graph.nodes if n.name in given or n.name in fixed}
        found = run(graph, own, rows, wanted)
        parts.append({n: v + start * steps[n] if steps[n] else v for n, v in found.items()})
        start += rows
    return {n.name for n in asked if not _joins(
        whole[n.name], [p[n.name] for p in parts], info_of(n), n.meta.get("rows", WHOLE))}


def rows_of(value: Any, info: Any, rows: Sequence[int], outer: int = 1) -> Any:
    """These rows of a value, of which all are in each of `outer` parts; all of it where it has
    none."""
    dim = info.rows_dim if isinstance(info, TensorInfo) else None
    if dim is None:
        return value
    each, opened = at_rows(info.shape[dim] // outer, 1), value.unflatten(dim, (outer, -1))
    found = [opened.narrow(dim + 1, row * each, each) for row in rows]
    return torch.cat(found, dim + 1).flatten(dim, dim + 1)


def _joins(whole: Any, parts: Sequence[Any], info: Any, rows: Layout = WHOLE) -> bool:
    if isinstance(whole, (tuple, list)):
        return all(_joins(w, p, i) for w, p, i in zip(whole, zip(*parts, strict=True), info,
                                                     strict=True))
    dim = info.rows_dim if isinstance(whole, Tensor) else None
    if dim is None:
        return True
    sizes = [p.shape[d] for p in parts for d in range(p.dim()) if d != dim]
    if sizes != [whole.shape[d] for d in range(whole.dim()) if d != dim] * len(parts):
        return False
    joined = join(parts, rows if isinstance(rows, Split) else Split(dim))
    return torch.equal(joined, whole) or torch.allclose(joined.double(), whole.double(), 1e-5, 1e-6,
                                                        True)

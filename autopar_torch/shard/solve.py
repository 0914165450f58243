"""The cheapest sharding of a kind, and of a chain of blocks, found exactly.

A kind becomes variables (the strategy of each op, the form of each value with several readers, the
forms at its borders) and tables (seconds per op, seconds per conversion). Everything inside is
eliminated once per kind; the chain is then the same problem over the borders of its blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np
from torch import fx

from ..errors import ShardingError
from ..model import ROWS, Block, TensorInfo, item_bytes
from ..plan import Sharding
from .convert import Conversions, conversions
from .eliminate import MOST, Array, Solution, Table, Variable, eliminate, minimum, ordered
from .layout import (
    PARTIAL,
    WHOLE,
    Forms,
    Layout,
    Layouts,
    Split,
    Square,
    Strategy,
    all_cuts,
    is_cut,
    layouts_text,
    parts_of,
    side,
)
from .price import (
    FORBIDDEN,
    Prices,
    around_waits,
    num_bytes,
    op_costs,
    param_costs,
    reduce_seconds,
    ring_waits,
)
from .rules import ShapedOp, writers
from .square import all_strategies

SHOWN = 8  # of what would be legal
DENSE = 2**16  # entries of one table over all borders of a kind; with more it stays many tables
FEW = 2**12  # entries of each of these
Spatial = Literal["free", "never", "always"]  # linears in rings: where it is cheapest, or as pinned


class OpWay(NamedTuple):
    """One way to run an op on all axes."""

    ins: tuple[Forms, ...]
    out: Layouts
    text: str
    share: int  # the work is divided by this
    around: int | None = None  # the axis around which keys and values of an attention go

    @property
    def ring(self) -> int | None:
        """The axis on which a linear runs in steps (spatial.py)."""
        skewed = (k for form in self.ins for k, x in enumerate(form.value)
                  if isinstance(x, Square) and x.skew == "w")
        return next(skewed, None)

    @property
    def made(self) -> Forms:
        return Forms.of(self.out)


class KindTable(NamedTuple):
    """A kind after eliminating: its cost over the forms of its border slots, and the way back.

    `left` are variables inside that the chain eliminates: here their tables would be too large.
    """

    graph: fx.Graph
    mesh: tuple[int, ...]
    borders: dict[str, list[Forms]]
    left: dict[Variable, int]
    choices: dict[str, list[OpWay]]
    forms: dict[str, list[Forms]]
    kept: dict[Variable, Array]  # bytes kept through the step, per op or parameter and choice
    memory_s_per_byte: float
    solution: Solution


@lru_cache(maxsize=10_000)
def legal(shape: tuple[int, ...], layouts: Layouts, mesh: tuple[int, ...]) -> bool:
    """Whether a value can be cut so. Rows of the batch are for replicas, never for tensor axes."""
    sizes = list(shape)
    outers: dict[int, int] = {}
    for (dim, outer), parts, _ in all_cuts(layouts, mesh):
        size = sizes[dim]
        inner = size // outer if size % outer == 0 else 1
        if inner % ROWS == 0 or inner % parts or outers.setdefault(dim, outer) != outer:
            return False
        sizes[dim] //= parts
    return True


def combine(node: fx.Node, per_axis: list[Strategy], mesh: tuple[int, ...]) -> list[OpWay]:
    """Strategies on one axis -> choices on the whole mesh, illegal ones left out."""
    op, found = ShapedOp(node), []
    cut = (op.out[0], op.args[1], *op.out[2:]) if op.name == "group_norm" else op.out  # by groups
    flat = [s for s in per_axis if not s.is_square]
    options = [per_axis if side(parts) else flat for parts in mesh]
    for picked in itertools.product(*options):
        around = [k for k, s in enumerate(picked) if s.around]
        if len(around) + sum(s.is_square for s in picked) > 1:
            continue
        ins = tuple(Forms(tuple(s.ins[k] for s in picked), tuple(s.grads[k] for s in picked))
                    for k in range(len(op.inputs)))
        out = tuple(s.out for s in picked)
        halves = tuple(2 * parts if k in around else parts for k, parts in enumerate(mesh))
        if legal(cut, out, halves) and all(
                legal(shape, form.value, mesh) for shape, form in zip(op.shapes, ins, strict=True)):
            share = math.prod(p for s, p in zip(picked, mesh, strict=True) if s.is_split)
            found.append(OpWay(ins, out, ";".join(s.text for s in picked), share, *around))
    return found


def ways(graph: fx.Graph, mesh: tuple[int, ...]) -> dict[fx.Node, list[OpWay]]:
    """Every way to run every op of a graph on a mesh."""
    return {node: combine(node, options, mesh)
            for node, options in all_strategies(graph, mesh).items()}


def chosen_way(node: fx.Node, legal: Sequence[OpWay], sharding: Sharding) -> OpWay:
    """What the sharding says about an op, refused if the op cannot be split so."""
    wanted = sharding.ops.get(node.name)
    for choice in legal:
        if choice.text == wanted:
            return choice
    raise ShardingError(
        f"{node.name} cannot be split as {wanted!r} on a mesh of {sharding.mesh}",
        where=f"Plan.shardings[kind={sharding.kind}].ops",
        fix=legal_are({choice.text for choice in legal}),
    )


def legal_are(texts: Collection[str]) -> str:
    """Some of what could be said instead."""
    few = sorted(texts)
    more = f" and {len(few) - SHOWN} more" if len(few) > SHOWN else ""
    return f"legal are {', '.join(few[:SHOWN])}{more}"


def border_forms(info: TensorInfo, mesh: tuple[int, ...]) -> list[Forms]:
    """Forms a value may have between blocks: whole, or cut along a dim."""
    options: list[Layout] = [WHOLE, *(Split(d) for d in range(len(info.shape)))]
    return [Forms.of(made) for made in itertools.product(options, repeat=len(mesh))
            if legal(info.shape, made, mesh)]


def param_forms(info: TensorInfo, readers: list[Forms], mesh: tuple[int, ...],
                shared: bool) -> list[Forms]:
    """Forms of a parameter: its readers', or any cut if blocks share it.

    The gradient of a whole one may stay partial: it is reduced once per step, not per use.
    """
    cuts: set[tuple[Layout, Layout]] = {(Split(d), Split(d)) for d in range(len(info.shape))}
    if not shared:
        cuts = {pair for form in readers for pair in zip(*form, strict=True) if is_cut(pair[0])}
    flat = [pair for pair in cuts if not isinstance(pair[0], Square)]
    options = [[(WHOLE, PARTIAL), *sorted(cuts if side(parts) else flat, key=layouts_text)]
               for parts in mesh]
    forms = [Forms(*zip(*picked, strict=True)) for picked in itertools.product(*options)]
    return [form for form in forms if legal(info.shape, form.value, mesh)]


class _Problem:
    """Variables and tables of one kind while they are collected."""

    def __init__(self, graph: fx.Graph, mesh: tuple[int, ...], prices: Prices) -> None:
        self.graph, self.mesh, self.prices = graph, mesh, prices
        self.sizes: dict[Variable, int] = {}
        self.tables: list[Table] = []
        self.made: dict[str, list[Forms]] = {}  # value -> what its maker can make
        self.forms: dict[str, list[Forms]] = {}  # value with several readers -> forms
        self.kept: dict[Variable, Array] = {}

    def add(self, variable: Variable, size: int, seconds: Array | None = None,
            kept: Array | None = None) -> None:
        """A variable, with the seconds and the kept bytes of each of its values."""
        self.sizes[variable] = size
        if seconds is not None and kept is not None:
            self.kept[variable] = kept
            self.tables.append(((variable,), seconds + kept * self.prices.memory_s_per_byte))


def tabulate(graph: fx.Graph, mesh: tuple[int, ...], prices: Prices, *,
             shared: frozenset[str] = frozenset(),
             pinned: dict[str, list[Forms]] | None = None,
             options: dict[fx.Node, list[Strategy]] | None = None,
             spatial: Spatial = "free") -> KindTable:
    """Solve a kind for every combination of the forms at its borders."""
    problem = _Problem(graph, mesh, prices)
    per_axis = options if options is not None else all_strategies(graph, mesh)
    output = graph.find_nodes(op="output")[0]
    choices = {n: _allowed(combine(n, s, mesh), spatial) for n, s in per_axis.items()}
    readers = _readers(choices)
    borders: dict[str, list[Forms]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            _add_slot(problem, node, readers.get(node, []), shared, pinned or {}, borders)
        elif node.op == "call_function":
            whole = op_costs(node, prices)
            costs = [_op_costs(problem, node, c, whole) for c in choices[node]]
            problem.add(node.name, len(costs), *np.array(costs).T)
            problem.made[node.name] = [c.made for c in choices[node]]
    for k, node in enumerate(output.args[0]):  # type: ignore[arg-type]
        slot = f"y{k}"
        borders[slot] = (pinned or {}).get(slot) or border_forms(node.meta["info"], mesh)  # type: ignore[union-attr]
        problem.add(slot, len(borders[slot]))
        readers.setdefault(node, []).append((slot, borders[slot]))  # type: ignore[arg-type]
    convert = _conversions(problem, readers)
    for node, users in readers.items():
        _connect(problem, convert, node, users)
    left, solution = _inside(problem, borders)
    by_name = {n.name: c for n, c in choices.items()}
    params = {name: forms for name, forms in problem.made.items() if name.startswith("w_")}
    forms = {**problem.forms, **params}
    return KindTable(graph, mesh, borders, left, by_name, forms, problem.kept,
                     prices.memory_s_per_byte, solution)


def _inside(problem: _Problem, borders: Collection[str]) -> tuple[dict[Variable, int], Solution]:
    """What is inside a kind eliminated, as far as no table grows too large."""
    sizes, scopes = problem.sizes, (scope for scope, _ in problem.tables)
    is_small = math.prod(sizes[slot] for slot in borders) <= DENSE
    order = ordered(sizes, scopes, borders, MOST if is_small else FEW)
    solution = eliminate(sizes, problem.tables, order.gone)
    joined = is_small and not order.left
    return {v: sizes[v] for v in order.left}, solution.joined(sizes) if joined else solution


def _allowed(choices: list[OpWay], spatial: Spatial) -> list[OpWay]:
    """With "always", a linear that can run in a ring must; with "never", attention may not either.
    """
    rings = [c for c in choices if c.ring is not None]
    if spatial == "never":
        return [c for c in choices
                if c.around is None and not any(isinstance(x, Square) for x in c.out)]
    return rings if rings and spatial == "always" else choices


def _op_costs(problem: _Problem, node: fx.Node, choice: OpWay,
              whole: tuple[float, float]) -> tuple[float, float]:
    """Seconds and kept bytes of an op under a choice."""
    seconds, kept = (cost / choice.share for cost in whole)
    *waits, block = ring_costs(node, choice, problem.mesh, problem.prices, seconds / 3)
    return seconds + sum(waits), kept + block


def ring_costs(node: fx.Node, choice: OpWay, mesh: tuple[int, ...], prices: Prices,
               forward: float) -> tuple[float, float, float]:
    """Of what waits for rings: seconds of it (forward, backward), bytes that are kept for it."""
    if choice.around is not None:
        return _around_costs(node, choice, mesh, prices, forward)
    if (axis := choice.ring) is None:
        return 0.0, 0.0, 0.0
    values = [*zip(ShapedOp(node).inputs, (form.value for form in choice.ins), strict=True),
              (node, choice.out)]
    blocks = {
        layout.skew: num_bytes(value.meta["info"], prices.rows) / parts_of(mesh, layouts)
        for value, layouts in values
        if isinstance(layout := layouts[axis], Square) and layout.row is not None
    }
    waits = ring_waits(forward, side(mesh[axis]), blocks, prices.links[axis], prices.hides)
    return (*waits, blocks["i"])


def _around_costs(node: fx.Node, choice: OpWay, mesh: tuple[int, ...], prices: Prices,
                  forward: float) -> tuple[float, float, float]:
    """Of an attention along the sequence; its result is kept once more, as it was made."""
    axis = cast(int, choice.around)
    values = [*zip(ShapedOp(node).inputs, (form.value for form in choice.ins), strict=True),
              (node, choice.out)]
    q, k, v, out = (num_bytes(value.meta["info"], prices.rows) / parts_of(mesh, layouts)
                    for value, layouts in values)
    wide = max(1.0, 4 / item_bytes(node.meta["info"].dtype))
    waits = around_waits(forward, mesh[axis], (q, k + v, out), wide, prices.links[axis],
                         prices.hides)
    return (*waits, out)


Readers = dict[fx.Node, list[tuple[str, list[Forms]]]]


def _readers(choices: dict[fx.Node, list[OpWay]]) -> Readers:
    """Value -> (reading op, the form it needs under each of its choices)."""
    readers: Readers = {}
    for node, options in choices.items():
        for k, value in enumerate(ShapedOp(node).inputs):
            readers.setdefault(value, []).append((node.name, [c.ins[k] for c in options]))
    return readers


def _add_slot(problem: _Problem, node: fx.Node, users: list[tuple[str, list[Forms]]],
              shared: frozenset[str], pinned: dict[str, list[Forms]],
              borders: dict[str, list[Forms]]) -> None:
    """A placeholder: a border value, a parameter, or something every device has whole."""
    name, info, mesh = node.name, node.meta["info"], problem.mesh
    if name.startswith("c"):
        forms = [Forms.whole(len(mesh))]
        problem.add(name, 1)
    elif name.startswith("w_"):
        wanted = [form for _, options in users for form in options]
        forms = pinned.get(name) or param_forms(info, wanted, mesh, name in shared)
        problem.add(name, len(forms), *_param_prices(problem, info, forms))
    else:
        forms = pinned.get(name) or border_forms(info, mesh)
        problem.add(name, len(forms))
    if name.startswith("x") or name in shared:
        borders[name] = forms
    problem.made[name] = forms


def _param_prices(problem: _Problem, info: TensorInfo, forms: list[Forms]) -> tuple[Array, Array]:
    """Seconds and kept bytes of a parameter in each of its forms."""
    seconds, kept = param_costs(info, problem.prices)
    shares = [1.0 / parts_of(problem.mesh, form.value) for form in forms]
    reduce = [reduce_seconds(form.grad, info.num_bytes(1), problem.mesh, problem.prices)
              if info.grad else 0.0 for form in forms]
    return seconds * np.array(shares) + np.array(reduce), kept * np.array(shares)


def _conversions(problem: _Problem, readers: Readers) -> Conversions:
    """Prices of all conversions between what is made and what is read."""
    wanted = (forms for users in readers.values() for _, forms in users)
    every = itertools.chain(*problem.made.values(), *wanted)
    return conversions((x for form in every for x in form), problem.mesh, problem.prices)


def _edge(node: fx.Node, convert: Conversions, rows: int, have: list[Forms],
          want: list[Forms]) -> Array:
    """Seconds to turn each form into each: the value forward, its gradient backward."""
    info = node.meta["info"]
    (made, ends), (read, starts) = (zip(*forms, strict=True) for forms in (have, want))
    if isinstance(info, tuple) or writers(node):
        same = np.equal.outer(convert.places(made), convert.places(read))
        return np.where(same, 0.0, FORBIDDEN)
    size = num_bytes(info, rows)
    ahead = convert.seconds(made, read, size)
    return ahead + convert.seconds(starts, ends, size).T if info.grad else ahead


def _connect(problem: _Problem, convert: Conversions, node: fx.Node,
             users: list[tuple[str, list[Forms]]]) -> None:
    """One reader: a table between maker and reader. Several: they share a form between them."""
    have = problem.made[node.name]

    def table(have: list[Forms], want: list[Forms]) -> Array:
        return _edge(node, convert, problem.prices.rows, have, want)

    if len(users) == 1 or (node.name.startswith(("c", "w_")) and node.op == "placeholder"):
        for user, want in users:
            problem.tables.append(((node.name, user), table(have, want)))
        return
    forms = list(dict.fromkeys(form for _, want in users for form in want))
    variable = f"{node.name}.form"
    problem.forms[variable] = forms
    problem.add(variable, len(forms))
    problem.tables.append(((node.name, variable), table(have, forms)))
    for user, want in users:
        problem.tables.append(((variable, user), table(forms, want)))


def read_out(table: KindTable, kind: str, inside: Mapping[Variable, int],
             is_proven: bool = True) -> Sharding:
    """The sharding of a kind for given forms at its borders, and of what the chain eliminated."""
    best = table.solution.complete(inside)
    ops = {name: options[best[name]].text for name, options in table.choices.items()}
    forms = {name: options[best[name]].text
             for name, options in (table.forms | table.borders).items()}
    kept = sum(float(sizes[best[name]]) for name, sizes in table.kept.items())
    seconds = table.solution.cost(inside) - table.memory_s_per_byte * kept
    return Sharding(kind, table.mesh, ops, forms, seconds, int(kept), is_proven)


def solve_chain(blocks: Sequence[Block], tables: Sequence[KindTable],
                whole: frozenset[str]) -> list[Sharding]:
    """The cheapest sharding of consecutive blocks; values in `whole` stay whole at borders."""
    sizes: dict[Variable, int] = {}
    chain: list[Table] = []
    named = [_names(block, table) for block, table in zip(blocks, tables, strict=True)]
    for block, table, names in zip(blocks, tables, named, strict=True):
        for slot, forms in table.borders.items():
            if sizes.setdefault(names[slot], len(forms)) != len(forms):
                raise ShardingError(f"{names[slot]} has other forms in {block.name}")
            if names[slot] in whole and len(forms) > 1:
                only = np.full(len(forms), FORBIDDEN)
                only[0] = 0.0
                chain.append(((names[slot],), only))
        sizes |= {names[v]: size for v, size in table.left.items()}
        chain += [_without_repeats(tuple(names[v] for v in scope), own)
                  for scope, own in table.solution.tables]
    best = minimum(sizes, chain)
    made: dict[tuple[int, tuple[int, ...]], Sharding] = {}
    result = []
    for block, table, names in zip(blocks, tables, named, strict=True):
        inside = {v: best.values[names[v]] for v in table.solution.kept}
        key = (id(table), tuple(inside.values()))
        if key not in made:
            made[key] = read_out(table, block.kind, inside, best.is_proven)
        result.append(made[key])
    return result


def _names(block: Block, table: KindTable) -> dict[Variable, Variable]:
    """What the chain calls the variables that a kind leaves to it."""
    inside: dict[Variable, Variable] = {v: (block.name, v) for v in table.left}
    borders = (block.inputs, block.outputs, block.params)
    return inside | {slot: name for slots in borders for slot, name in slots.items()}


def _without_repeats(variables: tuple[Variable, ...], table: Array) -> Table:
    """A slot pair filled with one value becomes one axis (the diagonal)."""
    kept: list[Variable] = []
    for variable in variables:
        axis = len(kept)
        if variable in kept:
            first = kept.index(variable)
            table = np.moveaxis(np.diagonal(table, axis1=first, axis2=axis), -1, first)
        else:
            kept.append(variable)
    return tuple(kept), table

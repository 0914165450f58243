"""Exact minimum of a sum of small tables, by eliminating one variable after the other.

Non-serial dynamic programming: the cheapest variable is minimised out of the sum of the tables
that mention it; what remains is a table over its neighbours. Exact on any graph, quick on thin
ones. A table too large to build is never built: `minimum` then fixes the variables that stand in
the way, to each of their values in turn, or to the best found in a bounded number of trials.
No torch in here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Variable = Hashable
Array = NDArray[np.float64]
Table = tuple[tuple[Variable, ...], Array]

MOST = 2**22  # entries of a table, 32 MiB
MOST_WORK = 2**26  # entries of all tables of one elimination
LIGHT = 2**14  # entries of a table where some variables are fixed by trial
TRIALS = 16  # such eliminations at most, fewer if they are long


class Solution(NamedTuple):
    """The minimum over all but the kept variables, and how to find the rest from them."""

    kept: tuple[Variable, ...]
    tables: tuple[Table, ...]  # over kept variables; their sum is the minimum
    steps: tuple[tuple[Variable, tuple[Variable, ...], NDArray[Any]], ...]

    def complete(self, assigned: Mapping[Any, int]) -> dict[Variable, int]:
        """The best value of every variable, given the kept ones."""
        best: dict[Variable, int] = dict(assigned)
        for variable, neighbours, choice in reversed(self.steps):
            best[variable] = int(choice[tuple(best[n] for n in neighbours)])
        return best

    def cost(self, assigned: Mapping[Any, int]) -> float:
        """The minimum for given values of the kept variables."""
        return total(self.tables, assigned)

    def joined(self, sizes: Mapping[Variable, int]) -> Solution:
        """The same with one table over all kept variables."""
        return self._replace(tables=((self.kept, _sum(self.kept, sizes, self.tables)),))


class Minimum(NamedTuple):
    cost: float
    values: dict[Variable, int]
    is_proven: bool


def total(tables: Iterable[Table], assigned: Mapping[Any, int]) -> float:
    return float(sum(table[tuple(assigned[v] for v in scope)] for scope, table in tables))


def _sum(axes: Sequence[Variable], sizes: Mapping[Variable, int],
         tables: Iterable[Table]) -> Array:
    """Tables added up over the axes."""
    place = {variable: i for i, variable in enumerate(axes)}
    result = np.zeros([sizes[v] for v in axes])
    for variables, table in tables:
        order = sorted(range(len(variables)), key=lambda i: place[variables[i]])
        shape = [1] * len(axes)
        for i in order:
            shape[place[variables[i]]] = sizes[variables[i]]
        result += table.transpose(order).reshape(shape)
    return result


class Order(NamedTuple):
    """Which variables go, one after the other, and which stay or stand in the way."""

    gone: tuple[Variable, ...]
    left: tuple[Variable, ...]
    work: int  # entries of all tables that are built


def ordered(sizes: Mapping[Variable, int], scopes: Iterable[Sequence[Variable]],
            keep: Iterable[Variable] = (), most: int = MOST, *, fill: bool = False,
            cut: bool = False) -> Order:
    """The variable whose table is the smallest goes first, or with `fill` the one that brings
    together the fewest others. No table has more than `most` entries: the order ends there, or
    with `cut` the variable with the most neighbours is taken out first. Equal in any process."""
    near: dict[Variable, set[Variable]] = {v: set() for v in sizes}
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    for v, others in near.items():
        others.discard(v)

    def price(v: Variable) -> tuple[int, int, int]:
        entries = sizes[v] * math.prod(sizes[u] for u in near[v])
        fills = sum(b not in near[a] for a, b in itertools.combinations(near[v], 2)) if fill else 0
        return int(entries > most), fills, entries // sizes[v]

    kept, work = set(keep), 0
    gone: list[Variable] = []
    left: list[Variable] = []
    prices = {v: price(v) for v in sizes if v not in kept}
    while prices:
        variable = min(prices, key=prices.__getitem__)
        too_large, _, entries = prices[variable]
        if too_large and not cut:
            left += prices
            break
        if too_large:
            variable = max(prices, key=lambda v: (len(near[v]), sizes[v]))
            left.append(variable)
        else:
            gone.append(variable)
            work += entries * sizes[variable]
        del prices[variable]
        others = near.pop(variable)
        for u in others:
            near[u].discard(variable)
            if not too_large:
                near[u] |= others
                near[u].discard(u)
        touched = others if not fill else others.union(*(near[u] for u in others))
        prices.update((u, price(u)) for u in touched if u in prices)
    return Order(tuple(gone), tuple(left), work)


def eliminate(sizes: Mapping[Variable, int], tables: Iterable[Table],
              order: Sequence[Variable]) -> Solution:
    """Minimise over the variables in this order. Ties go to the lowest index, in any process.

    Exact because min over x of (f(x, a) + g(b)) = (min over x of f(x, a)) + g(b): each step
    changes neither the minimum nor, by the recorded choice, where it is reached. What has no choice
    takes no axis, of which numpy has 64.
    """
    live: dict[int, Table] = {
        i: (tuple(v for v in scope if sizes[v] > 1), table.squeeze())
        for i, (scope, table) in enumerate(tables)}
    mentions: dict[Variable, set[int]] = {v: set() for v in sizes}
    for i, (variables, _) in live.items():
        for v in variables:
            mentions[v].add(i)
    rank = {v: i for i, v in enumerate(sizes)}
    steps, fresh = [], len(live)
    for variable in order:
        met = [live.pop(i) for i in sorted(mentions[variable])]
        axes = sorted({u for scope, _ in met for u in scope} - {variable}, key=rank.__getitem__)
        table = _sum([*axes, variable], sizes, met)
        few_bytes = np.min_scalar_type(sizes[variable])  # all choices are kept until the end
        steps.append((variable, tuple(axes), table.argmin(-1).astype(few_bytes)))
        for u in axes:
            mentions[u] -= mentions[variable]
            mentions[u].add(fresh)
        live[fresh] = (tuple(axes), table.min(-1))
        fresh += 1
    gone = set(order)
    return Solution(tuple(v for v in sizes if v not in gone), tuple(live.values()), tuple(steps))


def minimum(sizes: Mapping[Variable, int], tables: Sequence[Table], most: int = MOST,
            most_work: int = MOST_WORK) -> Minimum:
    """The least sum, and where it is reached; proven, unless that would take too much."""
    scopes = [scope for scope, _ in tables]
    for fill in (False, True):
        order = ordered(sizes, scopes, most=most, fill=fill)
        if not order.left and order.work <= most_work:
            solution = eliminate(sizes, tables, order.gone)
            return Minimum(solution.cost({}), solution.complete({}), True)
    cuts = [ordered(sizes, scopes, most=each, cut=True) for each in (most, min(most, LIGHT))]
    work = [math.prod(sizes[v] for v in cut.left) * cut.work for cut in cuts]
    best = cuts[work.index(min(work))]
    if min(work) > most_work:
        return _descent(sizes, tables, cuts[1])
    every = itertools.product(*(range(sizes[v]) for v in best.left))
    return min((_given(sizes, tables, best, values) for values in every), key=lambda m: m.cost)


def _given(sizes: Mapping[Variable, int], tables: Sequence[Table], cut: Order,
           values: Sequence[int]) -> Minimum:
    """The minimum with the variables of the cut fixed."""
    fixed = dict(zip(cut.left, values, strict=True))
    sliced = [(tuple(v for v in scope if v not in fixed),
               table[tuple(fixed.get(v, slice(None)) for v in scope)]) for scope, table in tables]
    free = {v: n for v, n in sizes.items() if v not in fixed}
    solution = eliminate(free, sliced, cut.gone)
    return Minimum(solution.cost({}), solution.complete(fixed), True)


def _descent(sizes: Mapping[Variable, int], tables: Sequence[Table], cut: Order) -> Minimum:
    """From the values that are best by themselves, or from the first ones, each is changed as long
    as that helps, in so many trials."""
    alone = {v: np.zeros(sizes[v]) for v in cut.left}
    for scope, table in tables:
        for i, v in enumerate(scope):
            if v in alone:
                alone[v] += np.moveaxis(table, i, 0).reshape(sizes[v], -1).min(1)
    starts = [[int(alone[v].argmin()) for v in cut.left], [0] * len(cut.left)]
    found = [_given(sizes, tables, cut, start) for start in starts]
    first = int(found[1].cost < found[0].cost)
    best, now = found[first], starts[first]
    moves = itertools.cycle((i, x) for i, v in enumerate(cut.left) for x in range(sizes[v]))
    for place, value in itertools.islice(moves, min(TRIALS, MOST_WORK // (4 * cut.work))):
        if value != now[place]:
            tried = _given(sizes, tables, cut, [*now[:place], value, *now[place + 1 :]])
            if tried.cost < best.cost:
                best, now[place] = tried, value
    return best._replace(is_proven=False)

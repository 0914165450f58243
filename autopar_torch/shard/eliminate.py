"""Exact minimum of a sum of small tables, by eliminating one variable after the other.

Non-serial dynamic programming: the cheapest variable is minimised out of the sum of the tables
that mention it; what remains is a table over its neighbours. Exact on any graph, quick on thin
ones. No torch in here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Variable = Hashable
Array = NDArray[np.float64]
Table = tuple[tuple[Variable, ...], Array]


class Solution(NamedTuple):
    """The minimum over all but the kept variables, and how to find the rest from them."""

    kept: tuple[Variable, ...]
    table: Array
    steps: tuple[tuple[Variable, tuple[Variable, ...], NDArray[np.int64]], ...]

    def complete(self, assigned: Mapping[Any, int]) -> dict[Variable, int]:
        """The best value of every variable, given the kept ones."""
        best: dict[Variable, int] = dict(assigned)
        for variable, neighbours, choice in reversed(self.steps):
            best[variable] = int(choice[tuple(best[n] for n in neighbours)])
        return best


def _sum(axes: Sequence[Variable], sizes: dict[Variable, int], tables: Iterable[Table]) -> Array:
    """Tables added up over the axes."""
    place = {variable: i for i, variable in enumerate(axes)}
    total = np.zeros([sizes[v] for v in axes])
    for variables, table in tables:
        order = sorted(range(len(variables)), key=lambda i: place[variables[i]])
        shape = [1] * len(axes)
        for i in order:
            shape[place[variables[i]]] = sizes[variables[i]]
        total += table.transpose(order).reshape(shape)
    return total


def eliminate(sizes: dict[Variable, int], tables: Iterable[Table],
              keep: Sequence[Variable] = ()) -> Solution:
    """Minimise over every variable that is not kept. Ties go to the lowest index, in any process.

    Exact because min over x of (f(x, a) + g(b)) = (min over x of f(x, a)) + g(b): each step
    changes neither the minimum nor, by the recorded choice, where it is reached.
    """
    live: dict[int, Table] = dict(enumerate(tables))
    mentions: dict[Variable, set[int]] = {v: set() for v in sizes}
    for i, (variables, _) in live.items():
        for v in variables:
            mentions[v].add(i)
    near = {v: {u for i in mentions[v] for u in live[i][0]} - {v} for v in sizes}
    price = {v: _price(near[v], sizes) for v in sizes if v not in set(keep)}
    rank = {v: i for i, v in enumerate(sizes)}
    steps, fresh = [], len(live)
    while price:
        variable = min(price, key=price.__getitem__)
        del price[variable]
        axes = sorted(near[variable], key=rank.__getitem__)
        total = _sum([*axes, variable], sizes, (live[i] for i in sorted(mentions[variable])))
        steps.append((variable, tuple(axes), total.argmin(-1)))
        for i in mentions.pop(variable):
            for u in live.pop(i)[0]:
                if u != variable:
                    mentions[u].discard(i)
        live[fresh] = (tuple(axes), total.min(-1))
        for u in axes:
            mentions[u].add(fresh)
            near[u] = (near[u] | set(axes)) - {u, variable}
            if u in price:
                price[u] = _price(near[u], sizes)
        fresh += 1
    kept = tuple(keep)
    return Solution(kept, _sum(kept, sizes, live.values()), tuple(steps))


def _price(near: set[Variable], sizes: dict[Variable, int]) -> int:
    return math.prod(sizes[u] for u in near)


def minimum(solution: Solution) -> tuple[float, dict[Variable, int]]:
    """The least total cost, and where it is reached."""
    flat = int(solution.table.argmin())
    index = np.unravel_index(flat, solution.table.shape) if solution.kept else ()
    kept = {v: int(i) for v, i in zip(solution.kept, index, strict=True)}
    return float(solution.table.reshape(-1)[flat]), solution.complete(kept)

"""What all conversions between the layouts of a kind cost, found at once.

The same walk as `price.moves`, taken by all pairs of layouts together: an array holds where each
pair is on each axis. Seconds are a start and a rate, so one table serves values of every size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .eliminate import Array
from .layout import WHOLE, Layout, Layouts, parts_of
from .price import Move, Prices, detour, move_price, same_dim

IndexArray = NDArray[np.intp]


class Conversions(NamedTuple):
    """Row: what a value is, column: what it becomes."""

    place: dict[Layouts, int]
    start_s: Array
    s_per_byte: Array

    def places(self, layouts: Iterable[Layouts]) -> IndexArray:
        return np.array([self.place[x] for x in layouts], np.intp)

    def seconds(self, sources: Iterable[Layouts], targets: Iterable[Layouts],
                num_bytes: float) -> Array:
        """A table over sources and targets, of a value of so many bytes when whole."""
        pairs = np.ix_(self.places(sources), self.places(targets))
        return self.start_s[pairs] + self.s_per_byte[pairs] * num_bytes


class _Axis(NamedTuple):
    """Prices of one axis, by the number of the layout before and after."""

    start_s: Array
    s_per_byte: Array
    parts: Array


def conversions(layouts: Iterable[Layouts], mesh: tuple[int, ...], prices: Prices) -> Conversions:
    """Prices of all pairs of these layouts."""
    place = {x: i for i, x in enumerate(dict.fromkeys(layouts))}
    single = {x: i for i, x in enumerate(dict.fromkeys([WHOLE, *itertools.chain(*place)]))}
    numbers = np.array([[single[x] for x in axes] for axes in place], np.intp)
    same = np.array([[same_dim(a, b) for b in single] for a in single])
    axes = [_axis(list(single), axis, parts, prices) for axis, parts in enumerate(mesh)]
    return Conversions(place, *_walk(numbers.T, axes, same))


def _axis(single: Sequence[Layout], axis: int, parts: int, prices: Prices) -> _Axis:
    cost = [[_step(Move(axis, a, b), parts, prices) for b in single] for a in single]
    start_s, s_per_byte = np.moveaxis(np.array(cost), -1, 0)
    return _Axis(start_s, s_per_byte, np.array([parts_of((parts,), (x,)) for x in single], float))


def _step(move: Move, parts: int, prices: Prices) -> tuple[float, float]:
    """Price of one layout to another, by way of a third where needed."""
    stops = [move.source, detour(move.source, move.target), move.target]
    costs = [move_price(Move(move.axis, a, b), parts, prices)
             for a, b in itertools.pairwise(stops) if a != b]
    return sum(start for start, _ in costs), sum(rate for _, rate in costs)


def _walk(numbers: IndexArray, axes: Sequence[_Axis],
          same: NDArray[np.bool_]) -> tuple[Array, Array]:
    """(start, rate) of all pairs; `numbers`: the layout of each on each axis, 0 is whole."""
    n = numbers.shape[1]
    now = [np.repeat(own[:, None], n, 1) for own in numbers]
    start_s, s_per_byte = np.zeros((n, n)), np.zeros((n, n))

    def go(axis: int, goal: IndexArray) -> None:
        others = np.ones((n, n))
        for k, prices in enumerate(axes):
            if k != axis:
                others *= prices.parts[now[k]]
        pair = now[axis], goal
        np.add(start_s, axes[axis].start_s[pair], out=start_s)
        np.add(s_per_byte, axes[axis].s_per_byte[pair] / others, out=s_per_byte)
        now[axis] = goal

    for axis, target in enumerate(numbers):
        goal = np.repeat(target[None], n, 0)
        for inner in range(axis + 1, len(axes)):
            cuts_it = same[now[inner], now[axis]] | same[now[inner], goal]
            go(inner, np.where(cuts_it & (now[axis] != goal), 0, now[inner]))
        go(axis, goal)
    return start_s, s_per_byte

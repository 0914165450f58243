"""Masks too large to compute: what they say, from the least and the most of what they are made of.

Made from numbers of queries and of keys by ops that go one way with each operand, such as <= and &,
a mask is the same all over a tile if it is the same at its corners. Only tiles on the diagonal are
computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from ..shard.rows import at_batch
from ..shard.rules import op_name

SIZE = 512  # of a tile
_ONE_WAY = {"le", "lt", "ge", "gt", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not",
            "logical_and", "logical_or", "logical_not", "add", "sub", "mul", "neg", "minimum",
            "maximum", "where", "to"}


class Extremes(NamedTuple):
    """The least and the most in each tile."""

    low: Tensor
    high: Tensor


class Tiles:
    """A graph that ends with a mask of (..., queries, keys), some of its values known. What is as
    `large` as the mask is computed in part."""

    def __init__(self, graph: fx.Graph, known: Mapping[str, Tensor], rows: int, large: set[str],
                 lengths: tuple[int, int]) -> None:
        self.lengths, self.large = lengths, list[fx.Node]()
        self.small: dict[fx.Node, Any] = {}
        real = at_batch(graph, rows, torch.device("cpu"))
        for name, node in zip([node.name for node in graph.nodes], real.nodes, strict=True):
            if name in known:
                self.small[node] = known[name]
            elif name in large:
                self.large.append(node)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._small)
                self.small[node] = node.target(*args, **kwargs)

    def _small(self, node: fx.Node) -> Any:
        if node not in self.small:
            raise ValueError("something small is made of what is too large")
        return self.small[node]

    def on_diagonal(self) -> Iterator[Tensor]:
        """The tiles of as many queries as keys."""
        for start in range(0, self.lengths[0], SIZE):
            own = slice(start, start + SIZE)

            def cut(x: Tensor, own: slice = own) -> Tensor:
                for dim in self._long(x):
                    x = x.movedim(dim, 0)[own].movedim(0, dim)
                return x

            yield self._computed(cut, lambda node, args, kwargs: node.target(*args, **kwargs))

    def bounds(self) -> Extremes:
        """Of all tiles."""

        def cut(x: Tensor) -> Extremes:
            return Extremes(self._reduced(x, torch.amin), self._reduced(x, torch.amax))

        found: Extremes = self._computed(cut, _bounds)
        return found

    def _long(self, x: Tensor) -> list[int]:
        """Which dims are those of queries and keys."""
        ends = zip((-2, -1), self.lengths, strict=True)
        return [dim for dim, length in ends if x.dim() >= -dim and x.shape[dim] == length]

    def _reduced(self, x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        for dim in self._long(x):
            x = torch.stack([reduce(part, dim) for part in x.split(SIZE, dim)], dim)
        return x

    def _computed(self, cut: Callable[[Tensor], Any], run: Callable[..., Any]) -> Any:
        made: dict[fx.Node, Any] = {}
        for node in self.large:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs),
                lambda arg: made[arg] if arg in made else cut(self._small(arg)))
            if op_name(node) not in (*_ONE_WAY, "eq", "ne", "expand"):
                raise ValueError(f"{op_name(node)} is too large")
            made[node] = args[0] if op_name(node) == "expand" else run(node, args, kwargs)
        return made[self.large[-1]]


def _bounds(node: fx.Node, args: Any, kwargs: Any) -> Extremes:
    if op_name(node) not in ("eq", "ne"):
        return _at_corners(functools.partial(cast(Any, node.target), **kwargs), *args)
    same = _at_corners(torch.logical_and, _at_corners(torch.le, *args),
                       _at_corners(torch.ge, *args))
    return same if op_name(node) == "eq" else _at_corners(torch.logical_not, same)


def _at_corners(op: Callable[..., Tensor], *args: Any) -> Extremes:
    ends = [arg if isinstance(arg, Extremes) else (arg,) for arg in args]
    found = torch.stack([op(*corner) for corner in itertools.product(*ends)])
    return Extremes(found.amin(0), found.amax(0))

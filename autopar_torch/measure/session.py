"""One session of measuring: rounds of everything that is needed, until it is enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from ..cluster import Cluster
from ..errors import ProfileError
from ..profile import Cell, CellNeed, CurveNeed, Jitter, Overheads, Piece, Profile, around, merged
from ..trace import Traced
from .blocks import Axes, Blocks, Context
from .bytes import TensorBytes
from .links import WARM_UP, Lines, Places
from .overheads import Extras
from .samples import paces
from .stats import NOISE_LIMIT, evened, median, quantiles

LEAST = 3  # rounds: every way to run a backward has its turn


class Session:
    """What to measure, ready to be measured as often as is wanted. All ranks act together."""

    def __init__(self, traced: Traced, cells: Sequence[CellNeed], curves: Sequence[CurveNeed],
                 cluster: Cluster, places: Places, axes: Axes, context: Context,
                 batch: Callable[[], object], device: torch.device) -> None:  # fmt: skip
        self.cluster, self.places = cluster, places
        self.chains = {
            chain: Blocks(own, traced, axes(chain.mesh), context(chain.rows), device,
                          cluster.ranks_per_core > 1)
            for chain, own in _chains(cells, traced).items()
        }  # fmt: skip
        self.wanted = list(self.chains.values())
        self.needs = list(dict.fromkeys(cells))
        self.lines = Lines(curves, cluster, places, device)
        rows = max((need.rows for need in cells), default=1)
        self.extras = Extras(device, places, cluster.ranks_per_core, _trained_sizes(traced), batch,
                             lambda: context(rows))  # fmt: skip
        self._count_bytes()
        for _ in range(WARM_UP - 1):  # blocks ran while they were counted
            self.lines.round()
        self.rounds = -1  # one that does not count
        self.round()
        for chain in self.chains.values():
            chain.forget()
        self.lines.forget()
        self.extras.forget()

    def _count_bytes(self) -> None:
        with TensorBytes() as count:
            for chain in self.chains.values():
                chain.run_counted(count)
                self._wait()
        for chain in self.chains.values():
            chain.read_bytes(count)

    def focus(self, cells: Iterable[CellNeed], curves: Sequence[CurveNeed]) -> None:
        """From now on rounds are of what these need; the rest was sampled enough."""
        self.wanted = [self.chains[chain] for chain in _focused(self.chains, cells)]
        self.lines.focus(curves)

    def round(self) -> None:
        """One more sample of all that is wanted, everyone busy with the same at the same time."""
        self.rounds += 1
        for chain in self.wanted:
            self._wait()
            chain.round()
        self._wait()
        self.lines.round()
        self.extras.round()

    def _wait(self) -> None:
        if self.places.size > 1:
            dist.barrier()

    def profile(self) -> Profile:
        """All that was seen so far, the same on every rank."""
        if self.rounds < LEAST:
            raise ProfileError(f"{self.rounds} of at least {LEAST} rounds were measured",
                               where="Session.round", fix="call round() more often")  # fmt: skip
        found: dict[CellNeed, Piece] = {}
        factors = evened([chain.rounds for chain in self.chains.values()])
        for chain, factor in zip(self.chains.values(), factors, strict=True):
            found |= chain.result(self.cluster.ranks_per_core, factor)
        cells = [Cell(need.kind, need.key, (self._joined_piece(found.get(need), need.rows),))
                 for need in self.needs]  # fmt: skip
        own = replace(self.extras.result(), action_s=self._switch_s())
        overheads = Overheads(*self._mean(_values(own), True))
        return Profile(self.cluster, merged(cells), self.lines.result(), overheads,
                       self._jitter(), self.noise())  # fmt: skip

    def _switch_s(self) -> float:
        """Of a rank alone on its core."""
        found = [chain.switch_s() for chain in self._alone()]
        return median(found) / self.cluster.ranks_per_core if found else 0.0

    def _jitter(self) -> Jitter:
        """Of whole rounds and single runs, of all ranks together."""
        alone = self._alone()
        own = {key: chain.variation() for key, chain in self.chains.items() if chain in alone}
        everyone = self.places.gather(own)
        if self.cluster.ranks_per_core > 1 or not any(everyone):
            return Jitter()
        chains = [[seen[key] for seen in everyone if key in seen] for key in self.chains]
        rounds = [pace for chain in chains for pace in paces([seen.rounds for seen in chain])]
        single = [factor for chain in chains for seen in chain for factor in seen.single]
        return Jitter(quantiles(rounds), quantiles(single))

    def _alone(self) -> list[Blocks]:
        """Chains that never exchange (elsewhere waiting is measured as such), wanted ones first."""
        found = [c for c in self.chains.values() if c.active and not c.exchanges]
        return [c for c in found if c in self.wanted] or found

    def _joined_piece(self, piece: Piece | None, rows: int) -> Piece:
        own = _values(piece)[1:] if piece else [0.0] * (len(Piece.__struct_fields__) - 1)
        return Piece(rows, *self._mean(own, piece is not None))

    def _mean(self, own: Sequence[float], counts: bool) -> list[float]:
        """The mean over the ranks that took part."""
        total = self.places.sum(torch.tensor([*own, float(counts)], dtype=torch.float64))
        return [float(x) / max(1.0, float(total[-1])) for x in total[:-1]]

    def noise(self) -> dict[str, float]:
        """What is wanted and not known well yet, with its error where that is largest; all must
        call this."""
        own = self.lines.errors()
        for chain in self.wanted:
            own |= chain.errors()
        found: dict[str, float] = {}
        for errors in self.places.gather(own):
            found |= {name: max(error, found.get(name, 0.0)) for name, error in errors.items()}
        return {name: error for name, error in found.items() if error > NOISE_LIMIT}


def _trained_sizes(traced: Traced) -> list[int]:
    infos = traced.graph.params.values()
    return [info.num_elements for info in infos if info.trainable and not info.buffer]


def _values(noun: Piece | Overheads) -> list[float]:
    return [float(getattr(noun, name)) for name in noun.__struct_fields__]


class Chain(NamedTuple):
    """Blocks of one kind of plan run after one another, as in a step of it."""

    mesh: tuple[int, ...]
    again: bool
    rows: int


def _chain(need: CellNeed) -> Chain:
    return Chain(need.sharding.mesh if need.sharding else (), need.again, need.rows)


def _chains(cells: Sequence[CellNeed], traced: Traced) -> dict[Chain, list[CellNeed]]:
    """Cells in the order of the model."""
    order = list(traced.graph.kinds)
    found: dict[Chain, list[CellNeed]] = {}
    for need in sorted(dict.fromkeys(cells), key=lambda n: (order.index(n.kind), n.key, n.rows)):
        found.setdefault(_chain(need), []).append(need)
    return found


def _focused(known: Collection[Chain], cells: Iterable[CellNeed]) -> list[Chain]:
    """The known chains that tell what some cells take: at their rows, or on both sides."""
    asked = {_chain(need) for need in cells}
    found = set()
    for chain in asked:
        like = {c.rows: c for c in known if c[:2] == chain[:2]}
        found |= {like[rows] for rows in around(chain.rows, like)}
    return [chain for chain in known if chain in found]

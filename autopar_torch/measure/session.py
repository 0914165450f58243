"""One session of measuring: rounds of everything that is needed, until it is enough."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from statistics import median

import torch
from msgspec.structs import replace

from .. import progress
from ..cluster import CPU_CORE, GPU, LOOPBACK, Cluster
from ..errors import ProfileError
from ..profile import (
    BlockCost,
    BlockCosts,
    BlockNeed,
    CurveNeed,
    Jitter,
    Overheads,
    Profile,
    around,
    merged,
    sharding_key,
)
from ..shard.estimate import Again
from ..shard.price import Prices
from ..trace import Traced
from . import nvml
from .blocks import BACKWARDS, Axes, Context, Ground, TimedChain
from .bytes import counting
from .links import Lines, Places, barrier
from .overheads import Extras
from .room import Chain, chain_bytes, chain_of
from .samples import Variation, slowdowns, variation
from .stats import NOISE_LIMIT, quantiles

log = logging.getLogger("autopar_torch")


class Session:
    """What to measure, ready to be measured as often as is wanted. All ranks act together.

    With `quick`, what recomputes is derived from what does not; `refine` measures it.
    """

    def __init__(self, traced: Traced, blocks: Sequence[BlockNeed], curves: Sequence[CurveNeed],
                 cluster: Cluster, places: Places, axes: Axes, context: Context,
                 batch: Callable[[], object], device: torch.device,
                 quick: bool = False) -> None:
        self.cluster, self.places = cluster, places
        self.traced, self.axes, self.context, self.device = traced, axes, context, device
        self.asked = _chains(blocks, traced)
        self.needs = list(dict.fromkeys(blocks))
        self.lines = Lines(curves, cluster, places, device)
        rows = max((need.rows for need in blocks), default=1)
        self.extras = Extras(device, _trained_sizes(traced), batch, lambda: context(rows))
        self.ground = Ground(device)
        self.chains: dict[Chain, TimedChain] = {}
        self.derived: dict[tuple[str, str], Again] = {}
        self.rounds = 0
        self._take_up(chain for chain in self.asked if not (quick and self._derivable(chain)))
        self.wanted = list(self.chains.values())
        self.lines.warm_up()
        self.extras.warm_up()

    def _derivable(self, chain: Chain) -> bool:
        """Whether a chain recomputes, and each of its blocks is measured with forward kept, too."""
        kept = set(self.asked.get(chain._replace(recompute=False), ()))
        return bool(chain.recompute) and all(_kept(need) in kept for need in self.asked[chain])

    def derives(self, blocks: Iterable[BlockNeed]) -> bool:
        """Whether some of these cells were derived so far, not measured."""
        return any(chain not in self.chains for chain in _chains_for(self.asked, blocks))

    def _take_up(self, chains: Iterable[Chain]) -> None:
        """Measure these chains from now on; their first round does not count."""
        sizes = {chain: chain_bytes(self.asked[chain], self.traced)
                 for chain in chains if chain not in self.chains}
        if not sizes:
            return
        self.places.jointly(lambda: _ask_for(int(max(sizes.values())), self.device))
        made = {chain: TimedChain(self.asked[chain], self.traced, self.axes(chain.mesh),
                                  self.context(chain.rows), self.ground)
                for chain in sorted(sizes, key=lambda chain: -sizes[chain])}
        made = {chain: made[chain] for chain in sizes}
        with counting(self.device) as count:
            for blocks in made.values():
                blocks.run_counted(count)
                barrier(self.places)
        for done, blocks in enumerate(made.values(), 1):
            progress.tell("preparing what is measured", done, len(made))
            blocks.read_bytes(count)
            barrier(self.places)
            blocks.round()
            blocks.forget()
        self.chains |= made

    def refine(self, blocks: Iterable[BlockNeed], curves: Sequence[CurveNeed]) -> None:
        """From now on a round measures only what these need; the rest was sampled enough."""
        chains = _chains_for(self.asked, blocks)
        self._take_up(chains)
        self.wanted = [self.chains[chain] for chain in chains]
        self.lines.refine(curves)

    def round(self) -> None:
        """Take more samples of all that is wanted. All ranks run the same at the same time.

        A chain runs its backwards in a row: in training too a block finds what a cache holds of it,
        since the micro-batch or the step before used it last. Who exchanges nothing does not stop
        in between: a core with a quota would make up for the pause.
        """
        self.rounds += 1
        for done, chain in enumerate(self.wanted, 1):
            progress.tell(f"measuring, round {self.rounds}", done, len(self.wanted))
            barrier(self.places)
            chain.warm_up()
            for _ in BACKWARDS:
                if chain.exchanges:
                    barrier(self.places)
                chain.round()
        for _ in BACKWARDS:
            barrier(self.places)
            self.lines.round()
            self.extras.round()
        if slowed := nvml.slowed_by(self.device):
            log.warning("%s of rank %d is slowed down by %s: what it measures is not what it can "
                        "do", self.device, self.places.rank, " and ".join(slowed))

    def profile(self) -> Profile:
        """All that was measured so far, the same on every rank."""
        if not self.rounds or not all(chain.num_rounds for chain in self.chains.values()):
            raise ProfileError("nothing was measured of some blocks", where="Session.round",
                               fix="call round() at least once after focus()")
        found: dict[BlockNeed, BlockCost] = {}
        for chain in self.chains.values():
            found |= chain.result()
        costs = [cost for need in self.needs for cost in self._costs(need, found)]
        own = replace(self.extras.result(), action_s=self._switch_s())
        overheads = tuple(Overheads(*mean) for mean in self._means(_values(own)))
        return Profile(self.cluster, merged(costs), self.lines.result(), overheads,
                       self._jitter(), self.noise())

    def _costs(self, need: BlockNeed, found: dict[BlockNeed, BlockCost]) -> list[BlockCosts]:
        """On each class of devices that took part."""
        chain = chain_of(need)
        derived = chain not in self.chains
        cost = found.get(_kept(need) if derived else need)
        means = self._means(_values(cost)[1:] if cost else None, math.prod(chain.mesh))
        costs = {k: BlockCost(need.rows, *mean) for k, mean in enumerate(means) if mean}
        if derived:
            again = self._again(need)
            return [BlockCosts(need.kind, need.key, (again(cost, need.recompute),), "derived", k)
                    for k, cost in costs.items()]
        return [BlockCosts(need.kind, need.key, (cost,), "measured", k)
                for k, cost in costs.items()]

    def _again(self, need: BlockNeed) -> Again:
        """Worked out once for all numbers of rows."""
        if (key := (need.kind, sharding_key(need.sharding))) not in self.derived:
            mesh = need.sharding.mesh if need.sharding else ()
            base = GPU if self.device.type == "cuda" else CPU_CORE
            prices = Prices(base, (LOOPBACK,) * len(mesh), rows=need.rows)
            self.derived[key] = Again(self.traced.programs[need.kind], need.sharding, prices)
        return self.derived[key]

    def _switch_s(self) -> float:
        found = [chain.switch_s() for chain in self._alone()]
        return median(found) if found else 0.0

    def _jitter(self) -> tuple[Jitter, ...]:
        """How whole rounds and single runs varied, over the ranks of each class."""
        alone = self._alone()
        own = {key: variation(c.columns) for key, c in self.chains.items() if c in alone}
        everyone = self.places.gather(own)
        return tuple(self._varied([seen for rank, seen in enumerate(everyone)
                                   if self.cluster.class_of[rank] == k])
                     for k in range(len(self.cluster.classes)))

    def _varied(self, everyone: Sequence[dict[Chain, Variation]]) -> Jitter:
        if not any(everyone):
            return Jitter()
        chains = [[seen[key] for seen in everyone if key in seen] for key in self.chains]
        rounds = [x for chain in chains for x in slowdowns([seen.rounds for seen in chain])]
        single = [factor for chain in chains for seen in chain for factor in seen.single]
        return Jitter(quantiles(rounds), quantiles(single))

    def _alone(self) -> list[TimedChain]:
        """Chains that never exchange, as waiting is no jitter: the wanted ones, if they have more
        samples than a quick pass takes, else all."""
        found = [c for c in self.chains.values() if c.active and not c.exchanges]
        least = 3 * len(BACKWARDS)
        return [c for c in found if c in self.wanted and c.num_rounds >= least] or found

    def _means(self, own: Sequence[float] | None, tp: int = 1) -> list[list[float]]:
        """Per class of devices: the mean over its ranks that took part; empty where none did."""
        rank, size = self.places.rank, len(own or ())
        counts = own is not None and rank in _typical(self.cluster, tp)
        width = max(self.places.gather(size))
        table = torch.zeros(len(self.cluster.classes), width + 1, dtype=torch.float64,
                            device=self.device)
        if own is not None and counts:
            table[self.cluster.class_of[rank]] = torch.tensor([*own, 1.0], device=self.device)
        rows = self.places.sum(table).tolist()
        return [[x / row[-1] for x in row[:-1]] if row[-1] else [] for row in rows]

    def noise(self) -> dict[str, float]:
        """The wanted times that are still uncertain, each with its largest error on any rank.
        All ranks must call this."""
        own = self.lines.errors()
        for chain in self.wanted:
            own |= chain.errors()
        found: dict[str, float] = {}
        for errors in self.places.gather(own):
            found |= {name: max(error, found.get(name, 0.0)) for name, error in errors.items()}
        return {name: error for name, error in found.items() if error > NOISE_LIMIT}


def _ask_for(num_bytes: int, device: torch.device) -> None:
    """Before blocks run, which exchange: a rank that fails then leaves others waiting."""
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ProfileError(
            f"measuring needs up to {num_bytes / 1e9:.1f} GB on {device}, where is not as much",
            where="the blocks of the model", fix="close what else runs there, or plan without "
            "measuring: `autopar plan --cluster`, parallelize(model, plan=)") from error


@cache
def _typical(cluster: Cluster, tp: int) -> frozenset[int]:
    """Ranks that tell what their class takes: those in tensor groups of one class. Others wait in
    their exchanges for slower ones; they tell only where their class has no such group."""
    class_of = cluster.class_of
    pure = {r for r in range(cluster.num_devices)
            if len(set(class_of[r - r % tp : r - r % tp + tp])) == 1}
    missing = set(class_of) - {class_of[r] for r in pure}
    return frozenset(pure | {r for r, k in enumerate(class_of) if k in missing})


def _trained_sizes(traced: Traced) -> list[int]:
    infos = traced.graph.params.values()
    return [info.num_elements for info in infos if info.trainable and not info.buffer]


def _values(noun: BlockCost | Overheads) -> list[float]:
    return [float(getattr(noun, name)) for name in noun.__struct_fields__]


def _kept(need: BlockNeed) -> BlockNeed:
    """The same block with its forward kept."""
    return replace(need, recompute=False)


def _chains(blocks: Sequence[BlockNeed], traced: Traced) -> dict[Chain, list[BlockNeed]]:
    """Blocks in the order of the model."""
    order = list(traced.graph.kinds)
    found: dict[Chain, list[BlockNeed]] = {}
    for need in sorted(dict.fromkeys(blocks), key=lambda n: (order.index(n.kind), n.key, n.rows)):
        found.setdefault(chain_of(need), []).append(need)
    return found


def _chains_for(known: Collection[Chain], blocks: Iterable[BlockNeed]) -> list[Chain]:
    """The chains that measure some blocks: at their rows, or at the nearest on both sides."""
    asked = {chain_of(need) for need in blocks}
    found = set()
    for chain in asked:
        like = {c.rows: c for c in known if c[:3] == chain[:3]}
        found |= {like[rows] for rows in around(chain.rows, like)}
    return [chain for chain in known if chain in found]

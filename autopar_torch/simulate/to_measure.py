"""What has to be measured before plans can be simulated: the simulator runs and is listened to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..cluster import Cluster
from ..model import ModelGraph
from ..plan import Plan
from ..profile import EXCHANGE_CORE, BlockCost, BlockNeed, Curve, CurveNeed, Lookup, Profile
from .costs import Costs
from .jitter import usual
from .tasks import StepTasks


class _Listener(Lookup):
    """A profile that answers with ones, and notes what the simulator looks up."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(Profile(cluster, ()))
        self.asked: dict[CurveNeed, None] = {}

    def cost(self, kind: str, sharding: str, rows: int, device: int = 0) -> BlockCost:
        return BlockCost(rows, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def curve(self, op: str, ranks: Sequence[int]) -> Curve:
        return _Asked(op, tuple(ranks), self.asked)  # type: ignore[return-value]


class _Asked:
    """A curve that notes the sizes that are looked up."""

    core, held, beside = EXCHANGE_CORE, 0.0, 1.0

    def __init__(self, op: str, ranks: tuple[int, ...], asked: dict[CurveNeed, None]) -> None:
        self.op, self.ranks, self.asked = op, ranks, asked

    def seconds(self, num_bytes: float) -> float:
        self.asked[CurveNeed(self.op, self.ranks, num_bytes)] = None
        return 1.0


def needs_of(plans: Iterable[Plan], graph: ModelGraph, cluster: Cluster,
             num_rows: int) -> tuple[list[BlockNeed], list[CurveNeed]]:
    """Cells and communications of all plans, each once."""
    blocks: dict[BlockNeed, None] = {}
    listener = _Listener(cluster)
    for plan in plans:
        StepTasks(Costs(plan, graph, listener), num_rows, usual(plan)).build()
        blocks |= dict.fromkeys(block_needs(plan, graph, num_rows))
    return list(blocks), list(listener.asked)


def block_needs(plan: Plan, graph: ModelGraph, num_rows: int) -> Iterable[BlockNeed]:
    """The cells of one plan, each as often as it occurs."""
    for replica, spans in zip(plan.replicas, plan.micro_batches(num_rows), strict=True):
        for stage in replica.stages:
            for block in range(*(stage.blocks or (0, 0))):
                recompute = not graph.kind_of(block).runs_once and stage.recompute
                for rows in {end - start for start, end in spans}:
                    kind, sharding = graph.blocks[block].kind, plan.sharding(stage, block)
                    yield BlockNeed(kind, sharding, rows, recompute, kind in plan.compiled)

"""Claims about thousands of ranks, of which one is here: nothing that it does grows with them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar_torch as ap
import test_uneven_ranks as uneven
import zoo
from autopar_torch.plan import check, peer_groups
from autopar_torch.run import shardings, tracing
from autopar_torch.run.model import ParallelModel
from autopar_torch.run.totals import total_norm
from autopar_torch.run.world import World
from autopar_torch.shard.atoms import atoms
from autopar_torch.shard.holdings import all_holdings
from autopar_torch.shard.reduction import boxes_of, own_of, shares_of
from autopar_torch.trace import Traced, trace
from autopar_torch.trace.call import Call, take_apart
from fakes import fake_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
import big_models
from slow import slowly

CPU = torch.device("cpu")
CASES = {
    "7b": (big_models.llama_7b, {"dp": 1024, "zero": 3}),
    "70b": (big_models.llama_70b, {"tp": 8, "pp": 4, "dp": 32, "zero": 1}),
    "405b": (big_models.llama_405b, {"tp": 8, "pp": 16, "dp": 128, "zero": 1}),
}


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Rank:
    """Rank 0 of the world of a plan, with a model on `meta`: shapes, no values."""

    def __init__(self, model: nn.Module, call: Call, plan: ap.Plan) -> None:
        self.model, self.call, self.given = model, call, plan
        self.tracer = tracing.tracer(model, CPU, None, plan.precision, False)
        self.traced = self.tracer(call, True, ("loss",))
        self.world = World(0, plan.devices[-1] + 1)
        self.parallel = ParallelModel(model, self.world, CPU, lambda *_: None, self.tracer,
                                      lambda _: self.tracer)

    def adopt(self) -> None:
        check(self.given, self.world.size)
        plan = shardings.agreed(self.world, self.given, self.traced,
                                8 * self.given.num_micro_batches)
        values = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self.parallel.adopt(plan, (self.traced, self.call, None),
                            lambda n: values[n].detach().clone())

    def norm(self) -> None:
        total_norm([p.grad for p in self.parallel.parameters() if p.grad is not None], 2.0)

    def with_gradients(self) -> None:
        for param in self.parallel.parameters():
            param.grad = torch.zeros_like(param)


@pytest.mark.parametrize("name", ["7b", "70b", *slowly("405b")])
def test_a_rank_of_thousands_takes_up_a_plan_in_10_s_and_clips_in_1(name: str) -> None:
    make, degrees = CASES[name]
    plan = ap.Plan.uniform(precision="bfloat16", **degrees)
    model, batch = make()
    with fake_ranks(plan.devices[-1] + 1):
        rank = Rank(model, take_apart((), batch)[0], plan)
        assert cpu_seconds(rank.adopt) < 10
        rank.with_gradients()
        assert cpu_seconds(rank.norm) < 1


def num_calls(work: Callable[[], object]) -> int:
    """Python functions that are called."""
    count = 0

    def called(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("zero", [3, *slowly(0, 1)])
def test_clipping_does_as_much_on_4_ranks_as_on_1024(zero: int) -> None:
    counts = []
    for dp in (2, 512):
        with fake_ranks(2 * dp):
            given = take_apart((), zoo.batch("nanogpt", 2))[0]
            rank = Rank(zoo.build("nanogpt").to("meta"), given,
                        ap.Plan.uniform(tp=2, dp=dp, zero=zero))
            rank.adopt()
            rank.with_gradients()
            counts.append([num_calls(rank.norm) for _ in range(3)][1:])
    assert counts[0] == counts[1] and counts[0][0] > 10


@pytest.fixture(scope="module")
def nanogpt() -> Traced:
    return trace(zoo.build("nanogpt"), take_apart((), zoo.batch("nanogpt", 2))[0])


PLANS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2}, {"tp": 2, "dp": 3, "zero": 1}, {"pp": 2, "dp": 2, "zero": 3},
    {"tp": 4, "dp": 2, "zero": 2, "tp_mesh": (2, 2)}, {"tp": 2, "pp": 2, "virtual": 2, "zero": 1},
    {"dp": 7, "zero": 1}, {"dp": 100, "zero": 3},
]


@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_what_a_rank_knows_by_itself_is_what_all_boxes_together_say(
        degrees: dict[str, Any], nanogpt: Traced) -> None:
    graph = nanogpt.graph
    plan = shardings.complete(shardings.fit(ap.Plan.uniform(**degrees), graph), nanogpt, 1)
    holdings = all_holdings(plan, graph)
    told = {rank: shares_of(plan, graph, rank, holdings) for rank in plan.devices}
    for name, everyone in holdings.items():
        found = atoms(boxes_of(plan, graph, name, everyone))
        shape = graph.params[name].shape
        for rank in plan.devices:
            own = own_of(told[rank].get(name), shape, everyone)
            assert own is not None and own.speaker == found[0].holders[0]
            mine = [atom for atom in found if rank in atom.holders]
            assert [tuple(own.boxes)] == [a.boxes for a in mine] or not (own.boxes or mine)
            assert own.speaks == any(a.holders[0] == rank for a in mine) or not own.boxes


@pytest.mark.parametrize("case", ["tp2 + tp1, ZeRO 1", "pieces, pp2 + pp1, ZeRO 3",
                                  "1 idles, ZeRO 2", "rows 2:1:1, ZeRO 3"])
def test_ranks_agree_on_who_speaks_where_their_pieces_differ(case: str, nanogpt: Traced) -> None:
    graph, plan = nanogpt.graph, uneven.PLANS[3][case]
    plan = shardings.complete(shardings.fit(plan, graph), nanogpt, 1)
    for name, everyone in all_holdings(plan, graph).items():
        owns = [own_of(shares_of(plan, graph, rank).get(name), graph.params[name].shape, everyone)
                for rank in plan.devices]
        assert len({own and own.speaker for own in owns}) == 1


def _groups(plan: ap.Plan, graph: Any) -> Iterator[list[tuple[int, ...]]]:
    for block in range(len(graph.blocks)):
        found, alike = peer_groups(plan, graph, block)
        if found:
            assert alike
            yield found


def test_replicas_join_the_statistics_of_a_batch_place_by_place() -> None:
    traced = trace(zoo.build("resnet"), take_apart((), zoo.batch("resnet", 2))[0])
    plan = shardings.fit(ap.Plan.uniform(pp=2, dp=3), traced.graph)
    assert {ranks for found in _groups(plan, traced.graph) for ranks in found} == {
        (0, 2, 4), (1, 3, 5)}

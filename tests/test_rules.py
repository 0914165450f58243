"""Claims about how ops may be split: rules that are found by running an op, and experts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers its grouped product
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.cluster import GPU, NVLINK
from autopar_torch.model import ROWS, TensorInfo
from autopar_torch.shard.collectives import Axis, VocabPart
from autopar_torch.shard.eliminate import minimum
from autopar_torch.shard.experts import OwnExperts, OwnRows
from autopar_torch.shard.price import Prices
from autopar_torch.shard.rules import ShapedOp, factors_of, has_rule
from autopar_torch.shard.solve import read_out, tabulate, ways
from autopar_torch.shard.strategies import strategies
from autopar_torch.trace import discover, trace
from autopar_torch.trace.call import take_apart
from autopar_torch.trace.serialize import pack, unpack
from nets import near

aten = torch.ops.aten
B, S, H = ROWS, 16, 64


def floats(*shape: int) -> TensorInfo:
    return TensorInfo(shape, "float32")


def ids(*shape: int) -> TensorInfo:
    return TensorInfo(shape, "int64")


def node(op: Any, *args: Any) -> fx.Node:
    """A call in a graph of its own, with what it makes."""
    graph = fx.Graph()

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(v) for v in value]
        if not isinstance(value, TensorInfo):
            return value
        made = graph.placeholder(f"p{len(graph.nodes)}")
        made.meta["info"] = value
        return made

    new = graph.call_function(op, tuple(map(place, args)))
    empty = fx.node.map_arg(new.args, lambda n: torch.empty(
        n.meta["info"].shape, dtype=getattr(torch, n.meta["info"].dtype), device="meta"))
    made = new.target(*empty)  # type: ignore[operator]
    infos = [TensorInfo(tuple(o.shape), str(o.dtype).removeprefix("torch."))
             for o in (made if isinstance(made, (list, tuple)) else [made])]
    new.meta["info"] = tuple(infos) if isinstance(made, (list, tuple)) else infos[0]
    return new


def split(found: fx.Node) -> set[str]:
    """Every way to split it, as text."""
    discover.note_factors([found])
    return {s.text for s in strategies(found.graph)[found] if s.is_split}


RULES: dict[str, tuple[fx.Node, str]] = {
    "logsumexp": (node(aten.logsumexp.default, floats(B, S, H), [-1]), "S0>S0 S1>S1"),
    "unbind": (node(aten.unbind.int, floats(B, S, 3, H), 2), "S0>S0 S1>S1 S3>S2"),
    "stack": (node(aten.stack.default, [floats(B, S), floats(B, S)], 1), "S0,S0>S0 S1,S1>S2"),
    "einsum": (node(aten.einsum.default, "bqd,bkd->bqk", [floats(B, S, H), floats(B, 5, H)]),
               "S0,S0>S0 S1,R>S1 R,S1>S2 S2,S2>P"),
    "parts of unequal sizes": (node(aten.split_with_sizes.default, floats(B, S, H), [32, 16, 16],
                                    -1), "S0>S0 S1>S1"),
    "index in the middle": (node(aten.index.Tensor, floats(B, S, H), [None, ids(5)]),
                            "S0,R>S0 R,S0>S1 S2,R>S2"),
    "index of a weight": (node(aten.index.Tensor, floats(8, H), [ids(B, S)]),
                          "R,S0>S0 R,S1>S1 S1,R>S2 S0,R>P"),
    "rows by number": (node(aten.index.Tensor, floats(B, H), [ids(5)]), "R,S0>S0 S1,R>S1"),
    "repeat": (node(aten.repeat.default, floats(B, S, H), [1, 1, 2]), "S0>S0 S1>S1 S2>S2/2"),
    "rows repeated": (node(aten.repeat.default, floats(B, H), [2, 4, 1]), "S0>S1/4 S1>S2"),
    "expand_as": (node(aten.expand_as.default, floats(B, S, 1), floats(B, S, H)),
                  "S0,S0>S0 S1,S1>S1 R,S2>S2"),
    "nll_loss": (node(aten.nll_loss_nd.default, floats(B, H), ids(B), None, 2), "S0,S0>P"),
    "hardswish": (node(aten.hardswish.default, floats(B, H)), "S0>S0 S1>S1"),
    "randn_like": (node(aten.randn_like.default, floats(B, H)), "S0>S0 S1>S1"),
    "bernoulli_": (node(aten.bernoulli_.float, floats(B, H), 0.5), "S0>S0 S1>S1"),
    "amax": (node(aten.amax.default, floats(B, S, H), [1]), "S0>S0 S2>S1"),
    "sum": (node(aten.sum.dim_IntList, floats(B, S), [1]), "S0>S0 S1>P"),
    "new numbers for rows": (node(aten.new_ones.default, floats(B, H), [B, 3]), "S0>S0"),
    "new numbers": (node(aten.new_ones.default, floats(B, 8), [9, 3]), "S0>R S1>R"),
    "std": (node(aten.std.dim, floats(B, S, H), [1]), "S0>S0 S2>S1"),
    "one row written": (node(aten.select_scatter.default, floats(B, S, 4), floats(B, 4), 1, 0),
                        "S0,S0>S0 S2,S1>S2"),
    "some rows written": (node(aten.slice_scatter.default, floats(B, S), floats(B, 2), 1, 0, 2),
                          "S0,S0>S0"),
    "scatter": (node(aten.scatter.src, floats(B, S), 1, ids(B, 4), floats(B, 4)), "S0,S0,S0>S0"),
    "a far diagonal": (node(aten.tril.default, floats(B, 9), 20), ""),
    "what depends on what comes before": (node(aten.logcumsumexp.default, floats(B, S), 0),
                                          "S1>S1"),
    "values in the order of a mask": (node(aten.masked_scatter.default, floats(B, S),
                                           TensorInfo((B, S), "bool"), floats(B, S)), ""),
    "depthwise convolution": (node(aten.conv1d.default, floats(B, H, S), floats(H, 1, 3), None,
                                   [1], [1], [1], H), "S0,R>S0 S1,S0>S1"),
    "experts": (node(torch.ops.transformers.grouped_mm_fallback.default, floats(B, H),
                     floats(4, H, S), TensorInfo((4,), "int32")),
                "R,S2,R>S1 S1,S1,R>P R,S0,R>P"),
}


@pytest.mark.parametrize("name", RULES)
def test_an_op_may_be_split_in_these_ways_and_no_others(name: str) -> None:
    found, wanted = RULES[name]
    assert split(found) == set(wanted.split())


def test_discovery_takes_under_a_second_and_is_done_once() -> None:
    def linear_in_both() -> fx.Node:
        return node(aten.einsum.default, "bqhd,bkhd->bhqk", [floats(B, S, 4, 8)] * 2)

    start = time.process_time()
    discover.evidence(linear_in_both())
    assert time.process_time() - start < 1
    first = discover.evidence(linear_in_both())
    assert first is discover.evidence(linear_in_both())


@pytest.mark.skipif(not discover._reviewed(), reason="the file was made with another torch")
def test_what_is_in_the_file_is_what_is_found() -> None:
    for found in (node(aten.numpy_T.default, floats(8, 9)), node(
            aten.einsum.default, "bclsh,bcshp->bclhp", [floats(B, 1, 16, 16, 4),
                                                        floats(B, 1, 16, 4, 8)])):
        args = torch.utils._pytree.tree_flatten((list(found.args), dict(found.kwargs)))
        fresh = discover._tried(found, *args, discover._image(found))
        kept = discover.evidence(found)
        assert kept == fresh and any(kept is own for own in discover._reviewed().values())


def test_private_and_writing_ops_are_never_run() -> None:
    for op in (aten._softmax_backward_data.default, aten.index_put_.default):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["info"] = floats(4)
        new = graph.call_function(op, (x, x, 0, torch.float32))
        discover.note_factors([new])
        assert not has_rule(new)


@pytest.mark.parametrize(("groups", "parts", "is_cut"),
                         [(1, 2, False), (3, 2, False), (4, 2, True), (4, 4, True), (6, 4, False)])
def test_no_group_of_a_group_norm_is_cut(groups: int, parts: int, is_cut: bool) -> None:
    found = node(aten.group_norm.default, floats(ROWS, 12, 3), groups)
    texts = {way.text for way in ways(found.graph, (parts,))[found]}
    assert ("S1>S1" in texts) == is_cut, texts


def test_no_result_is_cut_where_no_input_is() -> None:
    for found, _ in RULES.values():
        assert all(factor.ins for factor in factors_of(ShapedOp(found)))
    item = fx.Graph()
    parts = item.placeholder("parts")
    parts.meta["info"] = (floats(B, 16), floats(B, 8))
    part = item.call_function(lambda x, k: x[k], (parts, 1))
    part.meta["info"] = floats(B, 8)
    part.target.__name__ = "getitem"  # type: ignore[union-attr]
    assert [s.text for s in strategies(item)[part] if s.is_split] == ["S0>S0"]


# --- experts --------------------------------------------------------------------------------------

NUM_EXPERTS, WIDTH, INNER = 4, 9, 7  # odd: only experts can be cut
fallback = torch.ops.transformers.grouped_mm_fallback.default


class Experts(nn.Module):
    """Each token goes to the best two of some experts, which multiply its value twice."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, inner))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, inner, width))
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS, width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort(stable=True)
        ends = F.one_hot(expert, NUM_EXPERTS).sum(0).cumsum(0, dtype=torch.int32)
        inner = F.silu(fallback(x[order // 2], self.up, ends))
        outer = fallback(inner, self.down, ends) + self.bias[expert]
        outer = outer * weights.flatten()[order, None]
        return F.mse_loss(outer[order.argsort()].view(*chosen.shape, -1).sum(1), y)


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x if seed else x[:1].expand(12, -1).contiguous(), y  # once experts without tokens


class Many(nn.Module):
    """Ops whose rules are found, and those whose sizes become local; copies of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head, self.scale = nn.Linear(16, 32), nn.Linear(32, 6), nn.Parameter(
            torch.randn(32))
        self.mix = nn.Conv1d(8, 16, 3, padding=1, groups=8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.hardswish(self.fc(self.mix(x).transpose(1, 2)))
        h = h.view_as(h) * self.scale.expand_as(h) + h.std(-1, keepdim=True)
        a, b, c = h.split_with_sizes([16, 8, 8], -1)
        h = torch.cat([a.logsumexp(1, keepdim=True) + a, b.repeat(1, 1, 2) + c.repeat(1, 1, 2)], -1)
        h = torch.stack(h.unbind(1), 1)[:, torch.tensor([0, 3, 1])].amax(1)
        h = (h.repeat(3, 1).view(3, -1, 32) * torch.tensor([1.0, 2.0, -1.5])[:, None, None]).sum(0)
        return F.nll_loss(self.head(h).log_softmax(-1), y)


def claim_ops_whose_rules_are_found_train_as_in_one_process() -> None:
    torch.manual_seed(0)
    plain, y = Many(), torch.arange(7) % 6
    y[:2] = -100
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(tp=2, dp=2))
    x = torch.randn(7, 8, 8)
    assert near(model(x, y), plain(x, y))
    model(x, y).backward()
    plain(x, y).backward()
    for optimizer in (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)):
        optimizer.step()
    state = model.state_dict()
    assert all(near(state[name], value) for name, value in plain.state_dict().items())


def claim_experts_that_are_shared_out_train_as_in_one_process() -> None:
    torch.manual_seed(0)
    plain = Experts()
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(tp=4))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for seed in range(3):
        losses = [m(*_batch(seed)) for m in (model, plain)]
        assert near(*losses), (seed, losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert all(near(state[name], value) for name, value in plain.state_dict().items())
    assert "R,S0,R>P" in {op for own in model.plan.shardings for op in own.ops.values()}


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_4_ranks(name: str) -> None:
    claims.hold(__name__, name, 4)


Module = Callable[[VocabPart], nn.Module]
OWN: dict[str, tuple[Module, Callable[[Tensor, Tensor, Tensor], list[Any]]]] = {
    "rows of a weight": (OwnRows, lambda x, w, ends: [w, [ends.cumsum(0) % 5 - 2]]),
    "experts": (lambda part: OwnExperts(part, fallback), lambda x, w, ends: [x, w, ends]),
    "experts by torch": (lambda part: OwnExperts(part, aten._grouped_mm.default),
                         lambda x, w, ends: [x, w, ends]),
}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", OWN)
def test_what_the_owners_make_sums_to_the_whole(name: str, parts: int) -> None:
    make, arguments = OWN[name]
    torch.manual_seed(0)
    x, weight, dy = torch.randn(16, 8), torch.randn(4, 8, 12), torch.randn(16, 12)
    for ends in ([3, 3, 9, 16], [0, 0, 0, 16], [4, 8, 12, 14]):
        results = []
        for count in (1, parts):  # a single part is the whole
            own_x, own_w = (t.clone().requires_grad_() for t in (x, weight))
            made = [make(VocabPart((Axis(None, count, k, ()),)))(*arguments(
                own_x, own_w.chunk(count)[k], torch.tensor(ends, dtype=torch.int32)))
                for k in range(count)]
            total = torch.stack(made).sum(0)
            (total * (dy if total.dim() == 2 else 1.0)).sum().backward()
            results.append((total, own_w.grad, torch.zeros(1) if own_x.grad is None
                            else own_x.grad))
        torch.testing.assert_close(*results)
        if name != "rows of a weight":
            plain = fallback(x, weight, torch.tensor(ends))
            torch.testing.assert_close(results[1][0].detach(), plain)


def _traced_experts(width: int = WIDTH, inner: int = INNER) -> Any:
    with torch.device("meta"):
        model, x = Experts(width, inner), torch.zeros(12, width)
    return trace(model, take_apart((x, x), {})[0])


def test_experts_are_cut_where_they_are_cheapest() -> None:
    traced = _traced_experts(2049, 1025)
    program = traced.programs[traced.graph.blocks[0].kind]
    for parts in (2, 4):
        prices = Prices(GPU, (NVLINK,), 0.0, 1000)
        table = tabulate(program, (parts,), prices)
        sizes = {slot: len(forms) for slot, forms in table.borders.items()} | dict(table.left)
        best = minimum(sizes, table.solution.tables)
        ops = read_out(table, "", {v: best.values[v] for v in table.solution.kept}).ops
        assert [text for name, text in ops.items() if "grouped" in name] == ["R,S0,R>P"] * 2
        assert ops["sum_2"] == "P>P"  # reduced once the two values of each token are one


def test_what_was_found_travels_with_the_trace() -> None:
    traced = _traced_experts()
    told = unpack(pack(traced))
    for kind, graph in traced.programs.items():
        want = [n.meta.get("factors", ()) for n in graph.nodes]
        assert [n.meta["factors"] for n in told.programs[kind].nodes] == want  # type: ignore[union-attr]
    assert any(n.meta.get("factors") for g in traced.programs.values() for n in g.nodes)

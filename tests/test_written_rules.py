"""Claims about the rules that stand in the table: what they say is what the op does in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from autopar_torch.model import TensorInfo
from autopar_torch.shard.rules import ShapedOp, factors_of, owned
from autopar_torch.trace import discover
from test_rules import B, H, S, aten, floats, ids, node

X = floats(B, S, H)
MASK = TensorInfo((B, 1, H), "bool")
# Left out is what lowering changes: a bias that is added once, a mean of parts, counts of groups.
CALLS: dict[str, tuple[Any, ...]] = {
    "padded": (aten.pad.default, X, [1, 1]), "padded rows": (aten.pad.default, X, [0, 0, 2, 1]),
    "moved by one place": (aten.pad.default, X, [0, 0, 1, -1]),
    "moved back": (aten.constant_pad_nd.default, X, [0, 0, -1, 1]),
    "edges repeated": (aten.pad.default, X, [2, 1], "replicate"),
    "images pooled": (aten.max_pool2d.default, floats(B, 8, S, S), [3, 3], [1, 1], [1, 1]),
    "one image pooled": (aten.max_pool2d.default, X, [3, 3], [1, 1], [1, 1]),
    "one series pooled": (aten.avg_pool1d.default, floats(B, S), [3], [1], [1]),
    "one image convolved": (aten.conv2d.default, floats(8, S, S), floats(8, 8, 3, 3), None, [1, 1],
                            [1, 1]),
    "images convolved": (aten.conv2d.default, floats(B, 8, S, S), floats(12, 8, 3, 3), None),
    "scaled up": (aten.upsample_nearest1d.vec, floats(B, 8, S), None, [2.0]),
    "rolled": (aten.roll.default, X, [1], [1]), "rolled as one": (aten.roll.default, X, [1]),
    "flipped": (aten.flip.default, X, [1]), "summed up": (aten.cumsum.default, X, 1),
    "sorted": (aten.sort.default, X, 1), "the largest": (aten.topk.default, X, S, 1),
    "below a diagonal": (aten.tril.default, floats(B, S, S), -1),
    "repeated": (aten.repeat.default, X, [2, 1, 1, 1]),
    "some": (aten.slice.Tensor, X, 1, 1, 9), "all": (aten.slice.Tensor, X, 1, 0, S),
    "one": (aten.select.int, X, 1, 3), "each": (aten.unbind.int, X, 1),
    "one written": (aten.select_scatter.default, X, floats(B, H), 1, 0),
    "a table": (aten.embedding.default, floats(9, H), ids(B, S)),
    "a table of rare words": (aten.embedding.default, floats(9, H), ids(B, S), -1, True),
    "looked up": (aten.gather.default, X, 2, ids(B, S, H)),
    "rows looked up": (aten.gather.default, X, 0, ids(B, S, H)),
    "stacked": (aten.stack.default, [floats(B, S), floats(B, S)], 1),
    "joined": (aten.cat.default, [floats(B, S), floats(B, 8)], -1),
    "sum": (aten.sum.dim_IntList, X, [0, 2]), "sum of all": (aten.sum.default, X),
    "softmax": (aten.softmax.int, X, -1), "added": (aten.add.Tensor, X, floats(B, 1, H)),
    "attention": (aten.scaled_dot_product_attention.default, *[floats(B, 4, S, H)] * 3,
                  floats(B, 1, S, S)),
    "causal attention": (aten.scaled_dot_product_attention.default, *[floats(B, 4, S, H)] * 3,
                         None, 0.0, True),
    "norm": (aten.layer_norm.default, X, [S, H], floats(S, H), floats(S, H)),
    "matrices": (aten.matmul.default, floats(B, 4, S, H), floats(H, 8)),
    "matrices and a vector": (aten.matmul.default, X, floats(H)),
    "a vector and a matrix": (aten.matmul.default, floats(H), floats(H, S)),
    "a vector and matrices": (aten.matmul.default, floats(S), X),
    "two vectors": (aten.matmul.default, floats(H), floats(H)),
    "turned": (aten.transpose.int, X, 1, 2), "a vector turned": (aten.t.default, floats(B)),
    "permuted": (aten.permute.default, X, [2, 0, 1]),
    "chosen": (aten.where.self, MASK, X, floats(H)),
    "indexed twice": (aten.index.Tensor, X, [None, ids(5), ids(5)]),
    "indexed apart": (aten.index.Tensor, floats(8, S, H), [ids(5), None, ids(5)]),
    "losses": (aten.mse_loss.default, X, X, 0),
}


def in_pieces(called: fx.Node, ins: dict[int, int], out: int | None) -> bool:
    """Whether halves, run one by one, join to what the whole call makes."""
    leaves, spec = tree_flatten((list(called.args), dict(called.kwargs)))
    trial = discover._trial(called, leaves, spec, discover._image(called), 0)
    (first, dim), *_ = ins.items()
    halves = torch.arange(trial.leaves[trial.at[first]].shape[dim]).tensor_split(2)
    return discover._joins(trial, ins, out, list(halves))


@pytest.mark.parametrize("name", CALLS)
def test_a_written_rule_is_what_the_op_does_in_pieces(name: str) -> None:
    called = node(*CALLS[name])
    op = ShapedOp(called)
    wrong = [f for f in factors_of(op) if not owned(op, f) and not in_pieces(called, f.ins, f.out)]
    assert not wrong


@pytest.mark.parametrize("called", [
    node(aten.sum.dim_IntList, floats(), [0]), node(aten.softmax.int, floats(), -1),
    node(aten.t.default, floats()), node(aten.topk.default, floats(), 1, 0)])
def test_a_number_cannot_be_split(called: fx.Node) -> None:
    assert factors_of(ShapedOp(called)) == []


@pytest.mark.parametrize("targets", [ids(B), ids(B, S), floats(B, S, S), floats(S)])
def test_a_loss_is_never_cut_along_what_its_targets_do_not_have(targets: TensorInfo) -> None:
    logits = floats(*targets.shape) if targets.dtype == "float32" else floats(
        B, 8, *targets.shape[1:])
    graph = fx.Graph()
    given = [graph.placeholder("x"), graph.placeholder("y")]
    for place, info in zip(given, (logits, targets), strict=True):
        place.meta["info"] = info
    called = graph.call_function(torch.nn.functional.cross_entropy,
                                 (*given, None, None, -100, 0.0))
    called.meta["info"] = TensorInfo((), "float32")
    for factor in factors_of(ShapedOp(called)):
        if 1 in factor.ins:
            assert logits.shape[factor.ins[0]] == targets.shape[factor.ins[1]]
            assert factor.ins[0] != 1

"""How an op may be split, as a table of factors: a dim of every input, and of the output or none.

An op without a rule is replicated: always right, only slower, and reported. To add a rule, give
`_RULES` the name of the op and a function that lists its factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from ..model import ROWS, TensorInfo

Shape = tuple[int, ...]


class DimFactor(NamedTuple):
    """Input position -> dim, and the output's dim; None: it is summed over."""

    ins: dict[int, int]
    out: int | None


# Ops that a rank may do for its part of the first dim of this input, with zeros for the rest.
OWNED = {"embedding": 0, "index": 0, "_grouped_mm": 1, "grouped_mm_fallback": 1}
# Where a product has its input, its weight and its bias.
OPERANDS = {"linear": (0, 1, 2), "matmul": (0, 1, 2), "mm": (0, 1, 2), "addmm": (1, 2, 0)}


class ShapedOp:
    """What rules look at: shapes of the tensor inputs and of the (first) output."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.name = node, op_name(node)
        self.inputs = [n for n in node.all_input_nodes if n.meta.get("info") is not None]
        self.shapes = [_shape(n.meta["info"]) for n in self.inputs]
        self.out = _shape(node.meta.get("info"))
        self.args: tuple[Any, ...] = node.args
        self.kwargs = node.kwargs

    def at(self, index: int, name: str = "") -> int | None:
        """Input position of an argument, None if absent or no tensor."""
        value = self.arg(index, name)
        return self.inputs.index(value) if isinstance(value, fx.Node) else None

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def dim(self, index: int, rank: int, name: str = "dim", default: int = 0) -> int:
        return int(self.arg(index, name, default)) % rank


def _shape(info: Any) -> Shape:
    first = info[0] if isinstance(info, tuple) else info
    return first.shape if isinstance(first, TensorInfo) else ()


def owned(op: ShapedOp, factor: DimFactor) -> bool:
    """Whether a factor has to be lowered so: pieces must then be runs of indices."""
    place = OWNED.get(op.name)
    return place is not None and factor == DimFactor({op.at(place): 0}, None)  # type: ignore[dict-item]


def op_name(node: fx.Node) -> str:
    """`linear`, `layer_norm`, ...: the op without namespace and overload."""
    if isinstance(node.target, OpOverload):
        return node.target._overloadpacket.__name__
    return getattr(node.target, "__name__", str(node.target))


def is_mutable(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    if op_name(node) == "batch_norm":
        return bool(node.args[5])
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


_IF = {"p", "dropout", "dropout_p", "train", "training"}  # arguments that are to be true for that


def is_random(node: fx.Node) -> bool:
    """Whether an op draws numbers, which an attention without dropout, say, does not."""
    if not has_tag(node, torch.Tag.nondeterministic_seeded):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in arguments if a.name in _IF}
    given |= {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return all(given[name] for name in _IF.intersection(given))


def writers(node: fx.Node) -> list[fx.Node]:
    """Ops that write to a value. What is written has to be taken as it lies, by all that read it,
    too: converted it would be a copy, or a part."""
    return [user for user in node.users if user.op == "call_function" and is_mutable(user)
            and node in written_by(user)]


def written_by(node: fx.Node) -> list[Any]:
    """What an op that writes writes to."""
    return [node.args[i] for i in ((3, 4) if op_name(node) == "batch_norm" else (0,))]


def _broadcast(op: ShapedOp, d: int, inputs: Iterable[int | None]) -> dict[int, int]:
    """Input -> its dim that is dim `d` of the output, broadcast from the right, if any."""
    found = {k: d - len(op.out) + len(op.shapes[k]) for k in inputs if k is not None}
    return {k: own for k, own in found.items() if own >= 0 and op.shapes[k][own] == op.out[d]}


def _same_dims(op: ShapedOp, skip: Iterable[int] = ()) -> list[DimFactor]:
    """Every output dim is the same dim of each input."""
    return [DimFactor(_broadcast(op, d, range(len(op.shapes))), d)
            for d in range(len(op.out)) if d not in skip and op.out[d] != 1]


def first_input(op: ShapedOp, skip: Iterable[int] = ()) -> list[DimFactor]:
    """Output dims are the dims of the first input; other inputs stay whole."""
    return [DimFactor({0: d}, d) for d in range(len(op.out)) if d not in skip]


def _but_dim(index: int, default: int) -> Callable[[ShapedOp], list[DimFactor]]:
    return lambda op: _same_dims(op, {op.dim(index, len(op.out), default=default)})


def _but_dims(index: int) -> Callable[[ShapedOp], list[DimFactor]]:
    """Some dims are transposed; all of them, as one, where none is named."""
    return lambda op: _same_dims(
        op, {int(d) % len(op.out) for d in op.arg(index, "dims") or range(len(op.out))}
    )


def _linear(op: ShapedOp) -> list[DimFactor]:
    x, w, bias = op.at(0), op.at(1), op.at(2, "bias")
    rank = len(op.out)
    factors = [DimFactor({x: d}, d) for d in range(rank - 1)]  # type: ignore[dict-item]
    columns = {w: 0} if bias is None else {w: 0, bias: 0}
    rows = DimFactor({x: rank - 1, w: 1}, None)  # type: ignore[dict-item]
    return [*factors, DimFactor(columns, rank - 1), rows]  # type: ignore[arg-type]


def _matmul(op: ShapedOp, first: int = 0, bias: int | None = None) -> list[DimFactor]:
    """(..., M, K) @ (..., K, N), with equal leading dims; `bias` is added to the result."""
    a, b, extra = op.at(first), op.at(first + 1), None if bias is None else op.at(bias)
    rank, ra, rb = len(op.out), len(op.shapes[a or 0]), len(op.shapes[b or 0])
    if 1 in (ra, rb):  # the other's rows (or columns), and the dim that both have
        other, summed = (a, ra - 1) if rb == 1 else (b, rb - 2)
        return [*(DimFactor({other: d}, d - (d > summed))  # type: ignore[dict-item]
                  for d in range(max(ra, rb)) if d != summed),
                DimFactor({a: ra - 1, b: max(rb - 2, 0)}, None)]  # type: ignore[dict-item]

    def ending(ins: dict[Any, int], d: int) -> DimFactor:
        return DimFactor({**ins, **_broadcast(op, d, (extra,))}, d)

    return [*(DimFactor(_broadcast(op, d, (a, b, extra)), d) for d in range(rank - 2)),
            ending({a: ra - 2}, rank - 2), ending({b: rb - 1}, rank - 1),
            DimFactor({a: ra - 1, b: rb - 2}, None)]  # type: ignore[dict-item]


def _conv(op: ShapedOp, transposed: bool = False) -> list[DimFactor]:
    x, w, bias = op.at(0), op.at(1), op.at(2, "bias")
    groups = op.arg(6, "groups", 1)
    if len(op.out) < len(op.shapes[w or 0]):
        return []  # no batch
    batch = DimFactor({x: 0}, 0)  # type: ignore[dict-item]
    cout, cin = (1, 0) if transposed else (0, 1)
    ins = {w: cout} if bias is None else {w: cout, bias: 0}
    if groups != 1:  # if every channel is a group, channels may be cut
        alone = op.shapes[w or 0][1] == 1 and not transposed
        return [batch, DimFactor({x: 1, **ins}, 1)] if alone else [batch]  # type: ignore[dict-item]
    return [batch, DimFactor(ins, 1), DimFactor({x: 1, w: cin}, None)]  # type: ignore[arg-type, dict-item]


def _layer_norm(op: ShapedOp) -> list[DimFactor]:
    return [DimFactor({0: d}, d) for d in range(len(op.out) - len(op.args[1]))]  # type: ignore[arg-type]


def _group_norm(op: ShapedOp) -> list[DimFactor]:
    affine = dict.fromkeys(range(1, len(op.inputs)), 0)
    return [DimFactor({0: 0}, 0), DimFactor({0: 1, **affine}, 1)]


def _batch_norm(op: ShapedOp) -> list[DimFactor]:
    affine = dict.fromkeys(range(1, len(op.inputs)), 0)
    channels = DimFactor({0: 1, **affine}, 1)
    return [channels] if op.args[5] else [DimFactor({0: 0}, 0), channels]


def _embedding(op: ShapedOp) -> list[DimFactor]:
    w, ids, rank = op.at(0), op.at(1), len(op.out)
    columns = DimFactor({w: 1}, rank - 1)  # type: ignore[dict-item]
    if op.arg(3, "scale_grad_by_freq", False):  # gradients depend on all ids
        return [columns]
    by_id = [DimFactor({ids: d}, d) for d in range(rank - 1)]  # type: ignore[dict-item]
    return [*by_id, columns, DimFactor({w: 0}, None)]  # type: ignore[dict-item]


def _attention(op: ShapedOp) -> list[DimFactor]:
    q, k, v, mask = op.at(0), op.at(1), op.at(2), op.at(3, "attn_mask")
    causal = bool(op.arg(5, "is_causal", False))
    rank = len(op.out)

    def masked(ins: dict[Any, int], d: int) -> DimFactor:
        return DimFactor({**ins, **_broadcast(op, d, (mask,))}, d)

    factors = [masked({q: d, k: d, v: d}, d) for d in range(rank - 2)]
    return factors if causal else [*factors, masked({q: rank - 2}, rank - 2)]


def _reduce(op: ShapedOp) -> list[DimFactor]:
    """mean and sum over dims: the rest stays, the summed dims give partial sums."""
    rank = len(op.shapes[0])
    dims = op.arg(1, "dim", None)
    summed = set(range(rank)) if not dims else {d % rank for d in dims}
    keep, out = bool(op.arg(2, "keepdim", False)), 0
    factors = []
    for d in range(rank):
        if d in summed:
            factors.append(DimFactor({0: d}, None))
            out += keep
        else:
            factors.append(DimFactor({0: d}, out))
            out += 1
    return factors


def _transpose(op: ShapedOp) -> list[DimFactor]:
    rank = len(op.out)
    order = list(range(rank))
    if op.name == "permute":
        order = [d % rank for d in op.args[1]]  # type: ignore[union-attr]
    else:
        a, b = (0, rank - 1) if op.name == "t" else (op.args[1] % rank, op.args[2] % rank)  # type: ignore[operator]
        order[a], order[b] = b, a  # type: ignore[index]
    return [DimFactor({0: source}, d) for d, source in enumerate(order)]


def _expand(op: ShapedOp) -> list[DimFactor]:
    return [DimFactor(_broadcast(op, d, (0,)), d) for d in range(len(op.out))]


def _slice(op: ShapedOp) -> list[DimFactor]:
    cut = op.dim(1, len(op.out))
    whole = op.shapes[0][cut] == op.out[cut]
    return first_input(op, () if whole else {cut})


def _select_scatter(op: ShapedOp) -> list[DimFactor]:
    x, part, rank = op.at(0), op.at(1), len(op.out)
    gone = op.dim(2, rank)
    return [DimFactor({x: d, part: d - (d > gone)}, d)  # type: ignore[dict-item]
            for d in range(rank) if d != gone]


def _select(op: ShapedOp) -> list[DimFactor]:
    rank = len(op.shapes[0])
    gone = op.dim(1, rank)
    return [DimFactor({0: d}, d - (d > gone)) for d in range(rank) if d != gone]


def _pad(op: ShapedOp) -> list[DimFactor]:
    """Numbers in pairs, of the last dim first. 1 and -1 keep the size, yet move what is there."""
    given, rank = list(op.args[1]), len(op.out)  # type: ignore[arg-type]
    return first_input(op, {rank - 1 - k // 2 for k, number in enumerate(given) if number})


def _index(op: ShapedOp) -> list[DimFactor]:
    """self[i, :, j, ...]: the indices' dims come where the indices are, first if those lie apart.
    Of the first dim every rank may have some rows: zeros come for the others."""
    given: Any = op.args[1]
    places = [i for i, value in enumerate(given) if value is not None]
    if any(given[i].meta["info"].dtype in ("bool", "uint8") for i in places):
        return []
    own = op.at(0)
    index = {op.inputs.index(given[i]): len(given[i].meta["info"].shape) for i in places}
    rank = max(index.values())
    lead = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    factors = [
        DimFactor({k: d - (rank - r) for k, r in index.items() if d >= rank - r
                   and op.shapes[k][d - (rank - r)] == op.out[lead + d]}, lead + d)
        for d in range(rank)
    ]
    kept = [d for d in range(len(op.shapes[own or 0])) if d not in places]
    factors += [DimFactor({own: d}, j + rank * (j >= lead)) for j, d in enumerate(kept)]  # type: ignore[dict-item]
    by_part = places == [0] and op.shapes[own or 0][0] % ROWS  # replicas have no such lowering
    return [*factors, DimFactor({own: 0}, None)] if by_part else factors  # type: ignore[dict-item]


def _grouped_mm(op: ShapedOp) -> list[DimFactor]:
    """Rows sorted by expert (S, K) @ weights (E, K, N), with the end of each expert's rows (E)."""
    if [len(shape) for shape in op.shapes] != [2, 3, 1]:
        return []
    return [DimFactor({1: 2}, 1), DimFactor({0: 1, 1: 1}, None), DimFactor({1: 0}, None)]


def _stack(op: ShapedOp) -> list[DimFactor]:
    new = op.dim(1, len(op.out))
    return [DimFactor(dict.fromkeys(range(len(op.inputs)), d), d + (d >= new))
            for d in range(len(op.out) - 1)]


def _made_new(op: ShapedOp) -> list[DimFactor]:
    """What is made has nothing to do with the values of the input: it may come out whole."""
    cut = [DimFactor({0: d}, k) for k, size in enumerate(op.out)
           for d, own in enumerate(op.shapes[0]) if own == size != 1]
    has_rows = any(size % ROWS == 0 for size in op.out)
    return cut if has_rows else [*cut, *(DimFactor({0: d}, -1) for d in range(len(op.shapes[0])))]


def _gather(op: ShapedOp) -> list[DimFactor]:
    cut = op.dim(1, len(op.out))
    return [DimFactor({0: d, 1: d}, d) for d in range(len(op.out))
            if d != cut and op.shapes[0][d] == op.shapes[1][d]]


def _cross_entropy(op: ShapedOp) -> list[DimFactor]:
    if len(op.shapes[0]) == 1:
        return []  # no rows
    dims = [d for d in range(len(op.shapes[0])) if d != 1]
    shares = op.shapes[0] == op.shapes[1]  # of every class, instead of one index
    by_token = [DimFactor({0: d, 1: d if shares else max(d - 1, 0)}, None) for d in dims]
    plain = op.args[3] is None and op.args[5] == 0.0 and len(op.shapes[0]) == 2 and not shares
    return [*by_token, DimFactor({0: 1}, -1)] if plain else by_token  # -1: comes out whole


def _mean_over_rows(op: ShapedOp) -> list[DimFactor]:
    return [DimFactor({0: d}, None) for d in range(len(op.shapes[0]))]


_RULES: dict[str, Callable[[ShapedOp], list[DimFactor]]] = {
    **dict.fromkeys(["to", "clone", "detach", "alias", "contiguous", "dropout", "getitem",
                     "masked_fill", "where", "broadcast_tensors", "fill",
                     "alpha_dropout", "zeros_like", "ones_like", "empty_like", "full_like",
                     "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
                     "uniform", "normal", "normal_functional", "exponential", "log_normal",
                     "cauchy", "geometric", "random", "poisson", "binomial", "_standard_gamma"],
                    _same_dims),
    **dict.fromkeys(["new_zeros", "new_ones", "new_full", "new_empty"], _made_new),
    **dict.fromkeys(["tril", "triu"], lambda op: _same_dims(
        op, {len(op.out) - 2, len(op.out) - 1})),
    "repeat": _same_dims,
    **dict.fromkeys(["type_as"], first_input),
    **dict.fromkeys(["softmax", "_softmax", "log_softmax", "cumsum", "cumprod"],
                    _but_dim(1, -1)),
    **dict.fromkeys(["multinomial", "_sample_dirichlet"],
                    lambda op: _same_dims(op, {len(op.out) - 1})),
    "flip": _but_dims(1), "roll": _but_dims(2),
    "feature_dropout": lambda op: _same_dims(op, set(range(2, len(op.out)))),  # whole channels
    **dict.fromkeys(["topk", "sort", "argsort"], lambda op: _same_dims(
        op, {op.dim(2 if op.name == "topk" else 1, len(op.shapes[0]), default=-1)})),
    "cat": _but_dim(1, 0), "linear": _linear, "matmul": _matmul, "mm": _matmul, "bmm": _matmul,
    "addmm": lambda op: _matmul(op, 1, 0), "baddbmm": lambda op: _matmul(op, 1, 0),
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], _conv),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"],
                    lambda op: _conv(op, True)),
    "layer_norm": _layer_norm, "rms_norm": _layer_norm, "group_norm": _group_norm,
    "batch_norm": _batch_norm, "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(["mean", "sum"], _reduce),
    **dict.fromkeys(["transpose", "permute", "t"], _transpose), "expand": _expand,
    "slice": _slice, **dict.fromkeys(["select", "unbind"], _select), "stack": _stack,
    "select_scatter": _select_scatter,
    "slice_scatter": lambda op: _same_dims(op, {op.dim(2, len(op.out))}),
    "pad": _pad, "constant_pad_nd": _pad,
    **dict.fromkeys(["max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d",
                     "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d",
                     "upsample_nearest2d", "upsample_bilinear2d", "upsample_nearest1d"],
                    lambda op: first_input(op, range(len(op.out) - int(op.name[-2]), len(op.out)))),
    "index": _index, **dict.fromkeys(["_grouped_mm", "grouped_mm_fallback"], _grouped_mm),
    "gather": _gather, "repeat_interleave": lambda op: first_input(op),
    "cross_entropy": _cross_entropy, "mean_over_rows": _mean_over_rows,
    **dict.fromkeys(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
                     "binary_cross_entropy_with_logits", "binary_cross_entropy"], _same_dims),
}
VIEWS = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "_unsafe_view"}
PARTS = {"split", "chunk", "split_with_sizes"}


def factors_of(op: ShapedOp) -> list[DimFactor]:
    """The factors of any op but views and parts, which strategies.py follows through the graph."""
    rule = _RULES.get(op.name, _same_dims if _is_pointwise(op.node) else _noted)
    found = rule(op) if any(op.shapes) else []  # a number has no dim
    # Without a cut input every rank has the whole result, but for sizes that lowering makes local.
    return [factor for factor in found if factor.ins or op.name == "expand"]


def _noted(op: ShapedOp) -> list[DimFactor]:
    """What tracing has found out about the op (trace/discover.py)."""
    return list(op.node.meta.get("factors", ()))


def has_rule(node: fx.Node) -> bool:
    name = op_name(node)
    return name in _RULES or name in VIEWS or name in PARTS or _is_pointwise(
        node) or bool(node.meta.get("factors"))


def _is_pointwise(node: fx.Node) -> bool:
    return has_tag(node, torch.Tag.pointwise)


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, OpOverload) and tag in node.target.tags


def flops(node: fx.Node) -> float:
    """Multiply-adds count two; only products matter."""
    op = ShapedOp(node)
    if op.name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):
        first = 1 if op.name in ("addmm", "baddbmm") else 0
        return 2.0 * math.prod(op.out) * op.shapes[op.at(first) or 0][-1]
    if op.name == "scaled_dot_product_attention":
        return 4.0 * math.prod(op.out) * op.shapes[op.at(1) or 0][-2]
    if op.name.startswith("conv"):
        weight = op.shapes[op.at(1) or 0]
        base = op.shapes[op.at(0) or 0] if "transpose" in op.name else op.out
        return 2.0 * math.prod(base) * math.prod(weight[1:])
    return 0.0

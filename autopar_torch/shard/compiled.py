"""A lowered block compiled: its ops fused, its exchanges inside, one program for all equal blocks.

The graph goes to Inductor as it is: no Python is traced, so nothing can break, and a program is
compiled again only for inputs that lie otherwise. What a compiled program may not do stays outside:
ops that draw numbers (it would draw others), write over what they are given, or send while they
compute. Weight gradients that are handed over (see `linear`) are made outside too, of what leaves
the compiled backward as the gradients of two tokens.
"""

from __future__ import annotations

import copy
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.split_module import split_module

from .collectives import Convert, VocabEmbedding
from .linear import deliver, delivers, direct_linear, outer, plain_linear, product
from .loss_sums import cross_entropy
from .moved import moved, number_of, rehearsed
from .price import VIEWS
from .rules import is_random, op_name

log = logging.getLogger("autopar_torch")
LEAST_OPS = 4  # beside views: a piece of fewer gains nothing
MOST = 8  # compilations of a kind; from then on what is new runs uncompiled
Run = Callable[..., Any]
compilations: Counter[str] = Counter()  # of each kind, in this process
failures: dict[str, str] = {}  # kind -> why some of it runs uncompiled
_programs: dict[Any, Run] = {}


def compiled(program: fx.GraphModule, kind: str) -> fx.GraphModule:
    """The program with all that gains by it compiled, in as few pieces as there can be."""
    part: dict[fx.Node, int] = {}
    outside: set[int] = set()
    number = 0
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in part:
            part[node] = part[node.args[0]]
            continue
        stays = _stays_outside(node, program)
        number += stays or number in outside
        part[node] = number
        outside |= {number} if stays else set()
    whole = split_module(program, program, lambda node: part[node], keep_original_order=True)
    for name, piece in list(whole.named_children()):
        if isinstance(piece, fx.GraphModule) and int(name.removeprefix("submod_")) not in outside \
                and _num_ops(piece) >= LEAST_OPS:
            setattr(whole, name, Piece(piece, kind))
    return whole


def _stays_outside(node: fx.Node, program: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return not isinstance(program.get_submodule(cast(str, node.target)),
                              (Convert, VocabEmbedding))
    known = not isinstance(node.target, OpOverload) or node.target.namespace == "aten"
    return not known or node.op != "call_function" or node.target is cross_entropy \
        or is_random(node)


def _num_ops(piece: fx.GraphModule) -> int:
    return sum(node.op == "call_function" and op_name(node) not in VIEWS
               for node in piece.graph.nodes)


# --- weight gradients outside ---------------------------------------------------------------------


class _Factors(NamedTuple):
    """A linear of a piece: the place of its weight among the arguments, and the shapes of its
    tokens."""

    place: int
    transposed: bool
    x: torch.Size
    y: torch.Size


class _Pure(torch.autograd.Function):
    """A linear whose weight gets no gradient; its tokens get the factors of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool,
                *_tokens: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.transposed = bias is not None, transposed
        return plain_linear(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,) = ctx.saved_tensors, grads
        dx = dy @ (weight if ctx.transposed else weight.t()) if ctx.needs_input_grad[0] else None
        return dx, None, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None, x, dy


def pure_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, x_token: Tensor,
                y_token: Tensor) -> Tensor:
    return cast(Tensor, _Pure.apply(x, weight.detach(), bias, transposed, x_token, y_token))


def _tokens(linears: Sequence[_Factors], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two for each linear, without memory of their own."""
    return tuple(weight.new_empty(()).expand(shape)
                 for linear, weight in zip(linears, weights, strict=True)
                 for shape in (linear.x, linear.y))


class _WithTokens(torch.autograd.Function):
    """Makes the tokens; what they get as gradients goes on as that of the weights."""

    @staticmethod
    def forward(ctx: Any, linears: Sequence[_Factors], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.linears, ctx.weights = linears, weights
        ctx.set_materialize_grads(False)
        return _tokens(linears, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.linears, ctx.weights, grads[::2], grads[1::2], strict=True)
        return None, *(_delivered(*found) for found in pairs)


def _delivered(linear: _Factors, weight: Tensor, x: Tensor | None,
               dy: Tensor | None) -> Tensor | None:
    if x is None or dy is None:
        return None
    factors = outer(x.flatten(0, -2), dy.flatten(0, -2), linear.transposed)
    return deliver(weight, lambda into: product(into, *factors))


# --- pieces ---------------------------------------------------------------------------------------


class Piece(nn.Module):
    """A part of a block that is compiled, once for each way in which its inputs lie."""

    def __init__(self, piece: fx.GraphModule, kind: str) -> None:
        super().__init__()
        self.kind, self.code = kind, piece.code
        self.graphs = {handing: _prepared(piece, handing) for handing in (False, True)}
        self.single = isinstance(piece.graph.output_node().args[0], fx.Node)
        self.ways: dict[Any, Run] = {}

    def forward(self, *args: Tensor) -> Any:
        way = (delivers(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
               *[(a.shape, a.stride(), a.dtype, a.device, a.requires_grad) for a in args])
        if way not in self.ways:
            self.ways[way] = self._made(way, args)
        made = self.ways[way](*args)
        return made[0] if self.single else made

    def _made(self, way: Any, args: Sequence[Tensor]) -> Run:
        graph, fake = self.graphs[way[0]], FakeTensorMode()
        with fake:
            like = [_like(a) for a in args]
            linears = _linears(graph, like)
            tokens = _tokens(linears, [like[linear.place] for linear in linears])
            like += [token.requires_grad_() for token in tokens]
        key = (graph.code, *way)
        if key not in _programs:
            _programs[key] = _program(graph, like, self.kind)
        run = _programs[key]
        if not linears:
            return run
        return lambda *given: run(*given, *cast(Any, _WithTokens.apply(
            linears, *(given[linear.place] for linear in linears))))


def _prepared(piece: fx.GraphModule, handing: bool) -> fx.GraphModule:
    """The graph that is compiled: linears in one of two forms, exchanges in a chain."""
    graph = copy.deepcopy(piece.graph)
    turn: fx.Node | None = None
    for node in list(graph.nodes):
        if node.target is direct_linear:
            _set_linear(node, handing)
        elif node.op == "call_module" and isinstance(
                convert := piece.get_submodule(node.target), Convert):
            turn = _set_moved(node, convert, turn)
    end = graph.output_node()
    if isinstance(end.args[0], fx.Node):
        end.args = (end.args,)
    return fx.GraphModule(piece, graph)


def _set_linear(node: fx.Node, handing: bool) -> None:
    tokens = []
    for name in (f"{node.name}_x", f"{node.name}_y") if handing else ():
        with node.graph.inserting_after(node.graph.find_nodes(op="placeholder")[-1]):
            tokens.append(node.graph.placeholder(name))
    x, weight, bias = (*node.args, None)[:3]
    node.target = pure_linear if handing else plain_linear
    node.args = (x, weight, bias, node.kwargs.get("transposed", True), *tokens)
    node.kwargs = {}


def _set_moved(node: fx.Node, convert: Convert, turn: fx.Node | None) -> fx.Node:
    graph, x = node.graph, node.args[0]
    with graph.inserting_before(node):
        first = turn or graph.call_method("new_zeros", (x, ()), {"dtype": torch.float32})
        both = graph.call_function(moved, (x, first, number_of(convert), list(convert.shape)))
        y, after = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return after


def _like(x: Tensor) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)


def _linears(graph: fx.GraphModule, like: Sequence[Tensor]) -> list[_Factors]:
    """The linears of a graph that hand over, in the order of their tokens."""
    found = graph.graph.find_nodes(op="call_function", target=pure_linear)
    if not found:
        return []
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    shapes = _Shapes(graph)
    with torch.no_grad():
        shapes.run(*like, *[torch.empty((), device="cpu")] * (len(names) - len(like)))
    return [_Factors(names.index(node.args[1].name), node.args[3], shapes.of[node.args[0].name],
                     shapes.of[node.name]) for node in found]


class _Shapes(fx.Interpreter):
    """Notes the shape of every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.of: dict[str, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.of[n.name] = value.shape
        return value


# --- the compiler ---------------------------------------------------------------------------------


def _program(graph: fx.GraphModule, like: Sequence[Tensor], kind: str) -> Run:
    """The graph compiled, forward and backward; or as it is, which exchanges in the same order, so
    that ranks may differ in it."""
    if compilations[kind] >= MOST:
        failures.setdefault(kind, f"it was compiled {MOST} times, for inputs that lie otherwise")
        return graph
    start = time.perf_counter()
    run = _compiled(graph, like, kind, failures)
    if run is None:
        return graph
    compilations[kind] += 1
    log.info("compiled %s in %.1f s", kind, time.perf_counter() - start)
    return run


def _compiled(graph: fx.GraphModule, like: Sequence[Tensor], kind: str,
              why: dict[str, str]) -> Run | None:
    try:
        run = compile_graph(fx.GraphModule(graph, copy.deepcopy(graph.graph)), like)
        _rehearse(run, like)
    except Exception as error:  # whatever a compiler fails with, the graph runs without it
        why[kind] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None
    return run


def refusal(device: torch.device) -> str:
    """Why nothing can be compiled here, if so: the least that there is to compile is tried."""
    graph, why = fx.Graph(), dict[str, str]()
    x = graph.placeholder("x")
    graph.output((graph.call_method("sin", (graph.call_method("cos", (x,)),)),))
    with FakeTensorMode():
        like = [torch.empty(8, device=device, requires_grad=True)]
    _compiled(fx.GraphModule({}, graph), like, "", why)
    return why.get("", "")


def compile_graph(graph: fx.GraphModule, like: Sequence[Tensor]) -> Run:
    import torch._inductor  # here, as it takes a second

    with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # not those of a checkpoint
        return cast(Run, torch._inductor.compile(graph, list(like)))


def _same(x: Tensor) -> Tensor:
    return x


def _rehearse(run: Run, like: Sequence[Tensor]) -> None:
    """Backwards are compiled when they first run, where ranks would wait for each other."""
    args = [_zeros(x) for x in like]
    with rehearsed(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        ends = [y for y in run(*args) if isinstance(y, Tensor) and y.requires_grad]
        if ends:
            torch.autograd.grad(ends, [x for x in args if x.requires_grad],
                                [torch.ones_like(y) for y in ends], allow_unused=True)


def _zeros(x: Tensor) -> Tensor:
    """As `x` lies, which may have several elements at one place."""
    size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    flat = torch.zeros(max(size, 1), dtype=x.dtype, device=x.device)
    return flat.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad)

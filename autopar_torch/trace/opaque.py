"""Modules that cannot be traced: each is one op, which calls the module itself.

Where its outputs have their rows is learnt by running it on a few rows. Nothing is known of what it
does with them, so it couples rows until a test says otherwise, and is whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx._symbolic_trace import _orig_module_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import TraceError
from ..model import ROWS
from ..shard.together import Together
from .effects import NoMessages, attributes_set
from .settings import PLAIN
from .values import as_shares, counted

MOST = 16  # tries, with more and more opaque modules
FEW = (2, 3)  # rows to learn from


class OpaqueModule:
    """Calls a module with the parameters that it is given; `bind` says which model it is of."""

    model: nn.Module | None

    def __init__(self, path: str, names: Sequence[str], spec: pytree.TreeSpec,
                 leaves: Sequence[Any]) -> None:
        self.path, self.names, self.spec, self.leaves = path, tuple(names), spec, tuple(leaves)
        self.__name__, self.model = "opaque", None

    def __repr__(self) -> str:
        return f"opaque({self.path}, {self.spec}, {self.leaves})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "model": None}

    def tree(self, *given: Any) -> Any:
        """What the module returns for its parameters, buffers and inputs, in this order."""
        state, inputs = given[: len(self.names)], iter(given[len(self.names) :])
        leaves = [next(inputs) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        module = self.model.get_submodule(self.path)  # type: ignore[union-attr]
        return functional_call(module, dict(zip(self.names, state, strict=True)), args, kwargs)

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        return tuple(x for x in pytree.tree_leaves(self.tree(*given)) if isinstance(x, Tensor))


def bind(graphs: Sequence[fx.Graph], model: nn.Module) -> None:
    """The opaque modules of a trace, which another rank may have made, are those of this model."""
    for node in (node for graph in graphs for node in graph.nodes):
        if isinstance(node.target, OpaqueModule):
            node.target.model = model
        elif isinstance(node.target, Together):
            bind([node.target.graph], model)


def calls_modules(graphs: Iterable[fx.Graph]) -> bool:
    """Whether what runs, and what gets gradients, may depend on the data."""
    targets = [node.target for graph in graphs for node in graph.nodes]
    return any(isinstance(target, OpaqueModule) or (
        isinstance(target, Together) and calls_modules([target.graph])) for target in targets)


# --- which module -----------------------------------------------------------------------------


def culprit(model: nn.Module, error: BaseException | None) -> str:
    """Path of the innermost module in whose forward an error arose; "" if it is the model's own."""
    paths, found = {id(module): path for path, module in model.named_modules()}, ""
    while error is not None:
        frame = error.__traceback__
        while frame is not None:
            path = paths.get(id(frame.tb_frame.f_locals.get("self")), "")
            found = path or found
            frame = frame.tb_next
        if found:
            return found
        error = error.__cause__ or error.__context__
    return found


def above(model: nn.Module, path: str) -> str:
    """The next module around a module that has a forward; "" if that is the model."""
    while path:
        path = path.rpartition(".")[0]
        if path and type(model.get_submodule(path)).forward is not nn.Module.forward:
            break
    return path


def alike(model: nn.Module, path: str) -> list[str]:
    """A module and all others of its class, unless that is torch's own: each try costs a trace."""
    kind = type(model.get_submodule(path))
    if kind.__module__.startswith("torch."):
        return [path]
    found = [name for name, own in model.named_modules() if name and type(own) is kind]
    return [name for name in found
            if not any(name.startswith(f"{other}.") for other in found)]


# --- while tracing ----------------------------------------------------------------------------

# One call of a module -> (what calls it, its outputs).
_shapes: dict[str, tuple[OpaqueModule, list[Any]]] = {}


@torch.library.custom_op("autopar_torch::opaque", mutates_args=())
def _stand_in_op(call: str, given: list[Tensor]) -> list[Tensor]:
    raise NotImplementedError("this op exists in traces only")


@_stand_in_op.register_fake
def _(call: str, given: list[Tensor]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype, device in _shapes[call][1]]


@contextlib.contextmanager
def stood_in(model: nn.Module, paths: Sequence[str], rows: int = ROWS) -> Iterator[None]:
    """These modules become one op each, wherever they are called in a trace of so many rows."""
    modules = {path: model.get_submodule(path) for path in paths}
    try:
        for path, module in modules.items():
            module.forward = _stand_in(model, path, module, rows)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules.values():
            vars(module).pop("forward", None)


def _stand_in(model: nn.Module, path: str, module: nn.Module, rows: int) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kept = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if strange := [x for x in kept if x is not Tensor and not isinstance(x, PLAIN)]:
            raise _refusal(path, f"is called with a {type(strange[0]).__qualname__}")
        with torch._C.DisableTorchFunction():  # which takes sizes for numbers
            unknown = any(isinstance(size, torch.SymInt) for x in inputs for size in x.shape)
        if unknown:
            raise TraceError(f"{path} is given what has sizes that depend on the data", where=path,
                             fix="put it, with what makes its input (pack_padded_sequence, say) "
                             "and reads its output, into a module, which is computed whole then")
        own = OpaqueModule(path, list(state), spec, kept)
        given, call = [*state.values(), *inputs], f"{path} {len(_shapes)}"
        infos = [(tuple(t.shape), t.dtype, t.device, getattr(t, "held", None)) for t in given]
        del module.forward
        own.model = model
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                shapes, tree = _learn(own, infos, rows)
        finally:
            module.forward = forward  # type: ignore[method-assign]
        _shapes[call] = own, shapes
        made = iter(torch.ops.autopar_torch.opaque(call, given))
        return pytree.tree_map_only(Tensor, lambda _: next(made), tree)

    return forward


def _learn(own: OpaqueModule, infos: Sequence[Any], num_rows: int) -> tuple[list[Any], Any]:
    """(shape, type, device) of the outputs in a trace, and their tree, from a run on few rows."""
    if any(type(x) is int and x and x % num_rows == 0 for x in own.leaves):
        raise _refusal(own.path, "is told the number of rows")
    with torch.random.fork_rng(devices=[]):
        trees = []
        for rows in FEW:
            torch.default_generator.manual_seed(0)
            given = [_made_up([size // num_rows * rows if size % num_rows == 0 else size
                               for size in shape], dtype) if held is None else held.clone()
                     for shape, dtype, _, held in infos]
            state = torch.get_rng_state()
            trees.append(_run_on_any(own, given))
            if not torch.equal(state, torch.get_rng_state()):
                raise _refusal(own.path, "draws random numbers")
    if any(not isinstance(x, Tensor | None) for x in pytree.tree_leaves(trees[0])):
        raise _refusal(own.path, "returns more than tensors")
    few, more = ([x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)] for tree in trees)
    if len(few) != len(more) or any(a.dim() != b.dim() for a, b in zip(few, more, strict=True)):
        raise _refusal(own.path, "returns what depends on the data")
    device = infos[0][2] if infos else torch.device("cpu")
    shapes = [tuple(_traced(own, *sizes, num_rows) for sizes in zip(x.shape, y.shape, strict=True))
              for x, y in zip(few, more, strict=True)]
    return [(shape, x.dtype, device) for shape, x in zip(shapes, few, strict=True)], trees[0]


def _run_on_any(own: OpaqueModule, given: Sequence[Tensor]) -> Any:
    """The same, where 0 is no length of a sequence, or probabilities are asked for."""
    for change in (counted, as_shares):
        try:
            return _run(own, given)
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError):
            given = [*map(change, given)]
    return _run(own, given)


def _run(own: OpaqueModule, given: Sequence[Tensor]) -> Any:
    """What it returns; it may not change its tensors, as what is put in their place is dropped."""
    names, module = own.names, own.model.get_submodule(own.path)  # type: ignore[union-attr]
    before = {name: (x, x._version) for name, x in zip(names, given, strict=False)}
    values = [x.clone() for x, _ in before.values()]  # writing to `.data` makes no new version
    after: dict[str, tuple[Tensor, int]] = {}
    hook = module.register_forward_hook(lambda module, *_: after.update(
        (name, (x, x._version)) for name, x in module.named_buffers()))
    try:
        with NoMessages(), attributes_set(nn.Module, __call__=_orig_module_call):
            tree = own.tree(*given)  # unseen by the tracer, which counts no calls that fail
    finally:
        hook.remove()
    for name, (value, version) in after.items():
        if value is not before[name][0] or version != before[name][1]:
            raise _refusal(own.path, f"changes its buffer {name}")
    for (name, (now, _)), value in zip(before.items(), values, strict=True):
        if not torch.equal(now, value):
            raise _refusal(own.path, f"changes its tensor {name}")
    return tree


def _made_up(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(sizes, dtype=dtype, device="cpu")
    return torch.randint(0, 2, sizes, device="cpu").to(dtype)


def _traced(own: OpaqueModule, few: int, more: int, num_rows: int) -> int:
    """The size of a trace that is so much for few rows, and for more."""
    if few == more:
        return few
    each = few // FEW[0]
    if (few, more) != (each * FEW[0], each * FEW[1]):
        raise _refusal(own.path, "returns sizes that depend on the data")
    return each * num_rows


def _refusal(path: str, what: str) -> TraceError:
    return TraceError(f"{path} cannot be traced, and {what}", where=path,
                      fix="avoid data-dependent Python control flow in its forward")


def put_in(graph: fx.Graph) -> None:
    """The stand-ins of a trace become calls of their modules."""
    for node in graph.nodes:
        if node.target is torch.ops.autopar_torch.opaque.default:
            call, given = node.args
            node.target, node.args = _shapes[call][0], tuple(given)
    _shapes.clear()

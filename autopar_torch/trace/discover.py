"""Factors of ops that no rule knows, found by running them whole and in pieces.

The op runs on small made-up tensors: sizes that are equal stay equal, all others differ, and all
are larger than any number among the arguments. A factor is kept if, for several values and ways
to cut, the results of uneven pieces with their indices in any order join to the whole, and so do
the gradients. What has been found is kept in `shard/discovered.json`, which is reviewed like code.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..files import load
from ..model import ROWS, TensorInfo, at_rows
from ..shard.layout import PARTIAL, WHOLE, Split, layout_text, parse_layout
from ..shard.rules import DimFactor, ShapedOp, has_rule, has_tag, op_name

log = logging.getLogger("autopar_torch")
FILE = Path(__file__).parent.parent / "shard" / "discovered.json"
NUM_ROWS, NO_SIZE, MOST_NUMBER = 6, 1 << 40, 128  # ends such as 2**63 - 1 are no sizes
MOST_ELEMENTS, MOST_TRIES, MOST_FREE = 1 << 18, 200, 4
SCALES = (1.0, 100.0, 0.01)  # among numbers of one scale, thresholds are not seen
Pieces = list[Tensor]  # indices of a dim that belong to each piece


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found out about one op, and how many ways to cut were tried."""

    factors: tuple[str, ...]
    tries: int


class Discovered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torch: str  # the version that was asked
    ops: dict[str, Evidence]


class _MadeUpCall(NamedTuple):
    """One call with values."""

    op: OpOverload
    leaves: list[Any]
    spec: TreeSpec
    at: list[int]  # which leaves are tensors

    def run(self) -> list[Tensor]:
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        made = self.op(*args, **kwargs)
        outs = list(made) if isinstance(made, (list, tuple)) else [made]
        if not outs or any(not isinstance(out, Tensor) or not out.numel() for out in outs):
            raise ValueError("it makes no tensors, or empty ones")
        return outs

    def cut(self, dims: dict[int, int], index: Tensor) -> _MadeUpCall:
        leaves = list(self.leaves)
        for k, dim in dims.items():
            leaves[self.at[k]] = leaves[self.at[k]].index_select(dim, index)
        return self._replace(leaves=leaves)

    def gradients(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Results, and the gradient of each tensor for these gradients of the results."""
        leaves = [x.detach().requires_grad_() if _is_float(x) else x for x in self.leaves]
        outs = self._replace(leaves=leaves).run()
        pairs = [(o, g) for o, g in zip(outs, given, strict=True) if o.requires_grad]
        wanted = [leaves[k] for k in self.at if _is_float(leaves[k])]
        made = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs],
                                        allow_unused=True) if pairs else [None] * len(wanted))
        return outs, [next(made) if _is_float(leaves[k]) else None for k in self.at]


def note_factors(nodes: Iterable[fx.Node]) -> None:
    """Put what is found on every node that has no rule; it travels with the graph."""
    for node in nodes:
        if _is_unknown(node):
            node.meta["factors"] = tuple(map(_parsed, evidence(node).factors))


def _is_unknown(node: fx.Node) -> bool:
    """Private ops are not run: they check their arguments less, and may end the process."""
    target = node.target
    if has_rule(node) or not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    random = has_tag(node, torch.Tag.nondeterministic_seeded)
    hidden = op_name(node).startswith("_") or target._schema.is_mutable
    return not random and not hidden and bool(ShapedOp(node).inputs)


_MET: dict[str, Evidence] = {}


def met() -> Discovered:
    """All that this process asked for."""
    return Discovered(_version(), dict(sorted(_MET.items())))


def evidence(node: fx.Node) -> Evidence:
    """Of the file, if it was written with this torch, else found now; once per process."""
    image = _image(node)
    leaves, spec = tree_flatten((list(node.args), dict(node.kwargs)))
    key = _key(node, [_named(leaf, image) for leaf in leaves])
    if key not in _MET:
        known = _reviewed()
        _MET[key] = known[key] if key in known else _tried(node, leaves, spec, image)
    return _MET[key]


@functools.cache
def _reviewed() -> dict[str, Evidence]:
    found = load(FILE, Discovered)
    return found.ops if found.torch == _version() else {}


def _version() -> str:
    return str(torch.__version__).partition("+")[0]


# --- sizes ----------------------------------------------------------------------------------------


def _image(node: fx.Node) -> dict[int, int]:
    """Size -> small size. Where arguments are sizes all stay as they are, but for fewer rows."""
    op = ShapedOp(node)
    sizes = sorted({size for shape in op.shapes for size in shape if size > 1})
    numbers = [abs(n) for n in tree_flatten((node.args, node.kwargs))[0]
               if type(n) is int and abs(n) < NO_SIZE and n % ROWS]
    base = max([5, *numbers])
    if base > MOST_NUMBER or _has_sizes(node):
        return {size: at_rows(size, NUM_ROWS) for size in sizes}
    return {size: 2 if size == 2 else base + k for k, size in enumerate(sizes, 1)}


def _has_sizes(node: fx.Node) -> bool:
    """Whether some number among the arguments is a size: the schema calls those SymInt."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    names = set(re.findall(r"SymInt\S* (\w+)", str(schema)))
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    return any(type(n) is int for name in names & set(given) for n in tree_flatten(given[name])[0])


def _named(leaf: Any, image: dict[int, int]) -> str:
    """An argument as keys tell it: sizes by their small ones, types by their kind."""
    if isinstance(leaf, fx.Node):
        info = leaf.meta["info"]
        if not isinstance(info, TensorInfo):
            return "none"
        shape = ",".join(str(image.get(s, s)) for s in info.shape)
        return f"{re.sub('^b(?=float)|[0-9].*', '', info.dtype)}[{shape}]"
    at_few = at_rows(leaf, NUM_ROWS) if type(leaf) is int else leaf
    return "" if isinstance(leaf, (torch.device, torch.layout)) else str(at_few)


def _key(node: fx.Node, names: list[str]) -> str:
    _, spec = tree_flatten((list(node.args), dict(node.kwargs)))
    args, kwargs = tree_unflatten(names, spec)
    said = [str(a).replace("'", "") for a in args]
    said += [f"{k}={v}" for k, v in sorted(kwargs.items()) if v]
    return f"{node.target}({', '.join(said)})"


# --- values ---------------------------------------------------------------------------------------


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _trial(node: fx.Node, leaves: list[Any], spec: TreeSpec, image: dict[int, int],
           seed: int) -> _MadeUpCall:
    """Random values for which the op runs: whole numbers may be indices, so they are below a size;
    the others may have to be positive."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tops = sorted({2, *image.values()}, reverse=True)
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def made(leaf: Any, top: int, positive: bool) -> Any:
        if isinstance(leaf, torch.dtype):
            return torch.float64 if leaf.is_floating_point else leaf
        if not isinstance(leaf, fx.Node):
            few = at_rows(leaf, NUM_ROWS) if type(leaf) is int and leaf % ROWS == 0 else leaf
            return torch.device("cpu") if isinstance(leaf, torch.device) else few
        info: TensorInfo = leaf.meta["info"]
        shape, dtype = [image.get(s, s) for s in info.shape], getattr(torch, info.dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            high = 2 if dtype == torch.bool else top
            return torch.randint(0, high, shape, generator=generator, device="cpu").to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        value = torch.randn(shape, generator=generator, dtype=wide, device="cpu")
        return SCALES[seed] * (value.abs() + 0.1 if positive else value)

    for positive, top in itertools.product((False, True), tops):
        trial = _MadeUpCall(node.target, [made(leaf, top, positive) for leaf in leaves], spec, at)  # type: ignore[arg-type]
        try:
            outs = trial.run()
        except (IndexError, RuntimeError) as error:
            last: Exception = error
            continue
        if all(out.isfinite().all() for out in outs if _is_float(out)):
            return trial
        last = ValueError("its results are not finite")
    raise last


# --- the test -------------------------------------------------------------------------------------


def _tried(node: fx.Node, leaves: list[Any], spec: TreeSpec, image: dict[int, int]) -> Evidence:
    op, tries, found = ShapedOp(node), 0, list[str]()
    shapes = [[image.get(size, size) for size in shape] for shape in op.shapes]
    if len(op.inputs) != sum(isinstance(leaf, fx.Node) for leaf in leaves) or any(
            torch.Size(shape).numel() > MOST_ELEMENTS for shape in shapes):
        return Evidence((), 0)  # an input is there twice, or one is too large
    try:
        with torch.enable_grad():
            trials = [_trial(node, leaves, spec, image, seed) for seed in range(len(SCALES))]
            for dims in itertools.islice(_candidates(shapes), MOST_TRIES):
                tries += 1
                found += [_text(op, dims, out) for out in _outs(trials, dims)]
    except Exception as error:  # whatever an op has against made-up values
        log.debug("%s does not run on made-up values: %s", node.target, error)
    return Evidence(tuple(found), tries)


def _candidates(shapes: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
    """Input -> a dim of it, all of one size; few inputs first."""
    for size in sorted({size for shape in shapes for size in shape if size > 1}):
        options = [[None, *(d for d, own in enumerate(shape) if own == size)] for shape in shapes]
        if len(shapes) > MOST_FREE:
            ranks = range(max(map(len, shapes)))
            yield from ({k: d for k, own in enumerate(options) if d in own} for d in ranks)
            continue
        for picked in sorted(itertools.product(*options), key=lambda p: len(p) - p.count(None)):
            if dims := {k: d for k, d in enumerate(picked) if d is not None}:
                yield dims


def _outs(trials: Sequence[_MadeUpCall], dims: dict[int, int]) -> list[int | None]:
    """The dims of the results that are cut with these dims; None: the results are summed."""
    if not dims:
        return []
    (first, dim), *_ = dims.items()
    size = trials[0].leaves[trials[0].at[first]].shape[dim]
    whole = trials[0].run()
    found: list[int | None] = [
        d for d in range(whole[0].dim()) if all(o.dim() > d and o.shape[d] == size for o in whole)]
    if len(whole) == 1 and _is_float(whole[0]) and whole[0].any():  # zeros sum to anything
        found.append(None)
    for (seed, trial), count in itertools.product(enumerate(trials), (2, 3)):
        cut = _pieces(size, count, seed)
        found = [out for out in found if _joins(trial, dims, out, cut)]
    return found


def _pieces(size: int, count: int, seed: int) -> Pieces:
    """Uneven pieces of a dim, whose indices lie anywhere in it."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed), device="cpu")
    if size < 6:
        return list(order.tensor_split(min(size, count)))
    return list(order.split([2, size - 2] if count == 2 else [2, size - 4, 2]))


def _joins(trial: _MadeUpCall, dims: dict[int, int], out: int | None, cut: Pieces) -> bool:
    """Whether the results of the pieces join to the whole, and their gradients do."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    given = [torch.randn(o.shape, generator=generator, dtype=o.dtype, device="cpu")
             if _is_float(o) else o for o in trial.run()]
    whole, back = trial.gradients(given)
    try:
        each = [trial.cut(dims, index).gradients(
            given if out is None else [g.index_select(out, index) for g in given])
            for index in cut]
    except Exception:  # its pieces do not fit together: the most usual answer
        return False
    outs = zip(whole, *(made for made, _ in each), strict=False)
    if any(len(made) != len(whole) for made, _ in each) or not all(
            _join(own, parts, out, cut) for own, *parts in outs):
        return False
    return all(_join(own, parts, dims.get(k), cut)
               for k, (own, *parts) in enumerate(zip(back, *(b for _, b in each), strict=True)))


def _join(whole: Tensor | None, parts: Sequence[Tensor | None], dim: int | None,
          cut: Pieces) -> bool:
    """Whether parts of a dim are those of the whole, or sum to it."""
    if whole is None or any(part is None for part in parts):
        return whole is None and all(part is None for part in parts)
    if dim is None:
        total = sum(parts)  # type: ignore[arg-type]
        return all(p.shape == whole.shape for p in parts) and _same(total, whole)  # type: ignore[union-attr, arg-type]
    return all(_same(part, whole.index_select(dim, index))  # type: ignore[arg-type]
               for part, index in zip(parts, cut, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not _is_float(a):
        return torch.equal(a, b)
    near = 1e-9 if a.dtype in (torch.float64, torch.complex128) else 1e-4
    return torch.allclose(a, b, near, near * float(b.detach().abs().max()))


# --- as text --------------------------------------------------------------------------------------


def _text(op: ShapedOp, dims: dict[int, int], out: int | None) -> str:
    ins = [layout_text(Split(dims[k]) if k in dims else WHOLE) for k in range(len(op.inputs))]
    return f"{','.join(ins)}>{layout_text(PARTIAL if out is None else Split(out))}"


def _parsed(text: str) -> DimFactor:
    ins, _, out = text.partition(">")
    cut = enumerate(map(parse_layout, ins.split(",")))
    made = parse_layout(out)
    return DimFactor({k: split.dim for k, split in cut if isinstance(split, Split)},
                     made.dim if isinstance(made, Split) else None)

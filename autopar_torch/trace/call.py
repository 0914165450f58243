"""A call of the model, taken apart: tensors, the rest, and how many rows the batch has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PlanError, TraceError
from .settings import is_plain, settings_in, shown

Batch = Mapping[str, Any] | Sequence[Any]
Rowless = tuple[str, int, tuple[int, ...]]  # form of a call, number of a tensor, and its shape


@dataclass(frozen=True)
class Call:
    """Structure of one call. `rows_dims[i]` is the dim of tensor i where the model has the batch;
    here the batch comes first. None: the tensor has no rows."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # None where a tensor goes
    where: tuple[int, ...]  # leaf index of each tensor
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    rows_dims: tuple[int | None, ...]
    num_rows: int
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # (device type, dtype) where it is on
    ones: tuple[bool, ...] = ()  # which tensors are masks that hide nothing
    requires_grad: tuple[bool, ...] = ()  # which tensors, where gradients are on
    decided: tuple[bool, ...] | None = ()  # what forward asks of values; None: it may not

    @property
    def rows(self) -> tuple[bool, ...]:
        return tuple(dim is not None for dim in self.rows_dims)

    @property
    def rowless(self) -> set[Rowless]:
        """Its tensors that did not follow the number of rows."""
        return {(str(self.spec), i, shape) for i, (shape, dim) in enumerate(
            zip(self.shapes, self.rows_dims, strict=True)) if dim is None}

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that one trace can serve, whatever their number of rows."""
        shapes = tuple(s[1:] if r else s for s, r in zip(self.shapes, self.rows, strict=True))
        leaves = tuple(map(shown, self.leaves))
        return (str(self.spec), leaves, shapes, self.dtypes, self.rows_dims, self.autocast,
                self.ones, self.requires_grad)

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call as the caller wrote it."""
        leaves = list(self.leaves)
        for index, tensor, dim in zip(self.where, tensors, self.rows_dims, strict=True):
            leaves[index] = tensor.movedim(0, dim).contiguous() if dim else tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    @contextlib.contextmanager
    def surroundings(self, device: torch.device) -> Iterator[None]:
        """Autocast as it was around the call. A trace is made with it, and run without."""
        if not self.autocast:
            yield
            return
        dtype = dict(self.autocast).get(device.type)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            yield

    @property
    def in_one_row(self) -> bool:
        return not any(self.rows)

    def as_one_row(self, tensors: Sequence[Tensor]) -> tuple[Call, list[Tensor]]:
        """The same, of which nothing is shared out: no tensor has rows."""
        given = [t.movedim(0, dim).contiguous() if dim else t
                 for t, dim in zip(tensors, self.rows_dims, strict=True)]
        shapes = tuple(tuple(t.shape) for t in given)
        return replace(self, shapes=shapes, rows_dims=(None,) * len(given), num_rows=1), given

    def slice(self, tensors: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
        """The rows start:end of a global batch."""
        return [t[start:end] if r else t for t, r in zip(tensors, self.rows, strict=True)]


def as_call(example: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return (), dict(example)
    if not isinstance(example, (Tensor, Sequence)) or isinstance(example, (str, bytes)):
        raise PlanError(f"{type(example).__name__} is no batch", where="example_inputs",
                        fix="give a tensor, a tuple of them, or a dict by name")
    return ((example,) if isinstance(example, Tensor) else tuple(example)), {}


def take_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any],
               batch_dim: int = 0, rowless: Set[Rowless] = frozenset()
               ) -> tuple[Call, list[Tensor]]:
    """Flatten a call into its structure and its tensors, with their rows first. `batch_dim` is
    where the rows are; a tensor that has too few dims for that may have them in its first. What is
    known to be `rowless` only happens to be as large as the batch is now."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    tensors = [leaves[i] for i in where]
    sized = [t for t in tensors if t.dim() > batch_dim]
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    _refuse_hidden(rest)
    if not sized:
        raise TraceError("the batch holds no tensor with rows", where="model(...)",
                         fix=f"pass the batch as tensors (not arrays or numbers) whose dim "
                         f"{batch_dim} is the batch")
    num_rows = sized[0].shape[batch_dim]
    dims = [batch_dim if t.dim() > batch_dim else 0 for t in tensors]
    form = str(spec) if rowless else ""
    rows_dims = tuple(d if t.dim() and t.shape[d] == num_rows
                      and (form, i, tuple(t.shape)) not in rowless else None
                      for i, (d, t) in enumerate(zip(dims, tensors, strict=True)))
    tensors = [t.movedim(d, 0) if d else t for d, t in zip(rows_dims, tensors, strict=True)]
    shapes = tuple(tuple(t.shape) for t in tensors)
    dtypes = tuple(t.dtype for t in tensors)
    cast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
                 if torch.is_autocast_enabled(kind))
    paths = [path for path, _ in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]]
    ones = tuple(_hides_nothing(t, "mask" in pytree.keystr(paths[i]).lower())
                 for i, t in zip(where, tensors, strict=True))
    requires_grad = tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors)
    return Call(spec, rest, where, shapes, dtypes, rows_dims, num_rows, cast, ones,
                requires_grad), tensors


def _refuse_hidden(leaves: Sequence[Any]) -> None:
    """A trace would keep the tensors of the first call, and each replica would take them whole."""
    held = [(type(leaf).__qualname__, leaf) for leaf in leaves if not is_plain(leaf)]
    held += [(f"{path}.{key}", value) for path, own in settings_in(held)
             for key, value in vars(own).items()]
    for path, value in held:
        if any(map(_has_tensors, pytree.tree_leaves(value))):
            kind = path.split(".")[0]
            raise TraceError(
                f"an argument hides a tensor from a trace: {path}", where="model(...)",
                fix="pass tensors as arguments, or in tuples, lists and dicts (if it is a "
                f"dataclass: torch.export.register_dataclass({kind})); modules as attributes")


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, nn.Module) and bool(value.state_dict(keep_vars=True)))


def _hides_nothing(tensor: Tensor, named: bool) -> bool:
    """Whether it is a mask of ones only, as tokenizers give where nothing was padded: attention
    needs none then."""
    if tensor.is_meta or tensor.is_floating_point() or not (named or tensor.dtype == torch.bool):
        return False
    return bool((tensor == 1).all())

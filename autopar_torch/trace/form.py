"""What a model returns: the structure of it, and a name for every tensor in it."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from ..errors import TraceError
from ..model import at_rows
from .row_branches import OfRows, at

log = logging.getLogger("autopar_torch")
LossFn = Callable[..., Tensor]
_PLAIN = (int, float, bool, str, bytes, type(None))


class Outputs(dict[str, Any]):
    """What a model returned, by name, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Named:
    """The place of a tensor, or of an object that a trace does not keep."""

    name: str


@dataclass(frozen=True)
class Form:
    """The structure of a model's output; `kind`: the class that holds it, if torch does not know
    that to be a structure."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    kind: type | tuple[str, tuple[str, ...]] | None = None  # or name and fields of a named tuple
    left: tuple[tuple[str, Any], ...] = ()  # attributes that forward leaves behind, and what

    @property
    def is_bare(self) -> bool:
        """One tensor and nothing around it."""
        return self.spec.is_leaf()

    @property
    def names(self) -> list[str]:
        return [leaf.name for leaf in self.leaves if isinstance(leaf, Named)]

    def fill(self, values: Mapping[str, Tensor], absent: Callable[[str], Any], rows: int) -> Any:
        """What the model would have returned for so many rows."""

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Named):
                return values[leaf.name] if leaf.name in values else absent(leaf.name)
            if isinstance(leaf, OfRows):
                return at(leaf.made, rows)
            return at_rows(leaf, rows) if type(leaf) is int else leaf

        tree = pytree.tree_unflatten(map(filled, self.leaves), self.spec)
        if isinstance(self.kind, tuple):
            return namedtuple(*self.kind)(*tree)
        if self.kind is None or issubclass(self.kind, Mapping):
            return tree if self.kind is None else Outputs(tree)
        made = object.__new__(self.kind)  # what its own __init__ does was done in the trace
        for name, value in tree.items():
            object.__setattr__(made, name, value)
        return made

    def portable(self) -> Form:
        """The form for another process. If that may not know the class, it is given by name, or is
        a named tuple of the same fields, as forward may make the class anew in each call."""
        if self._travels():
            return self
        tree = pytree.tree_unflatten(self.leaves, self.spec)
        if fields := getattr(tree, "_fields", None):
            named = dataclasses.replace(self, spec=pytree.tree_structure(tuple(tree)),
                                        kind=(type(tree).__name__, fields))
            if named._travels():
                return named
        return dataclasses.replace(form_of(self.names), left=self.left)

    def _travels(self) -> bool:
        try:
            pickle.dumps((self.spec, self.leaves, self.kind))
        except (pickle.PicklingError, AttributeError, TypeError):
            return False
        return True


def form_of(names: Iterable[str]) -> Form:
    """Outputs by name, where the model has no structure of its own for them."""
    places = {name: Named(name) for name in names}
    leaves, spec = pytree.tree_flatten(places)
    return Form(spec, tuple(leaves), Outputs)


def outputs_of(model: nn.Module, loss_fn: LossFn | None, args: Any,
               kwargs: dict[str, Any],
               inside: bool | None = None) -> tuple[Form, dict[str, Tensor]]:
    """What the model returns; where `target=` is given, with the loss of `loss_fn`."""
    target = (kwargs.pop("target"),) if loss_fn and "target" in kwargs else ()
    given = [(own, own.copy()) for own in _containers((args, [*kwargs.values()]))]
    output = model(*args, **kwargs)
    for own, before in given:
        _refuse_changed(own, before, output)
    form, named = take_outputs(output, inside)
    if loss_fn and target:
        named = {**named, "loss": loss_fn(output, *target)}
        form = form_of(named)
    return form, named


def _containers(tree: Any) -> Iterator[Any]:
    """Dicts and lists of the caller, who may look into them after the call."""
    if isinstance(tree, (dict, list, tuple)):
        yield from () if isinstance(tree, tuple) else (tree,)
        for own in tree.values() if isinstance(tree, dict) else tree:
            yield from _containers(own)


def _refuse_changed(now: Any, then: Any, output: Any) -> None:
    """Refuse what forward puts into an argument, of which the caller's stays as it is."""
    keys = list(now) if isinstance(now, dict) else range(len(now))
    key = next((k for k in keys if (k not in then if isinstance(now, dict) else k >= len(then))
                or now[k] is not then[k]), None)
    if key is not None and now is output:
        log.warning("forward changes its argument, at %r, and returns it; the caller's stays as it "
                    "is, so use what is returned", key)
    elif key is not None:
        raise TraceError(f"forward changes its argument, at {key!r}, and the caller's would stay "
                         "as it is", where="forward", fix="change a copy, dict(x) or list(x), and "
                         "return what is to be used after the call")


def take_outputs(output: Any, inside: bool | None = None) -> tuple[Form, dict[str, Tensor]]:
    """The structure of an output and its tensors by name. The key `loss` is the loss, or the first
    scalar, if it is known that there is one `inside`, or it has all learn."""
    tree = as_tree(output)
    leaves, spec = pytree.tree_flatten(tree)
    named: dict[str, Tensor] = {}
    kept: list[Any] = []
    names = list(_names(tree))
    first = next((leaf for (_, may), leaf in zip(names, leaves, strict=True)
                  if may and _is_scalar(leaf)), None)
    if first is not None and inside is None:
        inside = _covers(first, leaves)
    for (name, _), leaf in zip(names, leaves, strict=True):
        place = Named("loss" if inside and leaf is first is not None else name)
        while place.name in named:  # {"a.0": x, "a": [y]}
            place = Named(f"{place.name}'")
        if isinstance(leaf, Tensor):
            named[place.name] = leaf
        kept.append(leaf if isinstance(leaf, _PLAIN) else place)
    return Form(spec, tuple(kept), type(output) if tree is not output else None), named


def as_tree(output: Any) -> Any:
    """A class that torch does not know to be a structure, as a dict."""
    if not pytree.tree_structure(output).is_leaf():
        return output
    if isinstance(output, Mapping):
        return dict(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    return output


def _names(tree: Any) -> Iterator[tuple[str, bool]]:
    """Name of every leaf, and whether a scalar there is the loss without being called so."""
    if pytree.tree_structure(tree).is_leaf():
        yield "output", True
        return
    by_key = isinstance(tree, Mapping)
    listed = tree if isinstance(tree, (tuple, list)) else pytree.tree_leaves(tree)
    fields = getattr(tree, "_fields", range(len(listed)))  # of a NamedTuple
    for key, value in tree.items() if by_key else zip(fields, listed, strict=True):
        inner = pytree.tree_structure(value)
        for i in range(inner.num_leaves):
            yield (str(key) if inner.is_leaf() else f"{key}.{i}"), inner.is_leaf() and not by_key


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _covers(scalar: Tensor, leaves: Iterable[Any]) -> bool:
    """Whether it has all learn, so that it is no part of a loss that is made of what else is
    returned: it depends on every parameter that others do and on every other scalar, and has
    something besides parameters in common with each of them. Without gradients it is so."""
    own = _behind(scalar.grad_fn)

    def covers(other: Tensor) -> bool:
        seen = _behind(other.grad_fn)
        has_more = any(map(_is_parameter, seen - own))
        shares = not all(map(_is_parameter, own & seen))
        return shares and not has_more and (other.dim() > 0 or other.grad_fn in own)

    return all(covers(x) for x in leaves
               if isinstance(x, Tensor) and x is not scalar and x.grad_fn is not None)


def _is_parameter(node: Node) -> bool:
    """Where gradients are added up."""
    return hasattr(node, "variable")


def _behind(end: Node | None) -> set[Node]:
    """Itself, and all that it is made of."""
    found, left = set[Node](), [end]
    while left:
        if (node := left.pop()) is not None and node not in found:
            found.add(node)
            left += [other for other, _ in node.next_functions]
    return found

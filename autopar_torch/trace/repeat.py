"""Trace three layers of a long stack and repeat the middle one, where all the middle is equal.

Children 0, 1 and last are kept. The chain that comes out is accepted only if the blocks of 1 and
of last are of one kind, so a layer that uses its own index is found out and traced in full. So is
a model that counts its layers, or picks some by number.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import TraceError
from .settings import PLAIN

MIN_CHILDREN = 6


def find_stacks(model: nn.Module) -> dict[str, int]:
    """Names of the module lists whose middle children are equal -> number of children."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    stacks: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(stack + ".") for stack in stacks)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not inside:
            children = list(module)
            whole = len(children) >= MIN_CHILDREN and None not in children
            if whole and _is_uniform(children, uses):
                stacks[name] = len(children)
    return stacks


def _is_uniform(children: list[nn.Module], uses: Counter[int]) -> bool:
    if any(uses[id(p)] > 1 for child in children for p in child.parameters()):
        return False
    first = _fingerprint(children[1])
    return first is not None and all(
        _alike(first, _fingerprint(child), 1, i) for i, child in enumerate(children) if i > 1
    )


def _alike(a: Any, b: Any, i: int, j: int) -> bool:
    """Equal, but for numbers that are the layer's own index (i in one, j in the other)."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_alike(x, y, i, j) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (type(a) is int and type(b) is int and (a, b) == (i, j))


def _fingerprint(module: nn.Module) -> tuple[Any, ...] | None:
    """What decides how a layer computes; None when that cannot be seen from its attributes."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    seen: list[Any] = [type(module)]
    tensors = {**module._parameters, **module._buffers}
    seen += [(n, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
             for n, t in tensors.items()]
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or value is module:
            continue
        if isinstance(value, PLAIN):
            seen.append((name, value))
        elif isinstance(value, (tuple, list)) and all(isinstance(v, PLAIN) for v in value):
            seen.append((name, tuple(value)))
        else:
            seen.append((name, id(value)))
    for name, child in module._modules.items():
        inner = None if child is None else _fingerprint(child)
        if child is not None and inner is None:
            return None
        seen.append((name, inner))
    return tuple(seen)


@contextlib.contextmanager
def shortened(model: nn.Module, stacks: dict[str, int]) -> Iterator[None]:
    """Keep children 0, 1, last of each stack (as 0, 1, 2) while tracing."""
    saved = []
    for name in stacks:
        stack = model.get_submodule(name)
        saved.append((stack, type(stack), stack._modules))
        children = list(stack._modules.values())
        stack._modules = {"0": children[0], "1": children[1], "2": children[-1]}
        stack.__class__ = _uncounted(type(stack), len(children))
    try:
        yield
    finally:
        for stack, own, modules in saved:
            stack.__class__, stack._modules = own, modules


def _uncounted(own: type[nn.Module], count: int) -> type[nn.Module]:
    """The class of a stack whose number of children nobody may ask for: three are none too many
    for a loop over all of them, and wrong for anything else."""

    def refuse(*_: Any) -> Any:
        raise TraceError("forward counts its layers")

    def picked(stack: Any, which: Any) -> Any:
        if isinstance(which, slice) and len(range(count)[which]) == count and which.step != -1:
            return list(stack._modules.values())
        return refuse()

    return type(own.__name__, (own,), {"__len__": refuse, "__getitem__": picked,
                                       "__bool__": lambda _: True, "__module__": own.__module__})

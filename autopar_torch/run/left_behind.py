"""What the forward of an untraced module leaves in attributes: each rank has that of its own rows.

The trial of whether rows may be shared out tells which of it depends on them. Its use is an error;
counters and tables stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..trace.burnt import attributes
from .returned import Withheld


def held(module: nn.Module) -> dict[str, list[Any]]:
    """The values that are in each attribute now."""
    return dict(_named(module))


def _named(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    for path, own in module.named_modules():
        for key, value in attributes(own):
            yield f"{path}.{key}".lstrip("."), pytree.tree_leaves(value)


def left(before: dict[str, list[Any]], module: nn.Module) -> dict[str, str]:
    """What a forward has left there: equal texts for equal values, and none for what gradients may
    be asked of."""
    return {name: _described(now) for name, now in _named(module)
            if not _same(before.get(name), now)}


def of_rows(runs: list[dict[str, str]]) -> set[str]:
    """The attributes in which runs on other rows leave something else."""
    found = {name: {run.get(name, "") for run in runs} for run in runs for name in run}
    return {name for name, texts in found.items() if "" in texts or len(texts) > 1}


def withhold(module: nn.Module, names: Collection[str]) -> None:
    """Put what says so in the place of such values."""
    for name in names:
        path, _, key = name.rpartition(".")
        vars(module.get_submodule(path))[key] = Withheld(
            name, "is left by forward in an untraced model, and each rank has that of its own rows",
            "return it from forward, or look at it in eval mode")


def _same(before: list[Any] | None, now: list[Any]) -> bool:
    return before is not None and len(before) == len(now) and all(
        a is b or (type(a) is type(b) and not isinstance(a, Tensor) and a == b)
        for a, b in zip(before, now, strict=True))


def _described(values: list[Any]) -> str:
    if any(isinstance(x, Tensor) and x.requires_grad for x in values):
        return ""
    return repr([(tuple(x.shape), x.tolist()) if isinstance(x, Tensor)
                 else x if isinstance(x, (int, float, str, bool)) else type(x).__name__
                 for x in values])

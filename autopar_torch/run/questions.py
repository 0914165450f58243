"""What Python asks of tensors while an untraced forward runs: `if h.mean() > 0:`. Replicas ask it
of their own rows, so all have to get one answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..errors import RunError
from ..trace.effects import attributes_set
from .world import World


@contextlib.contextmanager
def answered() -> Iterator[list[bool]]:
    """The answers so far, in order."""
    plain, found = Tensor.__bool__, list[bool]()

    def answer(value: Tensor) -> bool:
        found.append(plain(value))
        return found[-1]

    with attributes_set(Tensor, __bool__=answer):
        yield found


def of_all_rows(whole: int, parts: Sequence[int]) -> bool:
    """Whether so many questions are not asked of each row."""
    return sum(parts) != whole


def check_alike(world: World, answers: list[bool] | None, reason: str) -> None:
    """`answers`: None where they do not count, as this rank has no rows."""
    told = [own[0] for own in world.everyones([answers] if answers is not None else [],
                                              list[list[bool]]) if own]
    if any(own != told[0] for own in told):
        raise RunError("the replicas took different branches: a value that forward asks for is one "
                       "of their own rows", where=reason, fix="ask that of the inputs alone, or "
                       "outside of forward, or train in one process")

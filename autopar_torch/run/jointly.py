"""What ranks do together: what goes wrong on one is raised on all, before anyone waits for others.

Only JSON travels, so nobody runs what another rank sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from .. import files
from ..errors import AutoparError, CheckpointError
from .world import World

T = TypeVar("T")


class _Said(Struct, frozen=True):
    """What one rank has to say: what it made, or what went wrong."""

    value: msgspec.Raw
    error: tuple[str, str, str] | None = None


def jointly(world: World, kind: type[T], act: Callable[[], T]) -> list[T]:
    """What `act` made on every rank, in rank order, or a CheckpointError on every rank."""
    return [msgspec.json.decode(value, type=kind) for value in _values(world, act)]


def by_first(world: World, kind: type[T], act: Callable[[], T]) -> T:
    """What `act` made on rank 0, told to all; or a CheckpointError on every rank."""
    values = _values(world, act if world.rank == 0 else lambda: None)
    return msgspec.json.decode(values[0], type=kind)


def _values(world: World, act: Callable[[], object]) -> list[msgspec.Raw]:
    cause: Exception | None = None
    said = _Said(msgspec.Raw(b"null"))
    try:
        said = _Said(msgspec.Raw(files.encode(act())))
    except Exception as error:  # whatever it is: the others must hear of it
        cause, said = error, _Said(said.value, _told(error))
    everyone = [msgspec.json.decode(data, type=_Said)
                for data in world.exchange(msgspec.json.encode(said))]  # fmt: skip
    for rank, other in enumerate(everyone):
        if other.error is not None:
            what, where, fix = other.error
            alike = all(o.error == other.error for o in everyone)
            raise CheckpointError(what if alike else f"rank {rank}: {what}", where=where,
                                  fix=fix) from cause  # fmt: skip
    return [other.value for other in everyone]


def _told(error: Exception) -> tuple[str, str, str]:
    if isinstance(error, AutoparError):
        return error.what, error.where, error.fix
    return f"{type(error).__name__}: {error}", "", ""

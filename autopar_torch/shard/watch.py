"""Times every blocking communication inside a block, while a `Watch` is entered."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Stamp = Any  # a time on the CPU, an event on a GPU


def stamp() -> Stamp:
    """This moment of the stream that computes."""
    if torch.cuda.is_available():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def between(start: Stamp, end: Stamp) -> float:
    """Seconds from one moment to another."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class Watch:
    """Hears of communication while it is entered: (name, start, end)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Stamp, Stamp]] = []

    def __enter__(self) -> Watch:
        _listening.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _listening.remove(self)

    def note(self, name: str, start: Stamp) -> None:
        self.spans.append((name, start, stamp()))

    @property
    def seconds(self) -> float:
        return sum(between(start, end) for _, start, end in self.spans)


_listening: list[Watch] = []
_inside: list[str] = []  # marked functions under way: those they call are part of them


def heard(function: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Mark a function that communicates and waits for it; it is told by its name, or this one."""
    name = name or function.__name__

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _listening or _inside:
            return function(*args, **kwargs)
        start = stamp()  # no CPU clock of the thread: reading it delays the waking of threads
        _inside.append(name)
        try:
            result = function(*args, **kwargs)
        finally:
            _inside.pop()
        for watch in _listening:
            watch.note(name, start)
        return result

    return wrapped

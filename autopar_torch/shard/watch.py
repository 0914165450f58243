"""Times every blocking communication inside a block, while `listen` is entered."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
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
    """What was heard: (name, start, end)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Stamp, Stamp]] = []

    def note(self, name: str, start: Stamp) -> None:
        self.spans.append((name, start, stamp()))

    @property
    def seconds(self) -> float:
        return sum(between(start, end) for _, start, end in self.spans)


_listening: list[Watch] = []
_inside: list[str] = []  # marked functions under way: those they call are part of them


@contextlib.contextmanager
def listen() -> Iterator[Watch]:
    """Hear of communication until the end of the block."""
    watch = Watch()
    _listening.append(watch)
    try:
        yield watch
    finally:
        _listening.remove(watch)


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

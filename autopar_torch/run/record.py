"""What a real step did and when: the same Timeline that the simulator draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..shard.watch import Stamp, Watch, between, stamp
from ..timeline import COMM, COMPUTE, Span, Timeline


class Recorder:
    """Collects the spans of one step on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.begin = stamp()
        self.spans: list[tuple[str, str, Stamp, Stamp]] = []

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Computation; what is exchanged and waited for inside is taken out of it."""
        with Watch() as watch:
            start = stamp()
            yield
            end = stamp()
        at = start
        for what, begin, stop in watch.spans:
            self.spans.append((COMPUTE, name, at, begin))
            self.spans.append((COMM, what, begin, stop))
            at = stop
        self.spans.append((COMPUTE, name, at, end))

    @contextlib.contextmanager
    def exchanging(self, name: str) -> Iterator[None]:
        """Communication, or waiting for it."""
        start = stamp()
        yield
        self.spans.append((COMM, name, start, stamp()))

    def result(self) -> tuple[tuple[Span, ...], float]:
        """Spans in seconds from the beginning, and how long the step took until now."""
        total = between(self.begin, stamp())
        spans = tuple(
            Span(self.rank, stream, name, between(self.begin, start), between(self.begin, end))
            for stream, name, start, end in self.spans
        )
        return tuple(s for s in spans if s.end_s > s.start_s), total


class Silent:
    """Records nothing, at no cost."""

    @contextlib.contextmanager
    def _nothing(self, name: str) -> Iterator[None]:
        yield

    computing = exchanging = _nothing


SILENT = Silent()


def joined(own: list[tuple[tuple[Span, ...], float]]) -> Timeline:
    """The timeline of all ranks."""
    spans = tuple(span for spans, _ in own for span in spans)
    return Timeline(spans, max(total for _, total in own), source="measured")

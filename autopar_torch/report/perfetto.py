"""Timelines as one Perfetto file: a process per rank, a thread per stream, arrows for messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..timeline import COMM, COMPUTE, Memory, Span, Timeline

Event = dict[str, Any]
_THREADS = {COMPUTE: 0, COMM: 1}
_STEP = 1000  # process ids of one timeline, at least
_FLOWS = 10**6  # arrows of one process id, at most


def export(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Several timelines side by side, like {"predicted": ..., "measured": ...}."""
    step = max([_STEP, *(1 + max(t.ranks, default=0) for t in timelines.values())])
    events = [event for place, (label, timeline) in enumerate(timelines.items())
              for event in _events(label, timeline, place * step)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _events(label: str, timeline: Timeline, base: int) -> Iterator[Event]:
    tracks = {span: track for rank in timeline.ranks for span, track in _tracks(timeline.of(rank))}
    for rank in timeline.ranks:
        yield _name("process_name", base + rank, 0, f"{label} rank {rank}")
    for rank, stream, track in sorted({(s.rank, s.stream, track) for s, track in tracks.items()}):
        yield _name("thread_name", base + rank, track, stream)
    for span, track in tracks.items():
        start_us, end_us = _us(span.start_s), _us(span.end_s)
        yield {"ph": "X", "name": span.name, "pid": base + span.rank, "tid": track,
               "ts": start_us, "dur": round(end_us - start_us, 3)}
    yield from _arrows(timeline, base, tracks)
    for rank, memory in enumerate(timeline.memory):
        yield {"ph": "C", "name": "peak memory, MiB", "pid": base + rank, "ts": 0,
               "args": _parts(memory)}


def _tracks(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Slices of a track must not overlap: what is exchanged at the same time gets tracks beside."""
    ends: dict[str, list[float]] = {}
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        own = ends.setdefault(span.stream, [])
        start_us = _us(span.start_s)
        lane = next((k for k, end_us in enumerate(own) if end_us <= start_us), len(own))
        own[lane:lane + 1] = [_us(span.end_s)]
        yield span, _THREADS.get(span.stream, 2) + 3 * lane


def _us(seconds: float) -> float:
    """To whole nanoseconds, as they are kept there."""
    return round(seconds * 1e6, 3)


def _arrows(timeline: Timeline, base: int, tracks: Mapping[Span, int]) -> Iterator[Event]:
    """A message is one span on its two ranks: from the one that computed it to the other. Of ranks
    that are alike, to and from those that stand for them."""
    pairs: dict[tuple[str, float], list[Span]] = {}
    for span in timeline.spans:
        if "SEND" in span.name:
            pairs.setdefault((span.name, span.start_s), []).append(span)
    for number, spans in enumerate(pairs.values()):
        if len(spans) == 2:
            for phase, span, at in (("s", spans[0], spans[0].start_s),
                                    ("f", spans[1], spans[1].end_s)):
                yield {"ph": phase, "bp": "e", "cat": "message", "name": span.name,
                       "id": base * _FLOWS + number, "pid": base + span.rank, "tid": tracks[span],
                       "ts": _us(at)}


def _parts(memory: Memory) -> dict[str, float]:
    return {name: round(getattr(memory, name) / 2**20, 3) for name in memory.__struct_fields__}


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}

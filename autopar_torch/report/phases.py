"""What a span is: a phase of computing, or the axis along which something is exchanged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..timeline import COMPUTE, Span

FORWARD, BACKWARD, UPDATE, OTHER = "forward", "backward", "update", "other computing"
TENSOR, PIPELINE, DATA, ALL = "tensor groups", "pipeline", "replicas", "all ranks"
PHASES = (FORWARD, BACKWARD, UPDATE, OTHER)
AXES = {TENSOR: "partial results inside blocks", PIPELINE: "activations and their gradients between"
        " stages", DATA: "sums of gradients, and gathers of parameters that ZeRO cut",
        ALL: "the loss and what else is returned"}
ACTION = re.compile(r"\d+(F|B|I|W)\d+")
AMONG_REPLICAS = ("reduce", "scatter", "gather", "refresh", "wait", "team_gather", "team_sum")
NAMED = {"loss": ALL, "outputs": ALL, "update": UPDATE}


def phase(span: Span) -> str:
    """Which colour it has, and in which row of a table it counts."""
    action = ACTION.fullmatch(span.name)
    if span.stream == COMPUTE:
        if action:
            return FORWARD if action[1] == "F" else BACKWARD
        return UPDATE if span.name == "update" else OTHER
    if "SEND" in span.name or "RECV" in span.name or span.name == "sent":
        return PIPELINE
    if span.name in AMONG_REPLICAS:
        return DATA
    return NAMED.get(span.name, TENSOR)


class Bar(NamedTuple):
    """Spans of one phase that follow each other so closely that no eye could part them."""

    phase: str
    name: str
    start_s: float
    end_s: float


def bars(spans: Sequence[Span], grain_s: float) -> list[Bar]:
    """Spans of one stream as bars, gaps shorter than `grain_s` closed."""
    found: list[Bar] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        kind, last = phase(span), found[-1] if found else None
        if last and last.phase == kind and span.start_s - last.end_s < grain_s and (
                last.name == span.name or span.end_s - last.start_s < grain_s):
            found[-1] = last._replace(end_s=max(last.end_s, span.end_s))
        else:
            found.append(Bar(kind, span.name, span.start_s, span.end_s))
    return found

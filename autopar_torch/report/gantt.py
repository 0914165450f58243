"""A step as a picture: two lanes per group of ranks, what computes and what communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..timeline import COMM, COMPUTE, Span, Timeline
from ..units import time
from . import phases
from .sections import MOST_ROWS, left_out
from .story import Story, groups

WIDTH = 1000.0  # units of a lane: of time nothing narrower than one is told apart
COLOURS = {  # of Okabe and Ito, which people with any colour vision can tell apart
    phases.FORWARD: "#0072b2", phases.BACKWARD: "#e69f00", phases.UPDATE: "#009e73",
    phases.OTHER: "#8c8c8c", phases.TENSOR: "#cc79a7", phases.PIPELINE: "#56b4e9",
    phases.DATA: "#d55e00", phases.ALL: "#b3a100",
}


def drawn(story: Story) -> str:
    """The predicted step, and the measured one beneath, on one scale of time."""
    known = [t for t in (story.predicted, story.measured) if t]
    longest_s = max((t.step_s for t in known), default=0.0)
    return "".join(chart(story, timeline, longest_s) for timeline in known) + legend(known)


def chart(story: Story, timeline: Timeline, longest_s: float) -> str:
    """One timeline: its groups of ranks, and the time beneath."""
    own = groups(story, timeline)
    rows = [f'<div class="lane"><p>{escape(group.label)}</p>'
            f'{lane(group.spans, COMPUTE, longest_s)}{lane(group.spans, COMM, longest_s)}</div>'
            for group in own[:MOST_ROWS]]
    ticks = "".join(f"<span>{time(longest_s * k / 4) if k else '0'}</span>" for k in range(5))
    caption = f"{escape(timeline.source)}: {time(timeline.step_s)}.{left_out(len(own))}"
    return (f'<figure><figcaption>{caption}</figcaption>{"".join(rows)}'
            f'<div class="ticks">{ticks}</div></figure>')


def lane(spans: Sequence[Span], stream: str, longest_s: float) -> str:
    """One stream as bars. A picture is stretched to its column, so it holds no text."""
    scale = WIDTH / longest_s if longest_s else 0.0
    own = phases.bars([s for s in spans if s.stream == stream], 1 / scale if scale else 0.0)
    return (f'<svg class="{stream}" viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" '
            f'role="img" aria-label="{stream}">{"".join(_bars(own, scale))}</svg>')


def _bars(bars: Sequence[phases.Bar], scale: float) -> Iterator[str]:
    for bar in bars:
        width = max(0.4, (bar.end_s - bar.start_s) * scale)
        yield (f'<rect x="{bar.start_s * scale:.1f}" width="{width:.1f}" height="10" '
               f'fill="{COLOURS[bar.phase]}"><title>{escape(bar.name)}, {bar.phase}: '
               f'{time(bar.start_s)} to {time(bar.end_s)}</title></rect>')


def legend(timelines: Sequence[Timeline]) -> str:
    """The colours that are there."""
    there = {phases.phase(span) for timeline in timelines for span in timeline.spans}
    return key([(name, colour) for name, colour in COLOURS.items() if name in there])


def key(entries: Sequence[tuple[str, str]]) -> str:
    """Colours and what they mean."""
    return '<p class="key">' + "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in entries) + "</p>"

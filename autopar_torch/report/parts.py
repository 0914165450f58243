"""Pictures beside the tables: memory of each rank, and the parts of a block's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..timeline import Memory
from ..units import shape, size
from .blocks import Param, split_block
from .gantt import WIDTH, key
from .sections import MOST_ROWS
from .story import Story, groups

MEMORY = {"params": "#0072b2", "grads": "#e69f00", "optimizer": "#009e73",
          "activations": "#56b4e9", "working": "#cc79a7", "buffers": "#b3a100", "fixed": "#8c8c8c"}
MOST_DRAWN = 12  # parameters of a block
SIDE = 90.0  # units of the longest side of a parameter


def memory(story: Story) -> str:
    """A bar per group of ranks on one scale; the line is what a plan may take."""
    timeline = story.predicted
    if not timeline or not timeline.memory:
        return ""
    own = [g for g in groups(story, timeline)[:MOST_ROWS] if g.memory]
    most = max(max(g.memory.peak_bytes if g.memory else 0, story.limit_bytes(g.ranks)) for g in own)
    rows = [f'<div class="lane"><p>{escape(g.label)}: {size(g.memory.peak_bytes)} of '
            f'{size(story.limit_bytes(g.ranks))}</p>'
            f'{_bar(g.memory, story.limit_bytes(g.ranks), WIDTH / (1.04 * most))}</div>'
            for g in own if g.memory]
    there = [(name, colour) for name, colour in MEMORY.items()
             if any(getattr(g.memory, name) for g in own)]
    return f'<figure>{"".join(rows)}</figure>' + key([*there, ("limit", "var(--limit)")])


def _bar(memory: Memory, limit_bytes: int, scale: float) -> str:
    at, rects = 0.0, []
    for name, colour in MEMORY.items():
        width = getattr(memory, name) * scale
        rects.append(f'<rect x="{at:.1f}" width="{width:.1f}" height="10" fill="{colour}"><title>'
                     f'{name}: {size(getattr(memory, name))}</title></rect>')
        at += width
    line = f'<rect class="limit" x="{limit_bytes * scale:.1f}" width="3" height="10"/>'
    return (f'<svg class="memory" viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" '
            f'role="img" aria-label="memory">{"".join(rects)}{line}</svg>')


def block(story: Story) -> str:
    """Each parameter of a block as a rectangle, filled where the first device has it."""
    found = split_block(story)
    return '<div class="block">' + "".join(_params(found.params)) + "</div>" if found else ""


def _params(params: list[Param]) -> Iterator[str]:
    for param in params[:MOST_DRAWN]:
        rows, columns = (*param.shape, 1)[:2] if param.shape else (1, 1)
        longest = max(rows, columns)
        high, wide = (max(8.0, SIDE * n / longest) for n in (rows, columns))
        rects = "".join(_rect(offsets, sizes, high / rows, wide / columns)
                        for offsets, sizes in param.boxes)
        yield (f'<figure><svg width="{wide + 2:.0f}" height="{high + 2:.0f}" viewBox="-1 -1 '
               f'{wide + 2:.1f} {high + 2:.1f}" role="img" aria-label="{escape(param.layout)}">'
               f'{rects}<rect class="whole" width="{wide:.1f}" height="{high:.1f}"/></svg>'
               f'<figcaption>{escape(param.name)}<br>{shape(param.shape)}<br>'
               f'{escape(param.layout)}</figcaption></figure>')


def _rect(offsets: tuple[int, ...], sizes: tuple[int, ...], tall: float, broad: float) -> str:
    (y, x), (h, w) = (*offsets, 0)[:2], (*sizes, 1)[:2]
    return (f'<rect x="{x * broad:.1f}" y="{y * tall:.1f}" width="{w * broad:.1f}" '
            f'height="{h * tall:.1f}" fill="#0072b2"/>')

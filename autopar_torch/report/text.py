"""The sections of a report as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .sections import sections
from .story import Story, TextTable

WIDTH, WIDEST = 100, 44  # characters of a line, and of a column


def lines(story: Story) -> Iterator[str]:
    """Line by line."""
    for section in sections(story):
        yield from ("", section.title, "-" * len(section.title))
        for text in section.says:
            yield from textwrap.wrap(text, WIDTH)
        if section.table:
            yield from table(section.table)


def table(found: TextTable) -> Iterator[str]:
    """Columns as wide as they have to be; what is longer goes on in the next line."""
    rows = [found.head, *found.rows]
    widths = [min(WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [textwrap.wrap(text, width) or [""]
                 for text, width in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            yield "  ".join((cell[k] if k < len(cell) else "").ljust(width)
                            for cell, width in zip(cells, widths, strict=True)).rstrip()

"""A report as one page: nothing is fetched and nothing runs, so it can be read anywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from ..errors import FileError
from . import gantt, parts
from .sections import sections
from .story import Section, Story, TextTable

DRAWINGS: dict[str, Callable[[Story], str]] = {
    "step": gantt.drawn, "memory": parts.memory, "sharding": parts.block}
SHORT = 20  # characters of a cell that is never broken
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #5a5a5a; --line: #d4d4d4;
  --field: #f3f3f3; --limit: #c00000; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --soft: #a8a8a8;
  --line: #3c3c3c; --field: #222; --limit: #ff6b6b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; font: 15px/1.45 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; } figure { margin: 1rem 0; } figcaption { color: var(--soft); }
.verdict p:first-of-type { font-size: 1.1rem; }
.lane { margin: .5rem 0; } .lane p { font-size: .8rem; margin: 0; color: var(--soft); }
.lane svg { display: block; width: 100%; background: var(--field); }
svg.compute, svg.memory { height: 18px; } svg.comm { height: 9px; margin-top: 1px; }
rect.limit { fill: var(--limit); } rect.whole { fill: none; stroke: var(--ink); }
.ticks { display: flex; justify-content: space-between; font-size: .75rem; color: var(--soft); }
.key span { display: inline-block; margin-right: 1rem; white-space: nowrap; font-size: .85rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
.block { display: flex; flex-wrap: wrap; gap: 1rem; }
.block figure { margin: 0; width: 9.5rem; } .block figcaption { font-size: .75rem; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 600; }
td { font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
code { font-size: .92em; background: var(--field); }
@media (max-width: 45rem) {
  thead { display: none; } tr { display: block; border-bottom: 2px solid var(--line); }
  td, td.n { display: flex; white-space: normal; gap: 1rem; border: 0; padding: .1rem 0; }
  td::before { content: attr(data-head); flex: 0 0 38%; color: var(--soft); } }
"""


def page(story: Story, title: str) -> str:
    """The whole page."""
    body = "".join(_section(section, story) for section in sections(story))
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
            '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n")


def write(story: Story, path: str | os.PathLike[str], title: str = "A plan of autopar") -> Path:
    """The page as a file; its path."""
    text = page(story, title)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot write the report: {error}", where=str(path),
                        fix="name a file in a folder that is there") from error
    return Path(path)


def _section(section: Section, story: Story) -> str:
    says = "".join(f"<p>{_code(text)}</p>" for text in section.says)
    draw = DRAWINGS.get(section.name)
    return (f'<section class="{section.name}"><h2>{escape(section.title)}</h2>{says}'
            f'{draw(story) if draw else ""}{_table(section.table) if section.table else ""}'
            "</section>")


def _code(text: str) -> str:
    """What stands between backticks is a word of the code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = "".join("<tr>" + "".join(
        f'<td data-head="{escape(name)}"{" class=n" if len(text) < SHORT else ""}><span>'
        f'{escape(text)}</span></td>'
        for name, text in zip(table.head, row, strict=True)) + "</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

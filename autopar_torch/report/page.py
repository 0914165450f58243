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
STYLE = Path(__file__).with_name("page.css")


def page(story: Story, title: str) -> str:
    """The whole page."""
    body = "".join(_section(section, story) for section in sections(story))
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
            '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n")


def write(story: Story, path: str | os.PathLike[str], title: str = "A plan of autopar") -> Path:
    """The page as a file; its path."""
    text = page(story, title)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot write the report: {error}", where=str(path),
                        fix="name a file that you can write") from error
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

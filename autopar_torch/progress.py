"""What one rank tells the log for all: how far something long has come (its name at INFO, item by
item at DEBUG), and warnings that would be the same on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")
log = logging.getLogger("autopar_torch.progress")


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """`total` is 0 where nobody knows how much there is to do."""
    level = logging.DEBUG if done else logging.INFO
    if log.isEnabledFor(level) and _speaks():
        log.log(level, "%s", what, extra={"done": done, "total": total})


def warn(own: logging.Logger, text: str, *details: Any) -> None:
    if _speaks():
        own.warning(text, *details)


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def counted(what: str, items: Collection[Item]) -> Iterator[Item]:
    """The items; before each it is told how many are done."""
    for done, item in enumerate(items):
        tell(what, done, len(items))
        yield item

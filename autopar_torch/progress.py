"""How far something long has come, told to the log: its name at INFO, item by item at DEBUG."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import TypeVar

Item = TypeVar("Item")
log = logging.getLogger("autopar_torch.progress")


def tell(what: str, done: int = 0, total: int = 0) -> None:
    """One rank speaks for all. `total` is 0 where nobody knows how much there is to do."""
    level = logging.DEBUG if done else logging.INFO
    if log.isEnabledFor(level) and os.environ.get("RANK", "0") == "0":
        log.log(level, "%s", what, extra={"done": done, "total": total})


def counted(what: str, items: Collection[Item]) -> Iterator[Item]:
    """The items; before each it is told how many are done."""
    for done, item in enumerate(items):
        tell(what, done, len(items))
        yield item

"""Progress on stderr: a bar on a terminal, elsewhere a line now and then. Results are stdout's."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import progress

if TYPE_CHECKING:
    from rich.progress import Progress

FIRST_S, EVERY_S = 2.0, 10.0  # of silence before a line


class LogLines(logging.Handler):
    """A line of the log where stderr is now: a bar replaces it for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


class Shown(logging.Handler):
    """What `progress` tells."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s = time.monotonic()
        self.next_s, self.what, self.new = self.began_s + FIRST_S, "", True
        self.bar: Progress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        what, done, total = record.getMessage(), int(vars(record)["done"]), vars(record)["total"]
        now_s = time.monotonic()
        self.new, self.what = what != self.what, what
        self.began_s = now_s if self.new else self.began_s
        if sys.stderr.isatty() or self.bar:
            self._draw(what, done, total)
        elif now_s >= self.next_s:
            self.next_s = now_s + EVERY_S
            left_s = (now_s - self.began_s) * (total - done) / max(1, done)
            much = f": {done} of {total}" + (f", about {left_s:.0f} s left" if done else "")
            print(f"[autopar] {what}{much if total else ''}", file=sys.stderr)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self.bar is None:
            self.bar = _bar()
            self.bar.start()
        task = self.bar.task_ids[0]
        if self.new:
            self.bar.reset(task)
        self.bar.update(task, description=what, completed=done, total=total or None, refresh=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()  # and nothing of it is left
            self.bar = None
        super().close()


def _bar() -> Progress:
    """Ranks that measure are not disturbed: there it moves only when something is told."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(SpinnerColumn(), "{task.description}", BarColumn(), TimeElapsedColumn(),
                   TimeRemainingColumn(), console=Console(stderr=True), transient=True,
                   redirect_stdout=False, auto_refresh="RANK" not in os.environ)
    bar.add_task("", total=None)
    return bar


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """While a command works."""
    handler = Shown()
    level, propagate = progress.log.level, progress.log.propagate
    progress.log.addHandler(handler)
    progress.log.setLevel(logging.DEBUG)
    progress.log.propagate = False
    try:
        yield
    finally:
        clear()
        progress.log.removeHandler(handler)
        progress.log.setLevel(level)
        progress.log.propagate = propagate


def clear() -> None:
    """Before a result is written."""
    for handler in progress.log.handlers:
        handler.close()

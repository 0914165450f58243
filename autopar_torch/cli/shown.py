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

    bar: Progress | None = None
    what, began_s, next_s = "", 0.0, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        what, done, total = record.getMessage(), vars(record)["done"], vars(record)["total"]
        new, self.what, now_s = what != self.what, what, time.monotonic()
        self.began_s = now_s if new else self.began_s
        self.next_s = self.next_s or now_s + FIRST_S
        if sys.stderr.isatty() or self.bar:
            self.bar = self.bar or _bar()
            if new:
                self.bar.reset(self.bar.task_ids[0])
            self.bar.update(self.bar.task_ids[0], description=what, completed=done,
                            total=total or None, refresh=True)
        elif now_s >= self.next_s:
            self.next_s = now_s + EVERY_S
            left_s = (now_s - self.began_s) * (total - done) / max(1, done)
            left = f", about {left_s:.0f} s left" if done else ""
            print(f"[autopar] {what}" + f": {done} of {total}{left}" * bool(total), file=sys.stderr)


def _bar() -> Progress:
    """Ranks that measure are not disturbed: there it moves only when something is told."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False,
                   auto_refresh="RANK" not in os.environ)
    bar.add_task("", total=None)
    bar.start()
    return bar


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """While a command works."""
    handler = Shown()
    progress.log.addHandler(handler)
    progress.log.setLevel(logging.DEBUG)
    progress.log.propagate = False
    try:
        yield
    finally:
        clear()
        progress.log.removeHandler(handler)
        progress.log.setLevel(logging.NOTSET)
        progress.log.propagate = True


def clear() -> None:
    """Before a result is written: nothing of a bar is left."""
    for handler in progress.log.handlers:
        if isinstance(handler, Shown) and handler.bar:
            handler.bar.stop()
            handler.bar = None

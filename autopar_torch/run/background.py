"""Checkpoints that are written beside training.

Ranks copy what they speak for to the memory of the host, and go on. A thread of each writes its
file, then a note of what it wrote. The thread of rank 0 waits for all notes and commits.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from .. import files
from ..errors import AutoparError, CheckpointError
from .stored import note_name
from .world import World

log = logging.getLogger("autopar_torch")
POLL_S = 0.05
LEAVE_S = 300.0  # for other ranks, at the end of a script
Note = TypeVar("Note", bound=Struct)


class Writing:
    """A checkpoint under way."""

    def __init__(self, folder: Path, generation: str, rank: int, size: int,
                 lost: Callable[[], bool]) -> None:
        """`lost`: whether another rank is known to be gone, so that its note will not come."""
        self.folder, self.generation, self.rank, self.size = folder, generation, rank, size
        self.lost = lost
        self.error: AutoparError | None = None
        self.done, self.stopped = threading.Event(), threading.Event()

    def begin(self, write: Callable[[], Note], commit: Callable[[Sequence[Note]], None]) -> None:
        self.thread = threading.Thread(target=self._run, args=(write, commit), daemon=True,
                                       name="autopar save")
        self.thread.start()
        atexit.register(self._leave)

    def _run(self, write: Callable[[], Note], commit: Callable[[Sequence[Note]], None]) -> None:
        try:
            own = write()
            files.save(own, self._note(self.rank))
            self.done.set()
            del write  # and the copies that it has
            if self.rank == 0:
                commit(list(self._notes(type(own))))
        except AutoparError as error:
            self.error = error
        except Exception as error:  # whatever it is: the next call tells it
            self.error = CheckpointError(f"{type(error).__name__}: {error}",
                                         where=str(self.folder))
            self.error.__cause__ = error
        finally:
            self.done.set()

    def _note(self, rank: int) -> Path:
        return self.folder / note_name(self.generation, rank)

    def _notes(self, kind: type[Note]) -> Iterator[Note]:
        """What every rank wrote, once it has."""
        for rank in range(self.size):
            while not self._note(rank).exists():
                if self.stopped.wait(POLL_S) or self.lost():
                    raise CheckpointError(f"rank {rank} has not written its part",
                                          where=str(self.folder), fix="see its log")
            yield files.load(self._note(rank), kind)

    def finish(self, world: World) -> None:
        """All ranks wait for it together, and all hear what went wrong on any of them."""
        atexit.unregister(self._leave)
        self.done.wait()
        if not all(world.everyones(self.error is None, bool)):
            self.stopped.set()  # one has written nothing
        self.thread.join()
        world.jointly(self._tell)

    def _tell(self) -> None:
        if self.error is not None:
            raise self.error

    def _leave(self) -> None:
        """At the end of a script that did not wait."""
        self.thread.join(LEAVE_S)
        self.stopped.set()
        self.thread.join()
        if self.error is not None:
            log.error("the last checkpoint was not saved: %s", self.error)

"""Who stands still and who is gone: ranks tell each other once a second what they do.

The main thread only sets attributes. A thread of its own writes them down, and reads those of the
others only once this rank has waited for long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from ..errors import RunError
from . import ending
from .board import Board
from .standing import BROKEN, IN_CODE, Beat, Call, Member, Standing, Verdict, line_of

log = logging.getLogger("autopar_torch")
BEAT_S = 1.0
FIRST_LOOK_S = 5.0
SILENT_S = 3.0  # after a connection broke
PATIENCE = 10  # limits: as long may a rank be busy that is alive
LONG_S = 1800.0  # the limit of what takes long, and says so itself
LONG = ("tracing", "measuring", "searching")
GRACE_S = 5.0
RAW = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|"
                 "recvvalue|sendbytes", re.IGNORECASE)  # fmt: skip


class Watch:
    """What this rank does, and what becomes of the others."""

    def __init__(self, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.limit_s = rank, limit_s
        self.call = Call(0, "the start")
        self.action: object = IN_CODE  # set by the main thread, anything with a name
        self.verdict: Verdict | None = None
        self.members: tuple[Member, ...] = ()
        if size > 1:
            self._begin(size)

    # --- the main thread ------------------------------------------------------------------------

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """A call that all ranks make together, or a part of one."""
        before = self.action
        if before is IN_CODE:
            self.call = self.call.then(name)
        self.action = name
        try:
            yield
        except RuntimeError as error:
            if not self.members or not RAW.search(str(error)):
                raise
            raise self.explained() from error
        finally:
            self.action = before

    def explained(self) -> RunError:
        """Why a connection broke. It is also logged at once: whoever started the ranks soon ends
        those that are left."""
        verdict = self.verdict
        first, deadline = self._standing().beats, time.monotonic() + SILENT_S
        while verdict is None:
            standing = self._standing()
            verdict = self.board.verdict() or standing.gone()
            if verdict is None and time.monotonic() > deadline:
                verdict = standing.silent(first, SILENT_S) or BROKEN
            time.sleep(0 if verdict else 0.05)
        verdict = self.board.publish(verdict)
        error = RunError(verdict.what, where=self._place(), fix=verdict.fix)
        if self.verdict is None:
            self.verdict = verdict
            log.error("%s", error)
        return error

    def _place(self) -> str:
        return f"{self.own}, {self._beat()}"

    # --- the thread -----------------------------------------------------------------------------

    def _begin(self, size: int) -> None:
        self.next_look_s, self.warned = 0.0, False
        self.group, self.board = dist.group.WORLD, Board(self.rank)
        self.main, self.parent = threading.main_thread().ident, os.getppid()
        self.count = 0
        self._changed()
        self._write()
        self.own = Member.here(self.rank)
        self.members = self.board.meet(self.own, size)
        self.ends = threading.RLock()
        self.word = ending.Word(self._ended, self._told, self._terminated)
        self.stopped = False
        self.thread = threading.Thread(target=self._run, name="autopar watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Once a second, while the process group is there; the launcher is watched to the end."""
        while not self.stopped:
            if self.word.comes(BEAT_S):
                self._terminated()
            self._check_launcher()
            if not self.board.lost and dist.group.WORLD is self.group:
                self._turn()

    def _check_launcher(self) -> None:
        """torchrun has to be killed hard to leave its ranks behind; then nobody would end them."""
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and self.parent != 1
        if by_torchrun and os.getppid() != self.parent:
            log.error("%s ends, as what started it (pid %d) is gone", self.own, self.parent)
            ending.give_up()

    def _turn(self) -> None:
        self._write()
        if self.action is IN_CODE or self.verdict is not None:
            return
        waited_s = time.monotonic() - self.changed_at
        if waited_s >= (self.next_look_s or min(FIRST_LOOK_S, self.limit_s / 2)):
            self.next_look_s = (min(2 * waited_s, self.limit_s) if waited_s < self.limit_s
                                else waited_s + max(BEAT_S, self.limit_s / 4))  # fmt: skip
            verdict = self._look(waited_s)
            if verdict is not None:
                self._end(verdict)

    def _changed(self) -> None:
        self.seen, self.changed_at = (self.call, self.action), time.monotonic()
        self.next_look_s, self.warned = 0.0, False
        self.first_beats: dict[int, Beat] = {}

    def _write(self) -> None:
        if (self.call, self.action) != self.seen:
            self._changed()
        self.count += 1
        self.board.write(self._beat())

    def _beat(self) -> Beat:
        call, action = self.call, self.action
        since_s = time.monotonic() - self.changed_at if (call, action) == self.seen else 0.0
        frame = sys._current_frames().get(self.main or 0)
        return Beat(self.count, call, str(action), since_s, line_of(frame))

    def _standing(self) -> Standing:
        beats = self.board.beats([m.rank for m in self.members if m.rank != self.rank])
        return Standing(self.members, self.own, self._beat(), beats, self.board.ends())

    def _look(self, waited_s: float) -> Verdict | None:
        standing = self._standing()
        self.first_beats = self.first_beats or dict(standing.beats)
        found = (self.board.verdict() or standing.gone()
                 or standing.elsewhere(min(FIRST_LOOK_S, self.limit_s) / 2))  # fmt: skip
        if found is None and waited_s >= self.limit_s:
            found = standing.silent(self.first_beats, waited_s)
        limit_s = max(self.limit_s, LONG_S) if str(self.action) in LONG else self.limit_s
        if found is not None or waited_s < limit_s:
            return found
        slow = standing.slow(waited_s)
        if waited_s >= PATIENCE * limit_s:
            return slow
        if not self.warned:
            self.warned = True
            log.warning("%s waits: %s (an error after %.0f s)", self._place(), slow.what,
                        PATIENCE * limit_s)  # fmt: skip
        return None

    # --- the end --------------------------------------------------------------------------------

    def _end(self, verdict: Verdict) -> None:
        """Say why, and wake the main thread; if it does not wake, end without it."""
        self.verdict = verdict = self.board.publish(verdict)
        log.error("%s", RunError(verdict.what, where=self._place(), fix=verdict.fix))
        ending.show_stacks()
        ending.cut()
        deadline = time.monotonic() + GRACE_S
        while self.action is not IN_CODE:
            if time.monotonic() > deadline:
                log.error("%s does not wake up from %s and ends", self.own, self.action)
                ending.give_up()
            time.sleep(0.05)

    def _ended(self, text: str) -> None:
        """Leave word of how this rank ended."""
        self._write()
        self.board.end(text)
        if not text:  # Python ends: a thread that is in C++ then would have it abort
            self.stopped = True
            self.word.wake()
            self.thread.join(GRACE_S)

    def _told(self, error: BaseException) -> None:
        """An exception that nobody caught: of a connection that broke outside of our calls too."""
        if self.verdict is None and isinstance(error, RuntimeError) and RAW.search(str(error)):
            self.explained()
        self._ended(f"{type(error).__name__}: {error}")
        ending.cut()  # it may take seconds until this process has ended

    def _terminated(self) -> None:
        """SIGTERM: mostly since another rank died."""
        with self.ends:
            if self.verdict is None:
                found = self.board.verdict() or self._standing().gone()
                what = f"{found.what}\n  fix:   {found.fix}" if found else "told to end (SIGTERM)"
                log.error("%s\n  where: %s", what, self._place())
            ending.give_up(143)


_current: Watch | None = None


def watching(rank: int, size: int, limit_s: float) -> Watch:
    """The watch of this process: one, however many models it trains."""
    global _current
    limit_s = _limit_s(limit_s)
    if _current is None or (size > 1 and getattr(_current, "group", None) is not dist.group.WORLD):
        _current = Watch(rank, size, limit_s)
    _current.limit_s = limit_s
    return _current


def _limit_s(asked_s: float) -> float:
    text = os.environ.get("AUTOPAR_TIMEOUT_S", "")
    try:
        limit_s = float(text or asked_s)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < 1e6:
        raise RunError(f"{text!r} is no number of seconds", where="AUTOPAR_TIMEOUT_S",
                       fix="set it to the seconds that ranks may wait, like 60")  # fmt: skip
    return limit_s

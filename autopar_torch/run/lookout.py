"""Which rank hangs and which is gone: ranks tell each other once a second what they do.

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
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from ..errors import AutoparError, RunError
from . import ending
from .board import Board
from .meet import seconds
from .standing import (
    BROKEN,
    IN_CODE,
    IN_COLLECTIVE,
    Beat,
    JointCall,
    Member,
    Standing,
    Verdict,
    exchanges,
    in_a_line,
    line_of,
)

log = logging.getLogger("autopar_torch")
BEAT_S = 1.0
FIRST_CHECK = 1 / 16  # of the limit; then the distance doubles up to a quarter
SILENT_S = 3.0  # after a connection broke
PATIENCE = 10  # limits: as long may a rank be busy that is alive
LONG_S = 1800.0  # the limit of what takes long, and says so itself
LONG = ("tracing", "measuring", "searching")
GRACE_S = 5.0
RAW = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|"
                 "recvvalue|sendbytes", re.IGNORECASE)


class Lookout:
    """Tells the others what this rank does, and finds out whether one of them hangs or is gone."""

    def __init__(self, rank: int, size: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self.call = JointCall(0, "the start")
        self.action: object = IN_CODE  # set by the main thread, anything with a name
        self.verdict: Verdict | None = None
        self.members: tuple[Member, ...] = ()
        if size > 1:
            self._begin(rank, size)

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
        except Exception as error:
            if self.members and _is_raw(error):
                raise self.explained() from error
            if before is IN_CODE:
                self.call = self.call.failing(error)
            raise
        finally:
            self.action = before

    def explained(self) -> RunError:
        """Why a connection broke."""
        first, deadline, found = self._standing().beats, time.monotonic() + SILENT_S, self.verdict
        while found is None and time.monotonic() < deadline:
            time.sleep(0.05)
            found = self.verdict or self._cause(self._standing())
        return self._tell(found or self._standing().silent(first, SILENT_S) or BROKEN)

    # --- the thread -----------------------------------------------------------------------------

    def _begin(self, rank: int, size: int) -> None:
        self.group, self.board, self.own = dist.group.WORLD, Board(rank, size), Member.here(rank)
        self.main, self.parent = threading.main_thread().ident or 0, os.getppid()
        self.count = 0
        self.end: str | None = None
        self.seen: tuple[JointCall, object] | None = None
        self.telling, self.stopped = threading.Lock(), False
        self._write()
        self.members = self.board.meet(self.own)
        self.word = ending.Word(self._ended, self._told)
        self.thread = threading.Thread(target=self._run, name="autopar watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Once a second, while the process group is there; the launcher is watched to the end."""
        while not self.stopped:
            if self.word.comes(BEAT_S):
                self._terminated()
            self._check_launcher()
            if not self.board.lost and dist.group.WORLD is self.group:
                self._write()
                self._turn(time.monotonic() - self.changed_at)

    def _check_launcher(self) -> None:
        """A torchrun that is killed hard leaves its ranks behind; then they end themselves."""
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and self.parent != 1
        if by_torchrun and os.getppid() != self.parent:
            log.error("%s ends, as what started it (pid %d) is gone", self.own, self.parent)
            ending.give_up()

    def _write(self) -> None:
        if (self.call, self.action) != self.seen:
            self.seen, self.changed_at = (self.call, self.action), time.monotonic()
            self.next_check_s, self.warned = self.limit_s * FIRST_CHECK, False
            self.first_beats: Mapping[int, Beat] = {}
        self.count += 1
        self.board.write(self._beat())

    def _beat(self) -> Beat:
        now = (self.call, self.action)
        since_s = time.monotonic() - self.changed_at if now == self.seen else 0.0
        frame, action = sys._current_frames().get(self.main), str(now[1])
        if action == IN_CODE and exchanges(frame):
            action = IN_COLLECTIVE
        return Beat(self.count, now[0], action, since_s, line_of(frame), self.end)

    def _standing(self) -> Standing:
        return Standing(self.members, self.own, self._beat(), self.board.beats())

    def _cause(self, standing: Standing) -> Verdict | None:
        return self.board.verdict() or standing.gone()

    def _turn(self, waited_s: float) -> None:
        in_code = self.action is IN_CODE  # a collective of the script may wait for anything
        if self.verdict is None and self._waits(in_code) and waited_s >= self.next_check_s:
            self.next_check_s += min(self.next_check_s, self.limit_s / 4)
            found = self._cause(self._standing()) if in_code else self._check(waited_s)
            if found is not None:
                self._end(found, in_code)

    def _waits(self, in_code: bool) -> bool:
        """The main thread, for others: in a call of ours, or in a collective of the script."""
        if in_code:
            return exchanges(sys._current_frames().get(self.main))
        return self.action is not IN_CODE

    def _check(self, waited_s: float) -> Verdict | None:
        standing = self._standing()
        self.first_beats = self.first_beats or standing.beats
        found = self._cause(standing) or standing.elsewhere(
            self.first_beats, self.limit_s * FIRST_CHECK)
        if found is None and waited_s >= self.limit_s:
            found = standing.silent(self.first_beats, waited_s)
        limit_s = max(self.limit_s, LONG_S) if str(self.action) in LONG else self.limit_s
        if found is not None or waited_s < limit_s:
            return found
        if found := standing.left():
            return found
        slow = standing.slow(waited_s)
        if waited_s >= PATIENCE * limit_s:
            return slow
        if not self.warned:
            self.warned = True
            log.warning("%s, %s waits: %s (an error after %.0f s)", self.own, standing.doing,
                        slow.what, PATIENCE * limit_s)
        return None

    # --- the end --------------------------------------------------------------------------------

    def _tell(self, found: Verdict) -> RunError:
        """The error that all ranks raise. It is logged at once, as the launcher soon ends the ranks
        that are left."""
        with self.telling:  # to its end, before a SIGTERM is obeyed
            verdict = self.board.publish(found)
            error = RunError(verdict.what, where=f"{self.own}, {self._beat()}", fix=verdict.fix)
            if self.verdict is None:
                log.error("%s", error)
            self.verdict = verdict
        return error

    def _end(self, found: Verdict, in_code: bool) -> None:
        """Say why, and wake the main thread; if it does not wake, end without it."""
        error = self._tell(found)
        ending.show_stacks()
        if in_code:
            ending.interrupt(self.main, error)
        threading.Thread(target=ending.cut, daemon=True).start()  # NCCL may wait for the GPU
        deadline = time.monotonic() + GRACE_S
        while self._waits(in_code):
            if time.monotonic() > deadline:
                log.error("%s does not wake up from %s and ends", self.own, self.action)
                ending.give_up()
            time.sleep(0.05)

    def _ended(self, text: str) -> None:
        """Leave word of how this rank ended."""
        if self.end is None:
            self.end = in_a_line(text)
        if not text:  # Python ends: a thread that is in C++ then would have it abort
            self.stopped = True
            self.word.wake()
            self.thread.join(GRACE_S)
        self._write()

    def _told(self, error: BaseException) -> None:
        """Leave word of an uncaught exception; explain it if a connection broke in another call."""
        if self.verdict is None and _is_raw(error):
            self.explained()
        self._ended(f"{type(error).__name__}: {error}")
        ending.cut()  # it may take seconds until this process has ended

    def _terminated(self) -> None:
        """SIGTERM: mostly since another rank died."""
        found = self.verdict or self._cause(self._standing())
        if found is None:
            log.error("told to end (SIGTERM)\n  where: %s, %s", self.own, self._beat())
        else:
            self._tell(found)
        ending.give_up(143)


def _is_raw(error: BaseException) -> bool:
    """Whether it may be of a connection that broke."""
    return (isinstance(error, RuntimeError) and not isinstance(error, AutoparError)
            and bool(RAW.search(str(error))))


_current: Lookout | None = None


def watching(rank: int, size: int, limit_s: float) -> Lookout:
    """The lookout of this process: one, however many models it trains."""
    global _current
    limit_s = seconds("AUTOPAR_TIMEOUT_S", limit_s)
    if _current is None or (size > 1 and getattr(_current, "group", None) is not dist.group.WORLD):
        _current = Lookout(rank, size, limit_s)
    _current.limit_s = limit_s
    return _current

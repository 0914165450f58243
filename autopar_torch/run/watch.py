"""Who stands still and who is gone: ranks tell each other once a second what they do.

The main thread only sets attributes. A thread of its own writes them to the store, with a client of
its own, and reads those of the others only once this rank has waited for long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch.distributed as dist
from msgspec import Struct
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .. import files
from ..errors import RunError
from . import ending

log = logging.getLogger("autopar_torch")
BEAT_S = 1.0
FIRST_LOOK_S = 5.0
SILENT_S = 3.0  # after a connection broke
PATIENCE = 10  # limits: as long may a rank be busy that is alive
LONG_S = 1800.0  # the limit of what takes long, and says so itself
LONG = ("tracing", "measuring", "searching")
GRACE_S = 5.0
IN_CODE = "in your code"
STOPPED = "its process is stopped (SIGSTOP)"
HELD = "its Python does not run (held by code in C?), or its machine is away"
RAW = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|"
                 "recvvalue|sendbytes", re.IGNORECASE)  # fmt: skip
LIBRARIES = (f"{os.sep}autopar_torch{os.sep}", f"{os.sep}torch{os.sep}", "<", "contextlib.py",
             "threading.py")  # fmt: skip


class Member(Struct, frozen=True):
    """Where a rank runs."""

    rank: int
    host: str
    machine: str  # processes of equal ones see each other
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on host {self.host})"


class Beat(Struct, frozen=True):
    """What a rank does."""

    count: int
    call: int  # calls that all ranks make together, counted
    name: str  # of that call
    action: str
    since_s: float
    line: str  # of the script

    def __str__(self) -> str:
        call = f"{self.name} (call {self.call})"
        place = f"in {call}" if self.action == self.name else f"in {call} at {self.action}"
        place = f"{IN_CODE} after {call}" if self.action == IN_CODE else place
        waits = f" for {self.since_s:.0f} s" if self.since_s >= BEAT_S else ""
        return f"{place}{waits}" + (f", {self.line}" if self.line else "")


class Verdict(Struct, frozen=True):
    """Why this job cannot go on."""

    what: str
    fix: str


class Watch:
    """What this rank does, and what becomes of the others."""

    def __init__(self, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.limit_s = rank, limit_s
        self.call: tuple[int, str] = (0, "the start")
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
            self.call = (self.call[0] + 1, name)
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
        first, deadline = self._beats(), time.monotonic() + SILENT_S
        while verdict is None:
            beats = self._beats()
            verdict = self._known() or self._gone(beats)
            if verdict is None and time.monotonic() > deadline:
                verdict = self._silent(first, beats, SILENT_S) or _broken()
            time.sleep(0 if verdict else 0.05)
        verdict = self._publish(verdict)
        error = RunError(verdict.what, where=self._place(), fix=verdict.fix)
        if self.verdict is None:
            self.verdict = verdict
            log.error("%s", error)
        return error

    def _place(self) -> str:
        return f"{self.members[self.rank]}, {self._beat()}"

    # --- the thread -----------------------------------------------------------------------------

    def _begin(self, size: int) -> None:
        self.group = dist.group.WORLD
        default: Any = dist.distributed_c10d._get_default_store()
        self.store = cast(Any, PrefixStore)("watch", default.clone())
        self.count, self.seen, self.changed_at = 0, (self.call, self.action), time.monotonic()
        self.next_look_s, self.warned = 0.0, False
        self.first_beats: dict[int, Beat] = {}
        self.main, self.parent = threading.main_thread().ident, os.getppid()
        own = Member(self.rank, socket.gethostname(), _machine(), os.getpid())
        self._write()
        self.store.set(f"member/{self.rank}", files.encode(own))
        found = self.store.multi_get([f"member/{r}" for r in range(size)])
        self.members = tuple(files.decode(bytes(data), Member) for data in found)
        self.word = ending.Word(self._ended, self._told, self._terminated)
        self.ends = threading.RLock()
        threading.Thread(target=self._run, name="autopar watch", daemon=True).start()

    def _run(self) -> None:
        woken = [] if self.word.woken is None else [self.word.woken]
        while dist.is_initialized() and dist.group.WORLD is self.group:
            if any(self.word.heard(os.read(end, 64)) for end in _ready(woken)):
                self._terminated()
            self._check_launcher()
            try:
                self._turn()
            except RuntimeError as error:  # the store is gone: its rank has ended
                log.debug("nothing is watched any more: %s", error)
                self._wait_for_the_end(woken)

    def _wait_for_the_end(self, woken: list[int]) -> None:
        while True:
            if any(self.word.heard(os.read(end, 64)) for end in _ready(woken)):
                ending.give_up(143)
            self._check_launcher()

    def _check_launcher(self) -> None:
        """torchrun has to be killed hard to leave its ranks behind; then nobody would end them."""
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and self.parent != 1
        if by_torchrun and os.getppid() != self.parent:
            log.error("%s ends, as what started it (pid %d) is gone", self.members[self.rank],
                      self.parent)  # fmt: skip
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

    def _write(self) -> None:
        now = (self.call, self.action)
        if now != self.seen:
            self.seen, self.changed_at = now, time.monotonic()
            self.next_look_s, self.warned, self.first_beats = 0.0, False, {}
        self.count += 1
        self.store.set(f"beat/{self.rank}", files.encode(self._beat()))

    def _beat(self) -> Beat:
        frame = sys._current_frames().get(self.main or 0)
        now = (call, name), action = self.call, self.action
        since_s = time.monotonic() - self.changed_at if now == self.seen else 0.0
        return Beat(self.count, call, name, str(action), since_s, _line(frame))

    # --- what becomes of the others -------------------------------------------------------------

    def _look(self, waited_s: float) -> Verdict | None:
        beats = self._beats()
        self.first_beats = self.first_beats or beats
        late = waited_s >= self.limit_s
        found = self._known() or self._gone(beats) or self._elsewhere(beats)
        found = found or (self._silent(self.first_beats, beats, waited_s) if late else None)
        limit_s = max(self.limit_s, LONG_S) if str(self.action) in LONG else self.limit_s
        if found is None and waited_s >= limit_s:
            slow = self._slow(beats, waited_s)
            if waited_s >= PATIENCE * limit_s:
                return slow
            if not self.warned:
                self.warned = True
                log.warning("%s waits: %s (an error after %.0f s)", self._place(), slow.what,
                            PATIENCE * limit_s)  # fmt: skip
        return found

    def _beats(self) -> dict[int, Beat]:
        """Of the other ranks; of those that the store still tells about."""
        others = [m.rank for m in self.members if m.rank != self.rank]
        try:
            found = self.store.multi_get([f"beat/{r}" for r in others])
        except RuntimeError as error:
            log.debug("the store is gone: %s", error)
            return {}
        return {r: files.decode(bytes(b), Beat) for r, b in zip(others, found, strict=True)}

    def _known(self) -> Verdict | None:
        """What another rank found out."""
        try:
            if self.store.check(["verdict"]):
                return files.decode(self.store.get("verdict"), Verdict)
        except RuntimeError as error:
            log.debug("the store is gone: %s", error)
        return None

    def _publish(self, verdict: Verdict) -> Verdict:
        """All ranks tell the same: the first that was found."""
        try:
            first = self.store.compare_set("verdict", "", files.encode(verdict).decode())
            return files.decode(first, Verdict)
        except RuntimeError as error:
            log.debug("the store is gone: %s", error)
            return verdict

    def _gone(self, beats: Mapping[int, Beat]) -> Verdict | None:
        """A rank that failed, whose process is no more, or whose script has ended."""
        ends = self._ends()
        failed = [rank for rank, text in ends.items() if text]
        dead = [m.rank for m in self._beside() if _state(m.pid) in "ZX"]
        lost = [rank for rank in dead if rank not in ends]
        for rank in failed[:1]:
            return Verdict(f"{self.members[rank]} stopped: {ends[rank]}", "see its traceback")
        for rank in lost[:1]:
            return Verdict(
                f"{self.members[rank]} is gone: it was killed, or crashed outside of Python; "
                f"when last heard of, it was {beats.get(rank, 'at work')}",
                "see the end of its log, and the system's (a kill by SIGKILL is often for lack of "
                "memory); start again from the last checkpoint",
            )
        for rank in (r for r in ends if self._left_early(r, beats)):
            return Verdict(
                f"{self.members[rank]} has come to the end of its script while others go on; its "
                f"last: {beats.get(rank, 'not known')}",
                "give every rank the same number of batches, and make calls of the model on every "
                "rank",
            )
        return None

    def _left_early(self, rank: int, beats: Mapping[int, Beat]) -> bool:
        """It has made fewer calls than this rank: what this one waits for will not come."""
        return rank in beats and beats[rank].call < self.call[0]

    def _ends(self) -> dict[int, str]:
        """Rank -> with which exception it ended ("": none)."""
        try:
            lines = self.store.get("ended").decode() if self.store.check(["ended"]) else ""
        except RuntimeError as error:
            log.debug("the store is gone: %s", error)
            return {}
        found: dict[int, str] = {}
        for line in lines.splitlines():
            rank, _, text = line.partition(" ")
            found.setdefault(int(rank), text)
        return found

    def _beside(self) -> list[Member]:
        """The other ranks whose processes can be seen from here."""
        own = self.members[self.rank]
        return [m for m in self.members if m.machine == own.machine and m.rank != own.rank]

    def _elsewhere(self, beats: Mapping[int, Beat]) -> Verdict | None:
        """A rank that stands still in another call than this one, though all make the same."""
        own = self._beat()
        for rank, beat in beats.items():
            waits = beat.action != IN_CODE and beat.since_s >= min(FIRST_LOOK_S, self.limit_s) / 2
            if waits and beat.call == own.call and beat.name != own.name:
                return Verdict(
                    f"ranks wait for each other in different calls: {self.members[self.rank]} is "
                    f"{own}; {self.members[rank]} is {beat}",
                    f"call {own.name} and {beat.name} on every rank, in the same order (only "
                    "writing files and printing may be for rank 0 alone)",
                )
        return None

    def _silent(self, before: Mapping[int, Beat], now: Mapping[int, Beat],
                waited_s: float) -> Verdict | None:  # fmt: skip
        for rank, beat in now.items():
            if rank in before and before[rank].count == beat.count:
                stopped = any(m.rank == rank and _state(m.pid) in "Tt" for m in self._beside())
                why = STOPPED if stopped else HELD
                return Verdict(
                    f"{self.members[rank]} has given no sign of life, while this rank waited "
                    f"{waited_s:.0f} s: {why}; when last heard of, it was {beat}",
                    "look at that process (py-spy dump --pid); AUTOPAR_TIMEOUT_S or "
                    'guards={"timeout_s": ...} allow more time',
                )
        return None

    def _slow(self, beats: Mapping[int, Beat], waited_s: float) -> Verdict:
        """All are alive: those that are in the script, or made fewer calls, are waited for."""
        own = self._beat()
        behind = [r for r, b in beats.items() if b.call < own.call or b.action == IN_CODE]
        named = "; ".join(f"{self.members[r]} is {beats[r]}" for r in (behind or list(beats))[:4])
        return Verdict(f"nothing has come for {waited_s:.0f} s; {named}",
                       "make calls of the model on every rank; AUTOPAR_TIMEOUT_S or "
                       'guards={"timeout_s": ...} allow more time')  # fmt: skip

    # --- the end --------------------------------------------------------------------------------

    def _end(self, verdict: Verdict) -> None:
        """Say why, and wake the main thread; if it does not wake, end without it."""
        self.verdict = verdict = self._publish(verdict)
        log.error("%s", RunError(verdict.what, where=self._place(), fix=verdict.fix))
        ending.show_stacks()
        ending.cut()
        deadline = time.monotonic() + GRACE_S
        while self.action is not IN_CODE:
            if time.monotonic() > deadline:
                log.error("%s does not wake up from %s and ends", self.members[self.rank],
                          self.action)  # fmt: skip
                ending.give_up()
            time.sleep(0.05)

    def _ended(self, text: str) -> None:
        """Leave word of how this rank ended."""
        try:
            self._write()
            self.store.append("ended", f"{self.rank} {' '.join(text.split())[:500]}\n")
        except RuntimeError as error:
            log.debug("the store is gone: %s", error)

    def _told(self, error: BaseException) -> None:
        """An exception that nobody caught: of a connection that broke outside of our calls too."""
        if self.verdict is None and isinstance(error, RuntimeError) and RAW.search(str(error)):
            self.explained()
        self._ended(f"{type(error).__name__}: {error}")

    def _terminated(self) -> None:
        """SIGTERM: mostly since another rank died."""
        with self.ends:
            if self.verdict is None:
                found = self._known() or self._gone(self._beats())
                what = f"{found.what}\n  fix:   {found.fix}" if found else "told to end (SIGTERM)"
                log.error("%s\n  where: %s", what, self._place())
            ending.give_up(143)


def _ready(ends: list[int]) -> list[int]:
    """Waits a second, or until a signal came."""
    return select.select(ends, [], [], BEAT_S)[0]


def _broken() -> Verdict:
    return Verdict("a connection to another rank broke, and all that can be seen are alive",
                   "see the logs of the others, and the network between the machines")  # fmt: skip


def _line(frame: FrameType | None) -> str:
    """The innermost line that is no library's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in LIBRARIES):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _state(pid: int) -> str:
    """As /proc has it: R, S, D, T (stopped), Z (dead); X where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _machine() -> str:
    """Equal where processes see each other by their numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


_current: Watch | None = None


def watching(rank: int, size: int, limit_s: float) -> Watch:
    """The watch of this process: one, however many models it trains."""
    global _current
    limit_s = _limit_s(limit_s)
    fresh = _current is None or (size > 1 and getattr(_current, "group", None) is not
                                 dist.group.WORLD)  # fmt: skip
    if _current is None or fresh:
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

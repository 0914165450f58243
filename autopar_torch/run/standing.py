"""What each rank does, and which of them is the cause that others wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from msgspec import Struct

IN_CODE = "in your code"
IN_COLLECTIVE = "in a collective of your code"
STOPPED = "its process is stopped (SIGSTOP)"
HELD = "its Python does not run (held by code in C?), or its machine is away"
LIBRARIES = (f"{os.sep}autopar_torch{os.sep}", f"{os.sep}torch{os.sep}", "<",
             f"{os.sep}contextlib.py", f"{os.sep}threading.py")
MOST_NAMED = 4
MOST_SAID = 500  # characters of an exception
MORE_TIME = 'AUTOPAR_TIMEOUT_S or guards={"timeout_s": ...} allow more time'


def in_a_line(text: str) -> str:
    """What an exception says, on one line that is not too long."""
    return " ".join(text.split())[:MOST_SAID]


class JointCall(Struct, frozen=True):
    """A call that all ranks make together, counted, and the one before; and the last one that
    ended in an error here."""

    number: int
    name: str
    before: str = ""
    failed: int = 0
    error: str = ""

    def then(self, name: str) -> JointCall:
        return JointCall(self.number + 1, name, self.name, self.failed, self.error)

    def failing(self, error: BaseException) -> JointCall:
        text = in_a_line(f"{type(error).__name__}: {error}")
        return JointCall(self.number, self.name, self.before, self.number, text)

    def name_of(self, number: int) -> str:
        """What the call with this number was; "" if that is not known any more."""
        return {self.number: self.name, self.number - 1: self.before}.get(number, "")

    def __str__(self) -> str:
        return f"{self.name} (call {self.number})"


class Beat(Struct, frozen=True):
    """What a rank does, as it says once a second."""

    count: int
    call: JointCall
    action: str
    since_s: float
    line: str  # of the script
    end: str | None = None  # the exception with which it ended, "" at the end of its script

    def __str__(self) -> str:
        outside = self.action in (IN_CODE, IN_COLLECTIVE)
        place = f"{self.action} after {self.call}" if outside else f"in {self.call}"
        action = "" if outside or self.action == self.call.name else f" at {self.action}"
        since = f" for {self.since_s:.0f} s" if self.since_s >= 1 else ""
        return f"{place}{action}{since}" + (f", {self.line}" if self.line else "")


class Member(Struct, frozen=True):
    """Where a rank runs."""

    rank: int
    host: str
    machine: str  # processes of equal ones see each other
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on host {self.host})"

    @classmethod
    def here(cls, rank: int) -> Member:
        host, pid = socket.gethostname(), os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(rank, host, f"{boot} {os.readlink('/proc/self/ns/pid')}", pid)
        except OSError:
            return cls(rank, host, f"{host} {pid}", pid)

    def state(self, other: Member) -> str:
        """State of another process in /proc: T (stopped), Z (dead), X if there is none; ""
        where it cannot be seen from here."""
        if self.machine != other.machine:
            return ""
        try:
            return Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"


class Verdict(Struct, frozen=True):
    """Why this job cannot go on."""

    what: str
    fix: str


class Standing(Struct, frozen=True):
    """What a rank knows of all at one moment."""

    members: tuple[Member, ...]
    own: Member
    doing: Beat
    beats: Mapping[int, Beat]  # of the others; none once the store is gone

    def gone(self) -> Verdict | None:
        """A rank that failed, whose process is no more, or whose script has ended."""
        ends = {rank: beat.end for rank, beat in self.beats.items() if beat.end is not None}
        for rank in (r for r, text in ends.items() if text):
            return Verdict(f"{self.members[rank]} stopped: {ends[rank]}", "see its traceback")
        for member in self.members:
            if (member.rank not in {self.own.rank, *ends}
                    and self.own.state(member) in ("Z", "X")):
                # it may have ended and the store with it, where its last beat was
                why = "it was killed, or crashed outside of Python" if self.beats else (
                    "it was killed, crashed or ended early")
                return Verdict(f"{member} is gone: {why}; {self._last(member.rank)}",
                               "see the end of its log, and the system's (lack of memory ends in a "
                               "SIGKILL); start again from the last checkpoint")
        for rank in ends:
            # it made fewer calls: what this one waits for will not come
            if self.beats[rank].call.number < self.doing.call.number:
                return Verdict(f"{self.members[rank]} has come to the end of its script while "
                               f"others go on; {self._last(rank)}",
                               "give every rank the same number of batches, and make calls of the "
                               "model on every rank")
        return None

    def _last(self, rank: int) -> str:
        return f"its last sign of life (one a second): {self.beats.get(rank, 'unknown')}"

    def elsewhere(self, before: Mapping[int, Beat], since_s: float) -> Verdict | None:
        """A rank that waits in another call than this one, though all ranks make the same calls:
        it said so `before`, and says so still, so that it is no word of long ago."""
        own = self.doing
        for rank, beat in self.beats.items():
            number = min(own.call.number, beat.call.number)
            names = {own.call.name_of(number), beat.call.name_of(number)} - {""}
            said = before.get(rank, beat)
            if (beat.since_s < since_s or said.count == beat.count
                    or (said.call, said.action, said.line) != (beat.call, beat.action, beat.line)):
                continue
            if beat.action == IN_COLLECTIVE and beat.call.number < own.call.number:
                return Verdict(f"ranks wait for each other: {self.own} is {own}; "
                               f"{self.members[rank]} is {beat}", f"call {own.call.name} on every "
                               "rank: all have a part of what it returns")
            if len(names) > 1 and beat.action != IN_CODE:
                both = " and ".join(sorted(names))
                return Verdict(f"ranks wait for each other in different calls: {self.own} is {own};"
                               f" {self.members[rank]} is {beat}; call {number} is {both}",
                               f"call {both} on every rank, in the same order (only writing files "
                               "and printing may be for rank 0 alone)")
        return None

    def silent(self, before: Mapping[int, Beat], waited_s: float) -> Verdict | None:
        """A rank that has given no sign of life since `before`."""
        for rank, beat in self.beats.items():
            if rank in before and before[rank].count == beat.count:
                member = self.members[rank]
                why = STOPPED if self.own.state(member) in ("T", "t") else HELD
                what = f"{member} has given no sign of life, while this rank waited {waited_s:.0f}"
                return Verdict(f"{what} s: {why}; {self._last(rank)}",
                               f"see where it is (py-spy dump --pid); {MORE_TIME}")
        return None

    def left(self) -> Verdict | None:
        """A rank that has left this call with an error, after which its script went on."""
        for rank, beat in self.beats.items():
            if beat.call.failed == self.doing.call.number:
                return Verdict(f"{self.members[rank]} left {self.doing.call} with an error, and "
                               f"its script goes on: {beat.call.error}",
                               "let errors end the script, or catch those alone that all have")
        return None

    def slow(self, waited_s: float) -> Verdict:
        """All are alive: the others wait for those that are in the script, or made fewer calls."""
        number = self.doing.call.number
        behind = [r for r, b in self.beats.items() if b.call.number < number or b.action == IN_CODE]
        named = [f"{self.members[r]} is {self.beats[r]}" for r in behind or self.beats]
        return Verdict(f"nothing has come for {waited_s:.0f} s; {'; '.join(named[:MOST_NAMED])}",
                       f"make calls of the model on every rank; {MORE_TIME}")


BROKEN = Verdict("a connection to another rank broke, and all ranks that can be seen are alive",
                 "see the logs of the others, and the network between the machines")


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def exchanges(frame: FrameType | None) -> bool:
    """Whether this frame is inside torch.distributed."""
    return any(f.f_code.co_filename.endswith("distributed_c10d.py") for f in _outward(frame))


def line_of(frame: FrameType | None) -> str:
    """The innermost line that is no library's."""
    lines = ((f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _outward(frame))
    return next((f"{file}:{line} in {name}" for file, line, name in lines
                 if not any(part in file for part in LIBRARIES)), "")

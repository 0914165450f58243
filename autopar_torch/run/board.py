"""Where ranks write what they do, for the others to read: a part of the store they met in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .. import files
from .standing import Beat, Member, Verdict

log = logging.getLogger("autopar_torch")
MOST_SAID = 500  # characters of an exception
T = TypeVar("T")


class Board:
    """A client of its own, so nobody waits behind the process groups. The store may end before this
    rank, with the rank that keeps it: then nothing is known of the others any more (`lost`)."""

    def __init__(self, rank: int) -> None:
        default: Any = dist.distributed_c10d._get_default_store()
        self.rank, self.lost = rank, False
        self.store = cast(Any, PrefixStore)("watch", default.clone())

    def meet(self, own: Member, size: int) -> tuple[Member, ...]:
        """Everyone's place. All ranks have met before, so nobody waits long."""
        self.store.set(f"member/{own.rank}", files.encode(own))
        found = self.store.multi_get([f"member/{r}" for r in range(size)])
        return tuple(files.decode(bytes(data), Member) for data in found)

    def write(self, beat: Beat) -> None:
        self._try(lambda: self.store.set(f"beat/{self.rank}", files.encode(beat)), None)

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """What these ranks wrote last."""
        found: list[Any] = self._try(lambda: self.store.multi_get([f"beat/{r}" for r in ranks]), [])
        return {r: files.decode(bytes(b), Beat) for r, b in zip(ranks, found, strict=False)}

    def end(self, text: str) -> None:
        """Leave word of how this rank ended ("": as scripts do)."""
        line = f"{self.rank} {' '.join(text.split())[:MOST_SAID]}\n"
        self._try(lambda: self.store.append("ended", line), None)

    def ends(self) -> dict[int, str]:
        """What was left by those that ended, the first word of each."""
        found: dict[int, str] = {}
        for line in self._read("ended").decode(errors="replace").splitlines():
            rank, _, text = line.partition(" ")
            found.setdefault(int(rank), text)
        return found

    def verdict(self) -> Verdict | None:
        """What a rank found out."""
        data = self._read("verdict")
        return files.decode(data, Verdict) if data else None

    def publish(self, verdict: Verdict) -> Verdict:
        """All ranks tell the same: the first that was found."""
        data = files.encode(verdict)
        first = self._try(lambda: self.store.compare_set("verdict", "", data.decode()), data)
        return files.decode(first, Verdict)

    def _read(self, key: str) -> bytes:
        """b"" if nobody wrote it."""
        there = lambda: self.store.get(key) if self.store.check([key]) else b""  # noqa: E731
        return self._try(there, b"")

    def _try(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return otherwise if self.lost else ask()
        except RuntimeError as error:
            log.debug("the store is gone, and nothing is known of other ranks: %s", error)
            self.lost = True
            return otherwise

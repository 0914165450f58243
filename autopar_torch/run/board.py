"""Where ranks write what they do, for the others to read: a part of the store they met in."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .. import files
from .standing import Beat, Member, Verdict

log = logging.getLogger("autopar_torch")


class Board:
    """A client of the store of its own, so that it never waits behind the process groups. The store
    ends with the rank that keeps it; then nothing is known of the others any more (`lost`)."""

    def __init__(self, rank: int, size: int) -> None:
        default: Any = dist.distributed_c10d._get_default_store()
        self.rank, self.size, self.lost = rank, size, False
        self.store = cast(Any, PrefixStore)("watch", default.clone())

    def meet(self, own: Member) -> tuple[Member, ...]:
        """The place of every rank. All ranks have met before, so this does not wait long."""
        self.store.set(f"member/{own.rank}", files.encode(own))
        found = self.store.multi_get([f"member/{r}" for r in range(self.size)])
        return tuple(files.decode(bytes(data), Member) for data in found)

    def write(self, beat: Beat) -> None:
        self._ask("set", f"beat/{self.rank}", files.encode(beat))

    def beats(self) -> dict[int, Beat]:
        """What the others wrote last."""
        ranks = [r for r in range(self.size) if r != self.rank]
        found = self._ask("multi_get", [f"beat/{r}" for r in ranks]) or []
        return {r: files.decode(bytes(b), Beat) for r, b in zip(ranks, found, strict=False)}

    def verdict(self) -> Verdict | None:
        """The first cause of an end that a rank has published, if any."""
        data = self._ask("compare_set", "verdict", "", "")
        return files.decode(data, Verdict) if data else None

    def publish(self, verdict: Verdict) -> Verdict:
        """Publish a cause, and return the first that was published: all ranks tell the same."""
        data = files.encode(verdict)
        first = self._ask("compare_set", "verdict", "", data.decode())
        return files.decode(first or data, Verdict)

    def _ask(self, what: str, *told: Any) -> Any:
        """What the store answers; None once it is gone."""
        try:
            return None if self.lost else getattr(self.store, what)(*told)
        except RuntimeError as error:
            log.debug("the store is gone, and nothing is known of other ranks: %s", error)
            self.lost = True
            return None

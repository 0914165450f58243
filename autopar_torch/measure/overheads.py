"""What a step costs beside its blocks: updates, sums, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..profile import Overheads
from ..shard.watch import between, stamp
from .links import Places
from .stats import median

LARGE, SMALL, NUM_SMALL = 1 << 20, 256, 64
MATMUL, MEETINGS = 384, 4


class Extras:
    """Samples of an optimizer step, of adding and of copying, and of whatever else is given."""

    def __init__(self, device: torch.device, places: Places, ranks_per_core: int,
                 context: Callable[[], object] | None = None) -> None:  # fmt: skip
        self.works: dict[str, Callable[[], object]] = {
            "large": _update([LARGE] * 2, device),
            "small": _update([SMALL] * NUM_SMALL, device),
        }
        b = torch.ones(LARGE, device=device)
        # What is packed goes to memory that was not touched before.
        self.works |= {"copy": lambda: torch.empty_like(b).copy_(b)}
        if context is not None:
            self.works["context"] = context
        self.places, self.ranks_per_core = places, ranks_per_core
        if ranks_per_core > 1:
            self.works |= _meetings(places, device)
        self.samples: dict[str, list[float]] = {name: [] for name in self.works}

    def round(self) -> None:
        for name, work in self.works.items():
            start = stamp()
            work()
            self.samples[name].append(between(start, stamp()))

    def forget(self) -> None:
        for samples in self.samples.values():
            samples.clear()

    def _meet_s(self, found: dict[str, float]) -> float:
        """`compute` was timed with all ranks at once, so it is what a core needs for all of its."""
        if "both" not in found:
            return 0.0
        return max(0.0, found["both"] / MEETINGS - found["compute"] - found["meet"])

    def result(self) -> Overheads:
        """Seconds of a rank alone on its core; all ranks were busy at once."""
        found = {name: median(samples) for name, samples in self.samples.items()}
        alone = {name: seconds / self.ranks_per_core for name, seconds in found.items()}
        per_tensor = alone["small"] / NUM_SMALL
        per_byte = max(0.0, alone["large"] - 2 * per_tensor) / (2 * 4 * LARGE)
        return Overheads(
            micro_batch_s=alone.get("context", 0.0),
            meet_s=self._meet_s(found),
            update_s_per_byte=per_byte,
            update_s_per_tensor=per_tensor,
            copy_s_per_byte=alone["copy"] / (4 * LARGE),
        )


def _meetings(places: Places, device: torch.device) -> dict[str, Callable[[], object]]:
    """Computing, meeting, and both in turn: where cores are shared that is more than their sum."""
    a, flag = torch.ones(MATMUL, MATMUL, device=device), torch.zeros(1, device=device)

    def both() -> None:
        for _ in range(MEETINGS):
            a @ a
            places.sum(flag)

    return {"compute": lambda: a @ a, "meet": lambda: places.sum(flag), "both": both}


def _update(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    params = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    for param in params:
        param.grad = torch.ones_like(param)
    return torch.optim.AdamW(params).step

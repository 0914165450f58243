"""What a step costs beside its blocks: updates, sums, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..profile import Overheads
from ..shard.watch import between, stamp
from .stats import median

LARGE, SMALL, NUM_SMALL = 1 << 20, 256, 64


class Extras:
    """Samples of an optimizer step, of adding and of copying, and of whatever else is given."""

    def __init__(self, device: torch.device, context: Callable[[], object] | None = None) -> None:
        self.works: dict[str, Callable[[], object]] = {
            "large": _update([LARGE] * 2, device),
            "small": _update([SMALL] * NUM_SMALL, device),
        }
        a, b = torch.zeros(LARGE, device=device), torch.ones(LARGE, device=device)
        self.works |= {"add": lambda: a.add_(b), "copy": lambda: a.copy_(b)}
        if context is not None:
            self.works["context"] = context
        self.samples: dict[str, list[float]] = {name: [] for name in self.works}

    def round(self) -> None:
        for name, work in self.works.items():
            start = stamp()
            work()
            self.samples[name].append(between(start, stamp()))

    def forget(self) -> None:
        for samples in self.samples.values():
            samples.clear()

    def result(self) -> Overheads:
        found = {name: median(samples) for name, samples in self.samples.items()}
        per_tensor = found["small"] / NUM_SMALL
        per_byte = max(0.0, found["large"] - 2 * per_tensor) / (2 * 4 * LARGE)
        return Overheads(
            micro_batch_s=found.get("context", 0.0),
            update_s_per_byte=per_byte,
            update_s_per_tensor=per_tensor,
            add_s_per_byte=found["add"] / (4 * LARGE),
            copy_s_per_byte=found["copy"] / (4 * LARGE),
        )


def _update(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    params = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    for param in params:
        param.grad = torch.ones_like(param)
    return torch.optim.AdamW(params).step

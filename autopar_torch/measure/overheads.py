"""What a step costs beside its blocks: updates, sums, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..profile import Overheads
from ..shard.parts import copy_rows, fill, flat_piece
from .links import FLUSH, computing
from .samples import timed
from .stats import trimmed_mean

MOST, SMALL = 1 << 25, 256  # elements: of all tensors together at most; of each small tensor


class Extras:
    """Samples of an optimizer step, of packing, and of whatever else a step does.

    Updating and packing are timed with tensors as large as the model's own: both depend on how many
    tensors there are, and on how much of them a cache holds.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], batch: Callable[[], object],
                 context: Callable[[], object]) -> None:
        self.sizes, self.num_tensors = _capped(sizes), max(1, len(sizes))
        self.works: dict[str, Callable[[], object]] = {
            "update": _update(self.sizes, device),
            "small": _update([SMALL] * self.num_tensors, device),
            "pack": _packing(self.sizes, device),
            "cut": _cutting(self.sizes, device),
            "fill": _filling(self.sizes, device),
            "batch": batch,
            "context": context,
        }
        # What runs before each of these in a step: it decides what the caches hold then.
        self.before: dict[str, Callable[[], object]] = {
            "update": lambda: torch.ones(FLUSH, device=device),
            "fill": lambda: torch.ones(FLUSH, device=device),
            "batch": batch,
            "context": computing(device),
        }
        self.samples: dict[str, list[float]] = {name: [] for name in self.works}

    def round(self) -> None:
        for name, work in self.works.items():
            if name in self.before:
                self.before[name]()
            self.samples[name].append(timed(work))

    def warm_up(self) -> None:
        self.round()
        for samples in self.samples.values():
            samples.clear()

    def result(self) -> Overheads:
        found = {name: trimmed_mean(samples) for name, samples in self.samples.items()}
        num_bytes = 4 * sum(self.sizes)
        tensor_s = found["small"] / self.num_tensors
        return Overheads(
            step_s=found["batch"],
            micro_batch_s=found["context"],
            update_s_per_byte=max(0.0, found["update"] - tensor_s * len(self.sizes)) / num_bytes,
            update_s_per_tensor=tensor_s,
            copy_s_per_byte=found["pack"] / num_bytes,
            cut_s_per_byte=found["cut"] / num_bytes,
            fill_s_per_byte=found["fill"] / num_bytes,
        )


def _capped(sizes: Sequence[int]) -> list[int]:
    """Tensors in their order, as many as stay below the limit of elements; at least one."""
    fit: list[int] = []
    for size in sizes:
        fit += [size] if sum(fit) + size <= MOST else []
    return fit or [min(MOST, min(sizes, default=SMALL))]


def _halves(sizes: Sequence[int]) -> list[int]:
    return [-(-size // 2) for size in sizes]


def _packing(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    """Tensors one after another into one message, as a bucket is packed."""
    tensors = [torch.ones(size, device=device) for size in sizes]
    return lambda: torch.cat(tensors, out=torch.empty(sum(sizes), device=device))


def _cutting(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    """The same in two rows, as ZeRO cuts gradients, and parts of a row as what they are."""
    tensors, halves = [torch.ones(size, device=device) for size in sizes], _halves(sizes)

    def cut() -> None:
        flat = torch.empty((2, sum(halves)), device=device)
        for tensor, half, target in zip(tensors, halves, flat.split(halves, -1), strict=True):
            copy_rows(target, tensor.reshape(-1), half)
        for half, part in zip(halves, flat[0].split(halves), strict=True):
            part[:half].view(half)

    return cut


def _filling(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    """Parameters cut in two put together again, as ZeRO does it with what ranks gathered."""
    wholes = [torch.ones(size, device=device, requires_grad=True) for size in sizes]
    halves = [torch.ones(half, device=device) for half in _halves(sizes)]
    came = torch.cat(halves)

    def work() -> None:
        flat, end = torch.cat([flat_piece(half, half.dtype, len(half)) for half in halves]), 0
        for whole, half in zip(wholes, halves, strict=True):
            span = slice(end, end := end + len(half))
            fill(whole, len(half), [flat[span], came[span]])

    return work


def _update(sizes: Sequence[int], device: torch.device) -> Callable[[], object]:
    """Gradients are handed over, used and taken away, as in training."""
    params = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    grads = [torch.ones_like(param) for param in params]
    optimizer = torch.optim.AdamW(params)

    def work() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    return work

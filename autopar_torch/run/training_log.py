"""A line of figures while training, in the format of torchtitan, for those who ask for it."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..datasheets import known
from ..errors import PlanError
from ..measure.detect import here
from .model import ParallelModel

PASSES = 3  # of forward's work: backward has twice as much; what is recomputed does not count
GIB = 2**30


class TrainingLog:
    """Call `step` after every step, on all ranks; rank 0 writes a line every so many.

    `tokens` are those of the global batch. MFU needs the peak of a device: a datasheet's if it is
    known by its name, else what you give. The loss is read, and a GPU waited for, only for a line.
    """

    def __init__(self, model: ParallelModel, *, every: int = 10, peak_flops_per_s: float = 0.0,
                 write: Callable[[str], object] = print) -> None:
        if every < 1:
            raise PlanError(f"a line every {every} steps", where="TrainingLog: every",
                            fix="give 1 or more")
        self.model, self.every, self.write = model, every, write
        self.peak = peak_flops_per_s
        self.num_steps = self.since = self.tokens = 0  # the last two: since the last line
        self.began_s = 0.0

    def step(self, loss: Tensor, *, grad_norm: Tensor | float | None = None,
             tokens: int = 0) -> None:
        """Take note of a step; the first one, in which the plan is made, is told without its time.
        """
        self.num_steps, self.since, self.tokens = (
            self.num_steps + 1, self.since + 1, self.tokens + tokens)
        if self.num_steps > 1 and self.num_steps % self.every:
            return
        if self.model.world.rank == 0:
            shown = [f"step: {self.num_steps}", f"loss: {float(loss.detach()):.5f}"]
            shown += [] if grad_norm is None else [f"grad_norm: {float(grad_norm):.4f}"]
            speed = self._speed(time.perf_counter() - self.began_s) if self.num_steps > 1 else []
            self.write("  ".join([*shown, _memory(), *speed]))
        self.since, self.tokens, self.began_s = 0, 0, time.perf_counter()

    def _speed(self, seconds: float) -> list[str]:
        """What needs the time that the steps since the last line took."""
        model, step_s = self.model, seconds / self.since
        shown = [f"tps: {self.tokens / (seconds * model.world.size):,.0f}"] if self.tokens else []
        if flops := self._flops():
            rate = flops / (step_s * model.world.size)
            peak = self.peak or _peak(model.plan.precision)
            shown.append(f"tflops: {rate / 1e12:.3g}")
            shown += [f"mfu: {rate / peak:.1%}"] if peak else []
        told = model.found if model.found and model.found.plan == model.plan else None
        beside = f" (predicted {told.step_s:.3f}s)" if told else ""
        return [*shown, f"step_time: {step_s:.3f}s{beside}"]

    def _flops(self) -> float:
        """Of a step, for all rows of the batch that the plan was made for."""
        if self.model.fallback_reason:
            return 0.0
        graph, rows = self.model.graph, self.model._first[1].num_rows
        return PASSES * rows * sum(graph.kind_of(b).flops_per_row for b in range(len(graph.blocks)))


def _memory() -> str:
    """The most that this process has had, and its part of the device."""
    total = here().device.memory_bytes
    most = (torch.cuda.max_memory_allocated() if torch.cuda.is_available()
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return f"memory: {most / GIB:.2f}GiB({most / total:.1%})"


def _peak(precision: str) -> float:
    """FLOP/s of this device by its datasheet; 0 if none has its name, as for a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    words = re.findall(r"[A-Za-z0-9]+", here().device.name)
    device = next((h.device for name, h in known().items() if name.split("-")[0] in words), None)
    return dict(device.peaks).get(precision, device.flops_per_s) if device else 0.0

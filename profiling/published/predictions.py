"""What a published run would take by our prices, beside what it took."""

from __future__ import annotations

from dataclasses import dataclass

from published import closed, footprint
from published.roofline import Worker
from published.rows import Job, memory_kind


@dataclass(frozen=True)
class Prediction:
    """What a row would take: `memory_bytes` as the row counts them, `peak_bytes` of the device."""

    job: Job
    step_s: float
    memory_bytes: float
    peak_bytes: float
    other_step_s: float | None = None

    @property
    def tells_time(self) -> bool:
        """Whether its time says something of the device: gpu_bound where a source tells."""
        return self.job.row.get("regime", "gpu_bound") == "gpu_bound"

    @property
    def fits(self) -> bool:
        return self.part_taken <= 1

    @property
    def part_taken(self) -> float:
        return self.peak_bytes / self.job.worker.hardware.device.memory_bytes

    @property
    def error(self) -> float:
        return self.step_s / self.job.step_s - 1 if self.job.step_s else 0.0

    @property
    def other_error(self) -> float | None:
        if self.other_step_s is None or not self.job.step_s:
            return None
        return self.other_step_s / self.job.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.memory_bytes / self.job.memory_bytes - 1 if self.job.memory_bytes else 0.0


def predict(job: Job) -> Prediction:
    stages = footprint.memory(job.worker, job.layers)
    most = max(stages, key=lambda stage: stage.peak_bytes)
    kind = memory_kind(job)
    told = most if kind.stage is None else stages[kind.stage]
    told_bytes = footprint.taken(told) if kind.whole_device else told.peak_bytes - told.fixed
    other = seconds(job, job.other) if job.other else None
    return Prediction(job, seconds(job, job.worker), told_bytes, footprint.taken(most), other)


def seconds(job: Job, worker: Worker) -> float:
    if job.row["metric_kind"] == "layer_time":
        return worker.layer.total
    return closed.step(worker, job.layers).seconds

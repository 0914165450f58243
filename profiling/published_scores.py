"""How far predictions are from published measurements: by source, by fit, by ranking."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median
from typing import Any

from published_rows import Job, Key, Rows, memory_kind

from autopar_torch.simulate import closed, footprint
from autopar_torch.simulate.roofline import Worker

CALIBRATED = ("A100-40", "A100-80", "H100")
# Targets, as parts of one.
TIME_MEAN, TIME_MEDIAN, MEMORY_MEAN, FIT, SPEARMAN, REGRET, WORST_PICK = (
    0.06, 0.12, 0.05, 0.93, 0.9, 0.05, 0.15,
)  # fmt: skip
MARGIN = 0.94  # part of a device that a recommended run may take
ALLOCATOR = "simumax_b200"


@dataclass(frozen=True)
class Prediction:
    """What a row would take: `memory_bytes` as the row counts them, `peak_bytes` of the device."""

    job: Job
    step_s: float
    memory_bytes: float
    peak_bytes: float
    other_step_s: float | None = None

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
    told = stages[-1] if kind.last_stage else most
    told_bytes = footprint.taken(told) if kind.whole_device else told.peak_bytes - told.fixed
    other = seconds(job, job.other) if job.other else None
    return Prediction(job, seconds(job, job.worker), told_bytes, footprint.taken(most), other)


def seconds(job: Job, worker: Worker) -> float:
    if job.row["metric_kind"] == "layer_time":
        return worker.layer.total
    return closed.step(worker, job.layers).seconds


@dataclass
class Report:
    """Everything that is printed, and whether the targets hold."""

    rows: Rows
    predictions: dict[Key, Prediction]
    core: dict[str, list[Key]]
    groups: list[dict[str, Any]]
    show_groups: bool = False
    failed: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.failed

    def lines(self) -> Iterator[str]:
        yield from self._time()
        yield from self._memory()
        yield from self._fits()
        yield from self._ranking()
        yield from self._left_out()
        yield ""
        yield from (f"FAIL {text}" for text in self.failed)
        yield "; ".join(self.figures)

    def records(self) -> list[dict[str, Any]]:
        return [
            {"file": file, "id": name, "step_s": p.step_s, "published_s": p.job.step_s,
             "memory_bytes": p.memory_bytes, "published_bytes": p.job.memory_bytes,
             "peak_bytes": p.peak_bytes, "fits": p.fits, "status": p.job.row["status"],
             "device": p.job.worker.hardware.device.name, "assumed": p.job.assumed}
            for (file, name), p in self.predictions.items()
        ]  # fmt: skip

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.failed.append(text)

    # --- time -----------------------------------------------------------------------------------

    @cached_property
    def timed(self) -> dict[Key, Prediction]:
        """Rows whose time says something about the devices: gpu_bound where a source tells."""
        return {key: p for key, p in self.predictions.items()
                if p.job.step_s and p.job.row.get("regime", "gpu_bound") == "gpu_bound"
                and p.job.row["status"] == "OK"}  # fmt: skip

    def _subset(self, found: dict[Key, Prediction], kind: str) -> dict[Key, Prediction]:
        keys = self.core.get(kind)
        return {key: found[key] for key in keys if key in found} if keys else found

    def _time(self) -> Iterator[str]:
        yield "step time: source, device, count, mean and median |error|, bias, worst"
        chosen = self._subset(self.timed, "time")
        for (file, device), found in by(chosen, _file_and_device).items():
            yield f"  {file:22s}{device:14s}{told([p.error for p in found])}"
        sources = by(chosen, lambda key, p: key[0])
        for file, found in sources.items():
            middle = median(abs(p.error) for p in found)
            self.check(middle <= TIME_MEDIAN, f"{file}: median time error {middle:.1%} "
                                              f"(target {TIME_MEDIAN:.0%})")  # fmt: skip
            others = [p.other_error for p in found if p.other_error is not None]
            if others:
                yield f"  {file:22s}{'if recomputed':14s}{told(others)}"
        yield from self._calibrated(chosen)
        if len(chosen) < len(self.timed):
            yield "step time, every row:"
            for file, found in by(self.timed, lambda key, p: key[0]).items():
                yield f"  {file:36s}{told([p.error for p in found])}"

    def _calibrated(self, chosen: dict[Key, Prediction]) -> Iterator[str]:
        mine = {k: p for k, p in chosen.items() if _device(p) in CALIBRATED}
        if not mine:
            return
        per_source = [mean(abs(p.error) for p in found)
                      for found in by(mine, lambda key, p: key[0]).values()]  # fmt: skip
        error = mean(per_source)
        self.figures.append(f"time on A100 and H100: mean over sources {error:.1%}, over rows "
                            f"{mean(abs(p.error) for p in mine.values()):.1%}")  # fmt: skip
        self.check(error <= TIME_MEAN, f"mean time error on calibrated devices {error:.1%} "
                                       f"(target {TIME_MEAN:.0%})")  # fmt: skip
        yield f"  calibrated devices, mean of the sources' means: {error:.1%}"

    # --- memory ---------------------------------------------------------------------------------

    def _memory(self) -> Iterator[str]:
        yield "peak memory: source, what the number is, count, errors"
        known = {k: p for k, p in self.predictions.items() if p.job.memory_bytes}
        for file, found in by(self._subset(known, "memory"), lambda key, p: key[0]).items():
            yield f"  {file:22s}{memory_kind(found[0].job).name:14s}" + told(
                [p.memory_error for p in found])  # fmt: skip
            if file == ALLOCATOR:
                error = mean(abs(p.memory_error) for p in found)
                self.figures.append(f"allocator memory {error:.1%}")
                self.check(error <= MEMORY_MEAN, f"allocator memory {error:.1%}")

    def _fits(self) -> Iterator[str]:
        """Of runs that ran and runs that ran out of memory, how many were foreseen."""
        yield "fits or not: source, ran: foreseen, refused; out of memory: foreseen, missed"
        total: Counter[tuple[bool, bool]] = Counter()
        for file, found in by(self.predictions, lambda key, p: key[0]).items():
            table = Counter((p.job.row["status"] == "OK", p.fits) for p in found
                            if p.job.row["status"] in ("OK", "OOM"))  # fmt: skip
            if any(not ran for ran, _ in table):
                total += table
                yield f"  {file:22s}{counts(table)}"
        if total:
            right = (total[True, True] + total[False, False]) / sum(total.values())
            self.figures.append(f"fits or not {right:.1%}")
            self.check(right >= FIT, f"fits or not right in {right:.1%} (target {FIT:.0%})")

    # --- ranking --------------------------------------------------------------------------------

    def _ranking(self) -> Iterator[str]:
        found = [r for group in self.groups if (r := rank(group, self.predictions))]
        if not found:
            return
        yield "ranking of strategies: source, groups, Spearman, regret, worst regret, out of memory"
        for file in dict.fromkeys(r.file for r in found):
            mine = [r for r in found if r.file == file]
            yield (f"  {file:22s}{len(mine):4d}{mean(r.spearman for r in mine):8.3f}"
                   f"{mean(r.regret for r in mine):8.1%}{max(r.regret for r in mine):8.1%}"
                   f"{sum(r.out_of_memory for r in mine):4d}")  # fmt: skip
        if self.show_groups:
            yield from (f"    {r.name:56s}{r.count:4d}{r.spearman:7.3f}{r.regret:8.1%} {r.pick}"
                        for r in found)  # fmt: skip
        self._check_ranking(found)

    def _check_ranking(self, found: Sequence[Ranking]) -> None:
        clean = [
            r.spearman for r in found if r.file in ("aleph_alpha_layouts", "hf_playbook_sweep")
        ]
        regret, worst = mean(r.regret for r in found), max(r.regret for r in found)
        lost = sum(r.out_of_memory for r in found)
        if clean:
            self.check(mean(clean) >= SPEARMAN, f"Spearman in clean groups {mean(clean):.3f}")
        self.check(regret <= REGRET, f"average regret {regret:.1%}")
        self.check(worst <= WORST_PICK, f"a pick {worst:.1%} below the best")
        self.check(not lost, f"{lost} picks ran out of memory")
        self.figures.append(f"Spearman {mean(clean or [0.0]):.3f}, regret {regret:.1%}, "
                            f"worst pick {worst:.1%}, picks out of memory {lost}")  # fmt: skip

    def _left_out(self) -> Iterator[str]:
        reasons = Counter((file, reason) for file, _, reason in self.rows.left_out)
        if reasons:
            yield "not predicted:"
            yield from (
                f"  {file}: {count} rows, {reason}" for (file, reason), count in reasons.items()
            )
        assumed = Counter(
            (key[0], text) for key, p in self.predictions.items() for text in p.job.assumed
        )
        if assumed:
            yield "assumed where a row does not say:"
            yield from (
                f"  {file}: {text} ({count} rows)" for (file, text), count in assumed.items()
            )


@dataclass(frozen=True)
class Ranking:
    """One job under several strategies: our order against the published one."""

    file: str
    name: str
    count: int
    spearman: float
    regret: float
    out_of_memory: bool
    pick: str


def rank(group: dict[str, Any], predictions: dict[Key, Prediction]) -> Ranking | None:
    members = [predictions[key] for name in group["ids"]
               if (key := (group["file"], name)) in predictions]  # fmt: skip
    ran = [
        p for p in members if p.job.step_s and p.job.row.get("regime", "gpu_bound") == "gpu_bound"
    ]
    if len(ran) < 4:
        return None
    candidates = [p for p in members if p in ran or p.job.row["status"] == "OOM"]
    pick = min(
        (p for p in candidates if p.part_taken <= MARGIN), key=lambda p: p.step_s, default=None
    )
    pick = pick or min(candidates, key=lambda p: p.peak_bytes)
    fastest = min(p.job.step_s or 0.0 for p in ran)
    lost = pick.job.row["status"] == "OOM"
    regret = 1.0 if lost else 1 - fastest / (pick.job.step_s or fastest)
    title = f"{group['file']} {group['model']} {group['seq']} on {group['gpus']}"
    return Ranking(group["file"], title, len(ran), spearman([p.step_s for p in ran],
                   [p.job.step_s or 0.0 for p in ran]), regret, lost, pick.job.name)  # fmt: skip


# --- small statistics -----------------------------------------------------------------------------


def by(found: dict[Key, Prediction], group: Any) -> dict[Any, list[Prediction]]:
    parts: defaultdict[Any, list[Prediction]] = defaultdict(list)
    for key, prediction in found.items():
        parts[group(key, prediction)].append(prediction)
    return dict(sorted(parts.items()))


def _device(prediction: Prediction) -> str:
    return prediction.job.worker.hardware.device.name


def _file_and_device(key: Key, prediction: Prediction) -> tuple[str, str]:
    return key[0], _device(prediction)


def told(errors: Sequence[float]) -> str:
    sizes = [abs(e) for e in errors]
    return (f"{len(errors):5d}{mean(sizes):8.1%}{median(sizes):8.1%}{mean(errors):+8.1%}"
            f"{max(errors, key=abs):+8.1%}")  # fmt: skip


def counts(table: Counter[tuple[bool, bool]]) -> str:
    cells = (table[True, True], table[True, False], table[False, False], table[False, True])
    return "".join(f"{cell:7d}" for cell in cells)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks, ties sharing theirs."""
    x, y = ranks(left), ranks(right)
    mx, my = mean(x), mean(y)
    cross = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    norm = (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5
    return cross / norm if norm else 0.0


def ranks(values: Iterable[float]) -> list[float]:
    values = list(values)
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (values.count(value) - 1) / 2 for value in values]

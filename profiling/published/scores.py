"""How far predictions are from published measurements: by source, by fit, by ranking."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median
from typing import Any

from published.predictions import Prediction
from published.ranking import Group, Ranking, rankings, strategy_only
from published.rows import Key, MemoryKind, Rows, memory_kind

CALIBRATED = ("A100-40", "A100-80", "H100")
# Targets, as parts of one: of every source by itself, and of the sources' mean.
TIME_NEAR, TIME_FAR, TIME_MEAN, MEMORY_MEAN, FIT = 0.10, 0.15, 0.06, 0.05, 0.95
SPEARMAN, REGRET, WORST_PICK = 0.9, 0.05, 0.15
TABLES = {"korthikanti": 0.0365, "sc21_megatron": 0.0365}  # what Calculon reaches on them


@dataclass
class Report:
    """Everything that is printed, and whether the targets hold."""

    rows: Rows
    predictions: dict[Key, Prediction]
    core: dict[str, list[Key]]
    groups: list[Group]
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
        self.check(bool(self.predictions), "no row to predict")
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
        ]

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.failed.append(text)

    # --- time -----------------------------------------------------------------------------------

    @cached_property
    def timed(self) -> dict[Key, Prediction]:
        return {key: p for key, p in self.predictions.items()
                if p.job.step_s and p.tells_time and p.job.row["status"] == "OK"}

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
            self._source_time(file, found)
            others = [p.other_error for p in found if p.other_error is not None]
            if others:
                yield f"  {file:22s}{'if recomputed':14s}{told(others)}"
        yield from self._calibrated(chosen)
        if len(chosen) < len(self.timed):
            yield "step time, every row:"
            for file, found in by(self.timed, lambda key, p: key[0]).items():
                yield f"  {file:36s}{told([p.error for p in found])}"

    def _source_time(self, file: str, found: Sequence[Prediction]) -> None:
        """Each source alone: on devices that many rows calibrate, and on the others."""
        near = [abs(p.error) for p in found if _device(p) in CALIBRATED]
        far = [abs(p.error) for p in found if _device(p) not in CALIBRATED]
        for sizes, target in ((near, TABLES.get(file, TIME_NEAR)), (far, TIME_FAR)):
            error = mean(sizes or [0.0])
            self.check(error <= target, f"{file}: time error {error:.1%} (target {target:.2%})")

    def _calibrated(self, chosen: dict[Key, Prediction]) -> Iterator[str]:
        mine = {k: p for k, p in chosen.items() if _device(p) in CALIBRATED}
        if not mine:
            return
        per_source = [mean(abs(p.error) for p in found)
                      for found in by(mine, lambda key, p: key[0]).values()]
        error = mean(per_source)
        self.figures.append(f"time on A100 and H100: mean over sources {error:.1%}, over rows "
                            f"{mean(abs(p.error) for p in mine.values()):.1%}")
        self.check(error <= TIME_MEAN, f"mean time error on calibrated devices {error:.1%} "
                                       f"(target {TIME_MEAN:.0%})")
        yield f"  calibrated devices, mean of the sources' means: {error:.1%}"

    # --- memory ---------------------------------------------------------------------------------

    def _memory(self) -> Iterator[str]:
        yield "peak memory: source, what the number is, count, errors"
        known = {k: p for k, p in self.predictions.items() if p.job.memory_bytes}
        allocator: dict[str, float] = {}
        for file, found in by(self._subset(known, "memory"), lambda key, p: key[0]).items():
            kind, errors = memory_kind(found[0].job).name, [p.memory_error for p in found]
            yield f"  {file:22s}{kind:14s}" + told(errors)
            if kind == MemoryKind.name:
                allocator[file] = mean(map(abs, errors))
        for file, error in allocator.items():
            self.check(error <= MEMORY_MEAN, f"{file}: allocator memory {error:.1%}")
        near = sum(error <= MEMORY_MEAN for error in allocator.values())
        self.figures.append(f"allocator memory within {MEMORY_MEAN:.0%} in {near} of "
                            f"{len(allocator)} sources")

    def _fits(self) -> Iterator[str]:
        """Of runs that ran and runs that ran out of memory, how many were foreseen."""
        yield "fits or not: source, ran: foreseen, refused; out of memory: foreseen, missed"
        parts = []
        for file, found in by(self.predictions, lambda key, p: key[0]).items():
            table = Counter((p.job.row["status"] == "OK", p.fits) for p in found
                            if p.job.row["status"] in ("OK", "OOM"))
            if any(not ran for ran, _ in table):
                yield f"  {file:22s}{counts(table)}"
                right = (table[True, True] + table[False, False]) / sum(table.values())
                self.check(right >= FIT, f"{file}: fits or not right in {right:.1%}")
                parts.append(right)
        if parts:
            self.figures.append(f"fits or not, worst source {min(parts):.1%}")

    # --- ranking --------------------------------------------------------------------------------

    def _ranking(self) -> Iterator[str]:
        found = rankings(self.groups, self.predictions)
        apart = rankings(strategy_only(self.groups, self.predictions), self.predictions)
        if not found:
            return
        yield "ranking: source, groups, Spearman, the most noise lets, regret, worst, out of memory"
        for file in dict.fromkeys(r.file for r in found):
            yield f"  {file:22s}{_ranked([r for r in found if r.file == file])}"
        yield "ranking with equal kernels:"
        for file in dict.fromkeys(r.file for r in apart):
            yield f"  {file:22s}{_ranked([r for r in apart if r.file == file])}"
        if self.show_groups:
            yield from (f"    {r.name:66s}{r.count:4d}{r.spearman:7.3f}{r.ceiling:7.3f}"
                        f"{r.regret:8.1%} {r.pick}" for r in (*found, *apart))
        self._check_ranking(found, apart)

    def _check_ranking(self, found: Sequence[Ranking], apart: Sequence[Ranking]) -> None:
        middle = median(r.spearman for r in apart)
        regret, worst = mean(r.regret for r in found), max(r.regret for r in found)
        lost = sum(r.out_of_memory for r in found)
        self.check(middle >= SPEARMAN, f"Spearman in the median group {middle:.3f}")
        self.check(regret <= REGRET, f"average regret {regret:.1%}")
        self.check(worst <= WORST_PICK, f"a pick {worst:.1%} below the best")
        self.check(not lost, f"{lost} picks ran out of memory")
        self.figures.append(f"Spearman {middle:.3f}, regret {regret:.1%}, "
                            f"worst pick {worst:.1%}, picks out of memory {lost}")

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
            f"{max(errors, key=abs):+8.1%}")


def _ranked(found: Sequence[Ranking]) -> str:
    order, most = median(r.spearman for r in found), median(r.ceiling for r in found)
    regrets, lost = [r.regret for r in found], sum(r.out_of_memory for r in found)
    return f"{len(found):4d}{order:8.3f}{most:8.3f}{mean(regrets):8.1%}{max(regrets):8.1%}{lost:4d}"


def counts(table: Counter[tuple[bool, bool]]) -> str:
    cells = (table[True, True], table[True, False], table[False, False], table[False, True])
    return "".join(f"{cell:7d}" for cell in cells)

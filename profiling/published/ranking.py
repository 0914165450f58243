"""Our order of strategies against the published one, and how far noise lets any order agree."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from published.predictions import Prediction
from published.rows import Key

MARGIN = 0.94  # part of a device that a recommended run may take
FEWEST = 4  # runs that make a group
USUAL_SPREAD = 0.03  # of a source that repeats nothing: what four releases of NeMo's tables differ
DRAWS = 100

Group = dict[str, Any]


@dataclass(frozen=True)
class Ranking:
    """One job under several strategies: our order against the published one."""

    file: str
    name: str
    count: int
    spearman: float
    ceiling: float  # what the true order would reach, measured once with this source's spread
    regret: float
    out_of_memory: bool
    pick: str


def strategy_only(groups: Sequence[Group], predictions: Mapping[Key, Prediction]) -> list[Group]:
    """The groups, apart by what is no strategy: the kernels that a program was built with."""
    found = []
    for group in groups:
        parts: defaultdict[str, list[str]] = defaultdict(list)
        for name in group["ids"]:
            if prediction := predictions.get((group["file"], name)):
                parts[prediction.job.row.get("kernel") or ""].append(name)
        found += [{**group, "ids": ids, "kernel": kernel} for kernel, ids in parts.items()]
    return found


def rankings(groups: Sequence[Group], predictions: Mapping[Key, Prediction]) -> list[Ranking]:
    spreads = spread(predictions.values())
    found = (rank(group, predictions, spreads.get(group["file"], USUAL_SPREAD)) for group in groups)
    return [ranking for ranking in found if ranking]


def rank(group: Group, predictions: Mapping[Key, Prediction], noise: float) -> Ranking | None:
    members = [predictions[key] for name in group["ids"]
               if (key := (group["file"], name)) in predictions]
    ran = [p for p in members if p.job.step_s and p.tells_time]
    if len(ran) < FEWEST:
        return None
    pick = picked([p for p in members if p in ran or p.job.row["status"] == "OOM"])
    measured = [p.job.step_s or 0.0 for p in ran]
    lost = pick.job.row["status"] == "OOM"
    title = " ".join(str(group.get(part, "")) for part in ("file", "model", "seq", "kernel"))
    return Ranking(
        file=group["file"], name=f"{title} on {group['gpus']}", count=len(ran),
        spearman=spearman([p.step_s for p in ran], measured), ceiling=ceiling(measured, noise),
        regret=1.0 if lost else 1 - min(measured) / (pick.job.step_s or min(measured)),
        out_of_memory=lost, pick=pick.job.name,
    )


def picked(candidates: Sequence[Prediction]) -> Prediction:
    """The fastest of those that fit with a margin, or else what takes the least memory."""
    fitting = [p for p in candidates if p.part_taken <= MARGIN]
    if fitting:
        return min(fitting, key=lambda p: p.step_s)
    return min(candidates, key=lambda p: p.peak_bytes)


# --- noise ----------------------------------------------------------------------------------------


def spread(predictions: Iterable[Prediction]) -> dict[str, float]:
    """By source, the deviation of log step times among runs alike in all that is predicted from."""
    alike: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for p in predictions:
        if p.job.step_s and p.tells_time:
            key = (p.job.file, p.job.worker.model, p.job.row["hardware"]["count"], p.step_s)
            alike[key].append(math.log(p.job.step_s))
    found: defaultdict[str, list[float]] = defaultdict(list)
    for (file, *_), times in alike.items():
        if len(times) > 1:
            found[file] += [variance(times)] * len(times)
    return {file: math.sqrt(fmean(own)) for file, own in found.items()}


def ceiling(measured: Sequence[float], noise: float) -> float:
    """The mean Spearman of times with themselves measured again (seeded: always the same)."""
    source = random.Random(0)
    again = ([t * math.exp(source.gauss(0, noise)) for t in measured] for _ in range(DRAWS))
    return fmean(spearman(measured, times) for times in again)


# --- small statistics -----------------------------------------------------------------------------


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks, ties sharing theirs."""
    x, y = list(ranks(left)), list(ranks(right))
    mx, my = fmean(x), fmean(y)
    cross = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    norm = (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5
    return cross / norm if norm else 0.0


def ranks(values: Sequence[float]) -> Iterator[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    yield from (first[value] + (values.count(value) - 1) / 2 for value in values)

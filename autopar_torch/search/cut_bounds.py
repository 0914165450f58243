"""Lower bounds of one candidate's cuts: nearly the price, without walking through the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .evaluate import FIRST_B, FORWARD, INPUT, LAST_B, LAST_W, Pricer, StageSeconds
from .tables import Array


def lower_bounds(pricer: Pricer, cuts: Sequence[tuple[int, ...]]) -> Array:
    """A lower bound of the step for each cut; `bounds` has one for all cuts of a candidate."""
    parts = pricer.weighed(cuts)
    outside = parts.begin.min(axis=1) + pricer.loss_s + parts.update.max(axis=1)
    return _inside(pricer, parts) + outside


def _inside(pricer: Pricer, parts: StageSeconds) -> Array:
    c, work, busy = pricer.candidate, parts.work, parts.busy(pricer.candidate)
    f, i = work[FORWARD], work[INPUT]
    p, m = c.pp, c.micro_batches
    there, back = parts.send.sum(axis=1), parts.back.sum(axis=1)
    if p == 1:
        return busy[:, 0]
    begun = work[FIRST_B] if m > 1 else work[LAST_B]  # the first backward of all
    if c.schedule == "gpipe":
        late = _behind(begun) + busy - m * f + _before(work[LAST_B])
        return f.sum(axis=1) + (m - 1) * f.max(axis=1) + there + back + late.max(axis=1)
    ahead = np.minimum(m, p - np.arange(p))
    if c.schedule == "1f1b":
        num_split = np.array([c.num_split(s) for s in range(p)])
        first, last = np.where(num_split < m, begun, i), np.where(num_split == 0, work[LAST_B], i)
        own = np.where(num_split, i + work[LAST_W], last)
        late = _behind(first) + busy - ahead * f - own + last.cumsum(axis=1)
        return f.sum(axis=1) + there + back + late.max(axis=1)
    if c.schedule == "zero_bubble":
        return f.sum(axis=1) + there + (_behind(i) + busy - ahead * f).max(axis=1)
    return _interleaved(pricer, parts, begun)


def _behind(seconds: Array) -> Array:
    """Sums over all stages after each."""
    return seconds.sum(axis=-1, keepdims=True) - seconds.cumsum(axis=-1)


def _before(seconds: Array) -> Array:
    return seconds.cumsum(axis=-1) - seconds


def _interleaved(pricer: Pricer, parts: StageSeconds, begun: Array) -> Array:
    """The first backward of position k is that of its last stage. It comes after all forwards on
    the way and the backwards behind it; by then k has done at most its warm-up, and has the rest to
    do; the last thing it does is a backward of its first stage, before which positions wait."""
    c, f = pricer.candidate, parts.work[FORWARD]
    p, v, m = c.pp, c.virtual, c.micro_batches
    forward, there = f.reshape(-1, v, p), parts.send.sum(axis=1)
    drain = _before(parts.work[LAST_B][:, :p])
    fill = _before(forward[:, 0])
    busy = parts.busy(c).reshape(-1, v, p).sum(axis=1)
    behind = _behind(begun[:, -p:])
    warm = np.minimum(2 * (p - np.arange(p) - 1) + (v - 1) * p + 1, m * v)
    rounds, rest = np.divmod(warm, p * v)
    done = rounds * p * forward.sum(axis=1)
    for chunk in range(v):
        done = done + np.clip(rest - chunk * p, 0, p) * forward[:, chunk]
    late = f.sum(axis=1) + there + (behind + busy - done + drain).max(axis=1)
    return np.maximum((busy + fill + drain).max(axis=1), late)

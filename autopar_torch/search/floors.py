"""Lower bounds of one candidate's cuts: nearly the price, without walking through the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .evaluate import Parts, Pricer
from .tables import Array


def floors(pricer: Pricer, cuts: Sequence[tuple[int, ...]]) -> Array:
    """Per cut: no step with these borders is shorter. `bounds` proves the same for all cuts."""
    parts, outside = pricer.weighed(cuts)
    return _inside(pricer, parts) + np.array(outside)


def _inside(pricer: Pricer, parts: Parts) -> Array:
    c, (f, b, i, w) = pricer.candidate, parts.work
    p, m = c.pp, c.micro_batches
    there, back = parts.send.sum(axis=1), parts.back.sum(axis=1)
    whole = (f + b).sum(axis=1)
    if p == 1:
        return m * whole
    ahead = np.minimum(m, p - np.arange(p))
    if c.schedule == "gpipe":
        return whole + there + back + (m - 1) * (f.max(axis=1) + b.max(axis=1))
    if c.schedule == "1f1b":
        halved = np.array([c.halved(s) for s in range(p)])
        first, last = np.where(halved < m, b, i), np.where(halved == 0, b, i)
        behind = first.sum(axis=1, keepdims=True) - first.cumsum(axis=1)
        rest = (m - ahead) * f + (m - halved) * b + halved * (i + w) - np.where(halved, i + w, b)
        late = (behind + rest + last.cumsum(axis=1)).max(axis=1)
        return f.sum(axis=1) + there + back + late
    if c.schedule == "zero_bubble":
        behind = i.sum(axis=1, keepdims=True) - i.cumsum(axis=1)
        return f.sum(axis=1) + there + (behind + m * (f + i + w) - ahead * f).max(axis=1)
    return _interleaved(pricer, f, b, there)


def _interleaved(pricer: Pricer, f: Array, b: Array, there: Array) -> Array:
    """The first backward of position k is that of its last stage. It comes after all forwards on
    the way and the backwards behind it; by then k has done at most its warm-up, and has the rest to
    do; the last thing it does is a backward of its first stage, before which positions wait."""
    c = pricer.candidate
    p, v, m = c.pp, c.virtual, c.micro_batches
    forward, backward = f.reshape(-1, v, p), b.reshape(-1, v, p)
    drain = backward[:, 0].cumsum(axis=1) - backward[:, 0]
    fill = forward[:, 0].cumsum(axis=1) - forward[:, 0]
    busy = m * (forward + backward).sum(axis=1)
    behind = backward[:, -1].sum(axis=1, keepdims=True) - backward[:, -1].cumsum(axis=1)
    warm = np.minimum(2 * (p - np.arange(p) - 1) + (v - 1) * p + 1, m * v)
    rounds, rest = np.divmod(warm, p * v)
    done = rounds * p * forward.sum(axis=1)
    for chunk in range(v):
        done = done + np.clip(rest - chunk * p, 0, p) * forward[:, chunk]
    late = f.sum(axis=1) + there + (behind + busy - done + drain).max(axis=1)
    return np.maximum((busy + fill + drain).max(axis=1), late)

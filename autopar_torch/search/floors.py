"""Lower bounds of one candidate's cuts: nearly the price, without walking through the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .evaluate import Pricer
from .tables import Array


def floors(pricer: Pricer, cuts: Sequence[tuple[int, ...]]) -> Array:
    """Per cut: no step with these borders is shorter. `bounds` proves the same for all cuts."""
    return np.array([_floor(pricer, borders) for borders in cuts])


def _floor(pricer: Pricer, borders: tuple[int, ...]) -> float:
    c, pipe = pricer.candidate, pricer.pipeline(borders)
    p, m = c.pp, c.micro_batches
    f, b, i, w = (np.array(part) for part in pipe[:4])
    there, back = sum(pipe.send[:-1]), sum(pipe.back[1:])
    if p == 1:
        return m * float((f + b).sum()) + pricer.outside(borders)
    ahead = np.minimum(m, p - np.arange(p))
    if c.schedule == "gpipe":
        inside = (f + b).sum() + there + back + (m - 1) * (f.max() + b.max())
    elif c.schedule == "1f1b":
        inside = (f + b).sum() + there + back + ((m - 1) * (f + b) - (ahead - 1) * f).max()
    elif c.schedule == "zero_bubble":
        behind = i.sum() - i.cumsum()
        inside = f.sum() + there + (behind + m * (f + i + w) - ahead * f).max()
    else:
        return _interleaved(pricer, f, b, there) + pricer.outside(borders)
    return float(inside) + pricer.outside(borders)


def _interleaved(pricer: Pricer, f: Array, b: Array, there: float) -> float:
    """The first backward of position k is that of its last stage. It comes after all forwards on
    the way and the backwards behind it; by then k has done at most its warm-up, and has the rest to
    do; the last thing it does is a backward of its first stage, before which positions wait."""
    c = pricer.candidate
    p, v, m = c.pp, c.virtual, c.micro_batches
    forward, backward = f.reshape(v, p), b.reshape(v, p)
    drain = np.concatenate([[0.0], backward[0].cumsum()[:-1]])
    fill = np.concatenate([[0.0], forward[0].cumsum()[:-1]])
    whole = m * (forward + backward).sum(axis=0) + fill + drain
    behind = backward[-1].sum() - backward[-1].cumsum()
    warm = np.minimum(2 * (p - np.arange(p) - 1) + (v - 1) * p + 1, m * v)
    rounds, rest = np.divmod(warm, p * v)
    done = rounds * p * forward.sum(axis=0)
    for chunk in range(v):
        done = done + np.clip(rest - chunk * p, 0, p) * forward[chunk]
    left = m * (forward + backward).sum(axis=0) - done + drain
    return float(max(whole.max(), (f.sum() + there + behind + left).max()))

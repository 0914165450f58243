"""Lower bounds of time and memory, for all candidates at once. What they kill is never priced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .evaluate import STATES
from .space import Candidate
from .tables import Array, Tables


class Bounds(NamedTuple):
    """Per candidate: no cut of it is faster, or needs less memory on every device."""

    seconds: Array
    memory_bytes: Array


def bounds(candidates: Sequence[Candidate], tables: Tables, num_rows: int) -> Bounds:
    """Both bounds of every candidate.

    Time. With stages of work t = f + b that sum to S over p positions, one position k has t_k at
    least S/p. It has m micro-batches to compute, so the step takes at least m S/p. Where schedules
    have one stage per position and whole backwards (1F1B, GPipe), the first backward of k starts
    after every forward on the way and every backward behind it; then k has m backwards to do, and
    the backwards before k follow the last: S + (m-1) b_k, with b_k at least r S/p, where r is the
    least share of backward in a block. The optimizer comes after everything: its share of the
    parameters is at least the average.

    Memory. Some position holds at least the average of the parameters and of what the optimizer
    keeps, whatever the cut, and at least one micro-batch of the average activations.
    """
    totals = {key: _totals(tables, *key) for key in {_key(c, num_rows) for c in candidates}}
    columns = np.array([totals[_key(c, num_rows)] for c in candidates])
    total, share, kept, held, trained = columns.T
    m, p = (np.array([getattr(c, name) for c in candidates], dtype=float)
            for name in ("micro_batches", "pp"))  # fmt: skip
    dp = np.array([c.dp for c in candidates], dtype=float)
    zero = np.array([c.zero for c in candidates])
    plain = np.array([c.schedule in ("1f1b", "gpipe") for c in candidates])
    average = total / p
    there_and_back = total + (m - 1) * share * average
    seconds = np.maximum(m * average, np.where(plain, there_and_back, 0.0))
    owned = np.where(zero > 0, trained / dp, trained)
    over = tables.profile.profile.overheads
    seconds = seconds + owned / p * over.update_s_per_byte
    params = np.where(zero == 3, held - trained + owned, held)
    memory = (params + STATES * owned + kept) / p + over.fixed_bytes
    return Bounds(seconds, memory)


Key = tuple[int, int, bool, bool]


def _key(c: Candidate, num_rows: int) -> Key:
    rows = max(1, num_rows // (c.dp * c.micro_batches))
    return c.option, rows, c.schedule == "zero_bubble", c.recompute


def _totals(tables: Tables, option: int, rows: int, split: bool,
            recompute: bool) -> tuple[float, float, float, float, float]:  # fmt: skip
    """(seconds of all blocks, least share of backward, kept, parameters, trained ones)."""
    blocks, params = tables.blocks(option, rows, split, recompute), tables.params(option)
    back = blocks.input + blocks.weight if split else blocks.backward
    each = blocks.forward + back
    shares = back[each > 0] / each[each > 0]
    return (float(each.sum()), float(shares.min()) if shares.size else 0.0,
            float(blocks.kept.sum()), float(params.held.sum()),
            float(params.trained.sum()))  # fmt: skip

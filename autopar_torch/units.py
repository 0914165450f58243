"""Numbers as texts with their units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

GIB = 2**30


def time(seconds: float) -> str:
    """`1.23 s`, `45.6 ms`, `7.8 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:,.2f} {unit}"
    return f"{seconds * 1e6:.1f} us" if seconds * 1e6 >= 0.05 else "0 s"


def size(num_bytes: float) -> str:
    """In GiB; below one, in MiB; far below one of these, in KiB."""
    if 0 < num_bytes < 2**20 / 10:
        return f"{num_bytes / 2**10:,.1f} KiB"
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.1f} MiB"


def size_up(num_bytes: float) -> str:
    """The same, and not less than it is."""
    unit = GIB / 100 if num_bytes >= GIB else 2**20 / 10 if num_bytes >= 2**20 / 10 else 2**10 / 10
    return size(math.ceil(num_bytes / unit) * unit)


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7, 9-15`, of numbers that rise; of many runs the first and the last."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], "...", texts[-1]])


def shape(sizes: Sequence[int]) -> str:
    """`8,192 x 1,024`."""
    return " x ".join(f"{n:,}" for n in sizes) or "1"

"""Nothing fits: by how much the nearest plan fails, what fills its memory, and ways out."""

from __future__ import annotations

import math
from itertools import pairwise

from ..errors import SearchError
from ..units import size, size_up
from .evaluate import Found, Pricer
from .space import SAFETY, Candidate, Constraints, recompute_text
from .tables import Tables


def nothing_fits(tables: Tables, near: Found, num_rows: int, capacity_bytes: float,
                 limits: Constraints) -> SearchError:
    """The error, with the nearest miss by category of memory."""
    parts = memory_parts(Pricer(tables, near.candidate, num_rows), near.borders)
    listed = ", ".join(f"{name} {size(own)}" for name, own in
                       sorted(parts.items(), key=lambda item: -item[1]) if own)
    return SearchError(
        f"no plan fits into {size(capacity_bytes)} per device, for {num_rows} rows on "
        f"{tables.cluster.num_devices} devices\n  nearest: {words(tables, near.candidate)} needs "
        f"{size(SAFETY * near.memory_bytes)} with {SAFETY - 1:.0%} to spare ({listed})",
        where="memory per device",
        fix="; or ".join(_ways_out(tables, near, num_rows, capacity_bytes, limits, parts)),
    )


def memory_parts(pricer: Pricer, borders: tuple[int, ...]) -> dict[str, float]:
    """Bytes by category on the fullest position."""
    pp, stages = pricer.candidate.pp, list(pairwise(borders))
    memory = pricer.memory
    worst = max(range(pp), key=lambda k: memory.peak(k, stages[k::pp]))
    return memory.parts(worst, stages[worst::pp])


def words(tables: Tables, c: Candidate) -> str:
    """A candidate as degrees."""
    text = f"tp={tables.options[c.option].degree} pp={c.pp} dp={c.dp}"
    text += f" num_micro_batches={c.micro_batches}"
    text += f" zero={c.zero}" if c.zero else ""
    return text + (f" {recompute_text(c.recompute)}" if c.recompute else "")


def _ways_out(tables: Tables, near: Found, num_rows: int, capacity_bytes: float,
              limits: Constraints, parts: dict[str, float]) -> list[str]:
    """Three ways to make it fit, the cheapest first."""
    ways = []
    pinned = [name for name in ("tp", "pp", "dp", "zero", "num_micro_batches", "recompute",
                                "schedule") if getattr(limits, name) is not None]
    if pinned:
        ways.append(f"leave {', '.join(pinned)} open")
    need, room = near.memory_bytes, capacity_bytes / SAFETY
    kept = parts.get("activations", 0.0) + parts.get("working", 0.0)
    # gradients are added in float32 all the same, and values are there in bfloat16 besides
    halved = (kept - parts.get("parameters", 0.0)) / 2
    if limits.precision == "float32" and need - halved <= room:
        ways.append("bfloat16 as precision")
    if need - kept < room and (rows := int(num_rows * (room - need + kept) / kept)):
        ways.append(f"a global batch of about {rows} rows")
    fixed, count = parts.get("fixed", 0.0), tables.cluster.num_devices
    if room > fixed:
        doublings = math.ceil(math.log2((need - fixed) / (room - fixed)))
        ways.append(f"about {count * 2 ** max(1, doublings)} devices")
    ways.append(f"devices of {size_up(SAFETY * need)}")
    return ways[:3]

"""A search in words: what was chosen, why, and what the next best would have cost."""

from __future__ import annotations

from itertools import groupby

from ..plan import Plan, Replica
from ..units import ranges, size, time
from .best import Choice, Result
from .space import recompute_text


def short(plan: Plan, num_devices: int = 0) -> str:
    """`tp 2 x pp 2 x dp 1, 4 micro-batches, 1f1b`; of unequal replicas each in words. With the
    number of devices there are, which of them idle."""
    idle = plan.idle(num_devices)
    return _replicas(plan) + (f", device(s) {ranges(idle)} idle" if idle else "")


def _replicas(plan: Plan) -> str:
    replica = plan.replicas[0]
    words = [_in_words(own) for own in plan.replicas]
    if len(set(words)) > 1 or (len({stage.devices[0] for stage in replica.stages}) > 1 and len(
            {len(stage.devices) for stage in replica.stages}) > 1):
        runs = [(text, len(list(run))) for text, run in groupby(words)]
        text = " + ".join(f"{count} x ({own})" if count > 1 else f"({own})" for own, count in runs)
        return f"{text}, {plan.schedule}" + (f", zero {plan.zero}" if plan.zero else "")
    tp = "x".join(map(str, replica.stages[0].axes))
    pp, virtual = len(replica.positions), len(replica.stages) // len(replica.positions)
    parts = [f"tp {tp} x pp {pp} x dp {len(plan.replicas)}"]
    parts.append(f"{replica.num_micro_batches} micro-batch(es)")
    if pp > 1:
        parts.append(plan.schedule + (f" x{virtual}" if virtual > 1 else ""))
        parts.append("blocks " + "|".join(_sizes(replica)))
    parts += [f"zero {plan.zero}"] if plan.zero else []
    parts += _recompute_text(replica)
    return ", ".join(parts)


def _in_words(replica: Replica) -> str:
    """`tp 2|1, blocks 5|3, 4 micro-batches, 3 shares of the rows`."""
    parts = ["tp " + "|".join("x".join(map(str, stage.axes)) for stage in replica.stages)]
    parts += ["blocks " + "|".join(_sizes(replica))] if len(replica.stages) > 1 else []
    parts.append(f"{replica.num_micro_batches} micro-batch(es)")
    parts += [f"{replica.rows} share(s) of the rows"] if replica.rows else []
    parts += _recompute_text(replica)
    return ", ".join(parts)


def _recompute_text(replica: Replica) -> list[str]:
    """`recompute`, or `recompute 0.1` of forward; the most that a stage does."""
    most = max(stage.recompute for stage in replica.stages)
    return [recompute_text(most)] if most else []


def _sizes(replica: Replica) -> list[str]:
    """Blocks per stage, equal ones in a row together: `7`, `14x6`, `7`."""
    blocks = (stage.blocks or (0, 0) for stage in replica.stages)
    runs = [(size, len(list(run))) for size, run in groupby(b - a for a, b in blocks)]
    return [f"{count}x{size}" if count > 1 else str(size) for size, count in runs]


def line(choice: Choice, best_s: float, num_devices: int = 0) -> str:
    """A plan with its figures beside the best."""
    slower = choice.step_s / best_s - 1
    return (f"{time(choice.step_s):>12}  {size(choice.memory_bytes):>14}  "
            f"{f'{slower:+.1%}' if slower else 'best':>8}  {short(choice.plan, num_devices)}")


def summary(found: Result, num_others: int = 4) -> str:
    """One screen: the plan, the prediction, the runners-up, how exact."""
    rows = [line(choice, found.step_s, found.num_devices)
            for choice in found.choices[: 1 + num_others]]
    lines = [f"plan: {short(found.plan, found.num_devices)}", "predicted step, memory per device:"]
    lines += [f"  {row}" for row in rows]
    if found.measured:
        shown = ", ".join(map(time, found.measured))
        lines.append(f"  confirmed by real steps: {shown}")
    lines.append(f"search: {found.how_exact}, in {found.seconds * 1e3:.0f} ms")
    return "\n".join(lines)

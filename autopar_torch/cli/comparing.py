"""report, diff, estimate, validate: plans beside each other, and beside machines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import msgspec

from .. import files
from ..errors import SearchError
from .options import asked, lines, made_by, model_of, place, refuse_said, show

MOST_SHOWN = 40  # fields that differ
GIB = 2**30


def report(options: argparse.Namespace) -> int:
    """The page if a file is named for it, else the same as tables."""
    from .. import api
    from ..report import sections, text
    from ..timeline import Timeline

    measured = files.load(options.measured, Timeline) if options.measured else None
    refuse_said(options, "precision")
    given = {name: value for name, value in asked(options).items() if name != "precision"}
    story = api.report(options.out, options.plan, *model_of(options), place(options),
                       measured=measured, **given)
    if options.json:
        return show([{"title": s.title, "says": s.says, "head": s.table.head if s.table else [],
                      "rows": s.table.rows if s.table else []} for s in sections.sections(story)])
    return lines([f"written: {options.out}"] if options.out else text.lines(story))


def diff(options: argparse.Namespace) -> int:
    """Fields that differ, then what each plan costs."""
    from .. import api
    from ..plan import load_plan

    refuse_said(options, "pin", "memory", "precision")
    plans = load_plan(options.plan), load_plan(options.other)
    found = list(_differences("plan", *(msgspec.to_builtins(plan) for plan in plans)))
    given = model_of(options)
    costs = [_cost(api.simulate(plan, *given, place(options),
                                global_batch_size=options.global_batch_size)) for plan in plans]
    if options.json:
        return show({"fields": found, "costs": costs})
    rows = [f"{path}: {a} -> {b}" for path, a, b in found[:MOST_SHOWN]]
    rows += [f"... and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    rows += [] if found else ["the plans are equal"]
    rows.append(f"{'':>24} {'first':>12} {'second':>12} {'difference':>12}")
    rows += [f"{name:>24} {a:>12.3f} {b:>12.3f} {b - a:>+12.3f}"
             for (name, a), b in zip(costs[0].items(), costs[1].values(), strict=True)]
    return lines(rows)


def estimate(options: argparse.Namespace) -> int:
    """Will it fit? A row per model and cluster."""
    from .. import api
    from ..report.story import TextTable
    from ..report.text import table
    from ..search.explain import short
    from ..units import size, time

    rows = []
    for text in options.model:
        model, inputs = made_by(text)
        for where in options.cluster:
            try:
                found = api.plan(model, inputs, place(options, where), **asked(options))
            except SearchError as error:
                missing = error.what.replace("\n  ", "; ")
                rows.append((text.rpartition(":")[2], where, "no", "", "", missing))
                continue
            rows.append((text.rpartition(":")[2], where, "yes", size(found.memory_bytes),
                         time(found.step_s), short(found.plan)))
    head = ("model", "cluster", "fits", "memory per device", "step", "plan, or what is missing")
    if options.json:
        return show([dict(zip(head, row, strict=True)) for row in rows])
    return lines(table(TextTable(head, rows)))


def validate(options: argparse.Namespace) -> int:
    """A plan by itself: its file, its devices, and that its schedule cannot hang."""
    from .. import proof, schedule
    from ..plan import check, load_plan

    plan = load_plan(options.plan)
    check(plan, options.devices or plan.devices[-1] + 1, "there are")
    for replica in plan.replicas:
        count = replica.num_micro_batches
        proof.check(schedule.build(plan.schedule, replica.position_of, count), count)
    return lines([f"valid: {plan.describe(options.devices or 0)}"])


def _differences(path: str, a: Any, b: Any) -> Iterator[tuple[Any, ...]]:
    """Where two plans, as plain values, part."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys((*a, *b)):
            yield from _differences(f"{path}.{name}", a.get(name), b.get(name))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and not _plain(a, b):
        for k, (x, y) in enumerate(zip_longest(a, b)):
            yield from _differences(f"{path}[{k}]", x, y)
    elif a != b:
        yield path, *("-" if x is None else "..." if isinstance(x, dict) else x for x in (a, b))


def _plain(*found: Any) -> bool:
    """Lists of numbers are one value."""
    return all(isinstance(x, int | float) for values in found for x in values)


def _cost(timeline: Any) -> dict[str, float]:
    """Of a step, in the mean over ranks where ranks differ."""
    parts = [timeline.parts(rank) for rank in timeline.ranks[:64]]
    return {"step, ms": timeline.step_s * 1e3,
            "computing, ms": sum(p.compute_s for p in parts) / len(parts) * 1e3,
            "exchange waited, ms": sum(p.comm_s - p.overlap_s for p in parts) / len(parts) * 1e3,
            "idle, ms": sum(p.idle_s for p in parts) / len(parts) * 1e3,
            "memory at most, GiB": max(m.peak_bytes for m in timeline.memory) / GIB}

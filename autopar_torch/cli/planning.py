"""plan, explain, simulate: of a model, on machines that need not be here."""

from __future__ import annotations

import argparse
import json

from .. import files
from ..errors import PlanError
from ..units import size, time
from .options import asked, lines, model_of, place, refuse_said, save, show


def plan(options: argparse.Namespace) -> int:
    from .. import api
    from ..search.explain import line

    found = api.plan(*model_of(options), place(options), **asked(options))
    save(found.plan, options)
    if options.json:
        return show(json.loads(files.encode(found)))
    rows = [f"{'step':>12}  {'memory/device':>14}"]
    rows += [line(choice, found.step_s, found.num_devices)
             for choice in found.choices[: options.top]]
    rows.append(f"search: {found.how_exact}, in {found.seconds * 1e3:.0f} ms")
    return lines(rows)


def explain(options: argparse.Namespace) -> int:
    from .. import api
    from ..plan import load_plan
    from ..search.reasons import against, why

    case = api.case(*model_of(options), place(options), **asked(options))
    best = case.best().best
    rows = why(case, best)
    if options.plan:
        rows += ["this plan beside the best:", *against(case, load_plan(options.plan), best.plan)]
    return show(rows) if options.json else lines(rows)


def simulate(options: argparse.Namespace) -> int:
    from .. import api

    if options.trace:
        return _replay(options)
    if not options.plan:
        raise PlanError("no plan is given", where="plan", fix="write PLAN MODEL, or add --trace")
    refuse_said(options, "pin", "memory", "precision")
    timeline = api.simulate(options.plan, *model_of(options), place(options),
                            global_batch_size=options.global_batch_size)
    save(timeline, options)
    peak = max(timeline.memory, key=lambda memory: memory.peak_bytes)
    parts = timeline.parts(timeline.ranks[0])
    shown = {"step_s": timeline.step_s, "idle_s": parts.idle_s, "comm_s": parts.comm_s,
             "overlap_s": parts.overlap_s, "peak_bytes": peak.peak_bytes}
    return show(shown) if options.json else lines(
        f"{name.rpartition('_')[0]:8} {size(x) if name == 'peak_bytes' else time(x)}"
        for name, x in shown.items())


def _replay(options: argparse.Namespace) -> int:
    from .. import api
    from ..search.replay import table

    if options.plan:
        raise PlanError("a run with a trace begins with the fastest plan", where="plan",
                        fix="leave out the plan, or --trace")
    found = api.simulate(None, *model_of(options), place(options), changes=options.trace,
                         **asked(options))
    save(found, options)
    if options.json:
        return show(json.loads(files.encode(found)))
    return lines([*table(found.outcomes), f"{found.num_devices} devices, {found.num_segments} "
                   f"states one after the other, {found.num_plans} plans: {found.seconds:.1f} s"])

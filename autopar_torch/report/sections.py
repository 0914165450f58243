"""The sections of a report, from a story: sentences and tables, every number with its unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from ..profile import SOURCES, Profile
from ..search.explain import short
from ..timeline import COMM, COMPUTE, Memory, Timeline, length, merged, union
from ..units import size, time
from . import phases
from .blocks import sharding
from .choices import candidates, otherwise
from .story import Alike, Section, Story, TextTable, groups

MOST_ROWS = 24  # of a table or a drawing; what is left out is said


def sections(story: Story) -> list[Section]:
    """All that can be said of a story; what is not known is left out, or said to be so."""
    makers: list[Callable[[Story], Section | None]] = [
        verdict, changes, step, memory, exchanged, candidates, otherwise, sharding, sources]
    return [section for make in makers if (section := make(story))]


# --- one function per section ---------------------------------------------------------------------


def verdict(story: Story) -> Section:
    """The whole of it in a sentence, and what stands behind it."""
    plan, says = story.plan, []
    if story.predicted:
        says.append(f"A step takes {time(story.predicted.step_s)} (predicted), "
                    f"{story.num_rows / story.predicted.step_s:,.1f} rows/s; {_fits(story)}")
    if story.measured:
        says.append(_beside(story, story.measured))
    if not story.predicted:
        says.append(f"Nothing is predicted: {story.why_not}.")
    says.append(f"{story.num_rows:,} rows a step on {len(plan.devices):,} device(s)"
                f"{_named(story)}: {short(plan)}, {plan.precision} ({plan.reason}).")
    if idle := plan.idle(story.num_devices):
        says.append(f"{len(idle):,} device(s) have no part in it.")
    if story.found and story.found.plan == plan:
        says.append(f"The search: {story.found.how_exact}.")
    return Section("verdict", "Verdict", says)


def changes(story: Story) -> Section | None:
    """What a run saw of its machines, and did."""
    if not story.changed:
        return None
    says = "Seen by this run itself: its clocks, and looks at ranks and links."
    return Section("changes", "What changed while training", [says], TextTable(
        ("after step", "what"), [(f"{number:,}", text) for number, text in story.changed]))


def step(story: Story) -> Section | None:
    """How each rank spends the step."""
    timeline = story.predicted or story.measured
    if timeline is None:
        return None
    own = groups(story, timeline)
    head = ("ranks", "rows", "computing", "exchange hidden", "exchange waited for", "idle")
    rows = [(g.label, f"{g.rows:,}", *_shares(g)) for g in own[:MOST_ROWS]]
    says = [f"A step of {time(timeline.step_s)}, {timeline.source}. Ranks that do the same at the "
            "same time are one row." + left_out(len(own))]
    if story.measured and story.predicted:
        says.append("Beneath it: a measured step, the quickest of those that were tried. The "
                    "optimizer is the caller's, so its update is in the prediction only.")
    return Section("step", "The step, rank by rank", says, TextTable(head, rows))


def memory(story: Story) -> Section | None:
    """What fills the devices, beside what they may take."""
    if not story.predicted or not story.predicted.memory:
        return None
    own = groups(story, story.predicted)
    head = ("ranks", "peak", "limit", *Memory.__struct_fields__)
    rows = [(g.label, size(g.memory.peak_bytes), size(story.limit_bytes(g.ranks)),
             *(size(getattr(g.memory, name)) for name in Memory.__struct_fields__))
            for g in own[:MOST_ROWS] if g.memory]
    says = ["Predicted bytes at the peak of a step. `working` is what operators need for a moment, "
            "`buffers` holds messages (gradients that travel among them), `fixed` is what the "
            "device's own software takes. A plan is chosen only if its peak and 4 % more fit."
            + left_out(len(own))]
    return Section("memory", "Memory of each rank", says, TextTable(head, rows))


def exchanged(story: Story) -> Section | None:
    """Communication by axis, hidden and waited for, in the mean over all ranks."""
    found = [(label, axis_times(story, timeline)) for label, timeline in (
        ("predicted", story.predicted), ("measured", story.measured)) if timeline]
    piped = any(len(replica.positions) > 1 for replica in story.plan.replicas)
    rows = [(axis, label, time(total), time(total - alone), time(alone), phases.AXES[axis])
            for label, times in found for axis, (total, alone) in times.items()
            if total and (piped or axis != phases.PIPELINE)]
    if not found:
        return None
    head = ("along", "source", "per rank and step", "hidden", "waited for", "what it is")
    says = ["Time of a step in which a rank exchanges, in the mean over ranks; `hidden` is while "
            "it computes. A measured exchange includes waiting for the other side."
            if rows else "Nothing is exchanged."]
    return Section("exchange", "Communication by axis", says,
                   TextTable(head, rows) if rows else None)


def sources(story: Story) -> Section:
    """Where each number comes from."""
    rows: list[tuple[str, ...]] = []
    if story.case:
        rows = list(_sources(story.case.profile))
    if story.predicted:
        rows.append(("step and its timeline", "simulated", "from the times above"))
        rows.append(("memory", "counted and predicted", "tensors by the plan; activations as the "
                     "traced program keeps them"))
    if story.measured:
        rows.append(("measured step", "measured", "forward and backward of real steps, here"))
    says = ["`datasheet`: nobody ran it. `derived`: from measurements of something close. How far "
            "predictions are off on a machine, `python profiling accuracy` measures."]
    return Section("sources", "Where the numbers come from", says,
                   TextTable(("number", "source", "detail"), rows) if rows else None)


# --- what they are made of ------------------------------------------------------------------------


def _named(story: Story) -> str:
    if not story.case:
        return ""
    cluster = story.case.profile.cluster
    names = Counter(d.name for d in cluster.devices)
    text = ", ".join(f"{count:,} x {name}" for name, count in names.items())
    return f" of {text} on {len(cluster.nodes):,} node(s)"


def _fits(story: Story) -> str:
    """Of the fullest device, by its share of what it may take."""
    peaks = story.predicted.memory if story.predicted else ()
    shares = [(m.peak_bytes / story.limit_bytes((rank,)), rank) for rank, m in enumerate(peaks)]
    if not shares:
        return ""
    share, rank = max(shares, key=lambda found: (found[0], -found[1]))
    return (f"it {'fits' if share <= 1 else 'does NOT fit'}: the fullest device, rank {rank}, "
            f"takes {size(peaks[rank].peak_bytes)} of {size(story.limit_bytes((rank,)))} "
            f"({share:.0%}).")


def _beside(story: Story, measured: Timeline) -> str:
    took = f"A real step took {time(measured.step_s)} without the optimizer's update"
    if not story.predicted:
        return took + "."
    until_s = max((s.end_s for s in story.predicted.spans if s.name != "update"), default=0.0)
    off = f" ({until_s / measured.step_s - 1:+.1%})" if measured.step_s else ""
    return f"{took}; predicted are {time(until_s)} until there{off}."


def _shares(group: Alike) -> tuple[str, ...]:
    p = group.parts
    alone = p.comm_s - p.overlap_s
    return tuple(f"{time(s)} ({s / p.step_s if p.step_s else 0:.0%})"
                 for s in (p.compute_s, p.overlap_s, alone, max(0.0, p.idle_s)))


def axis_times(story: Story, timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Per axis: seconds of a rank in which something travels along it, and of these the ones in
    which the rank does not compute; in the mean over ranks."""
    found = dict.fromkeys(phases.AXES, (0.0, 0.0))
    own = groups(story, timeline)
    count = sum(len(group.ranks) for group in own)
    for group in own:
        computing = merged(s for s in group.spans if s.stream == COMPUTE)
        for axis, (total, alone) in found.items():
            there = merged(s for s in group.spans if s.stream == COMM and phases.phase(s) == axis)
            more = length(union([*there, *computing])) - length(computing)
            weight = len(group.ranks) / count
            found[axis] = total + weight * length(there), alone + weight * more
    return found


def _sources(profile: Profile) -> Iterator[tuple[str, str, str]]:
    devices = {(d.name, d.source): d for d in profile.cluster.devices}
    for (name, source), d in devices.items():
        yield (name, source, f"{d.flops_per_s / 1e9:,.0f} GFLOP/s, "
               f"{d.memory_bytes_per_s / 1e9:,.0f} GB/s, {size(d.memory_bytes)}")
    cells = Counter(c.source for c in profile.cells)
    for source in SOURCES:
        if cells[source]:
            yield "times of blocks", source, f"{cells[source]:,} programs"
    if profile.curves:
        kinds = Counter(curve.source for curve in profile.curves)
        yield from (("exchanges", kind, f"{count:,} curves over their size")
                    for kind, count in kinds.items())
    else:
        links = {"inside nodes": profile.cluster.inside, "between nodes": profile.cluster.across}
        yield from ((f"links {where}", "datasheet", f"{link.bytes_per_s / 1e9:,.1f} GB/s per device"
                     f" and way, {link.latency_s * 1e6:,.1f} us") for where, link in links.items())
    how = "assumed" if profile.assumed else "measured"
    yield "update, packing, copies", how, ("passes over memory" if profile.assumed else
                                           "seconds per byte, here")
    for name, error in sorted(profile.noise.items(), key=lambda item: -item[1])[:8]:
        yield name, "measured, uncertain", f"error of the median {error:.0%}"


def left_out(count: int) -> str:
    """Of groups of ranks."""
    return f" Shown are {MOST_ROWS} of {count:,} groups of ranks." if count > MOST_ROWS else ""


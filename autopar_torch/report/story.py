"""What a report tells, as data: a plan, what was predicted, what was measured, what else was found.
Pages and terminal tables are made of the same `Section`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import ProfileError
from ..model import ModelGraph
from ..plan import Plan
from ..profile import Profile
from ..search.best import Result
from ..search.reasons import Case
from ..simulate import DRAWS, simulate
from ..timeline import Memory, Parts, Span, Timeline

SAME = 1e-4  # of a step: two ranks whose spans differ by less are shown as one


class TextTable(NamedTuple):
    """Texts with their units in them."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Section(NamedTuple):
    """One question and its answer; `name` says which drawing belongs to it."""

    name: str
    title: str
    says: list[str]
    table: TextTable | None = None


@dataclass(frozen=True)
class Story:
    """A plan of a model. `case`: the search that can be made for it; `found`: what it gave. Without
    them (the plan was given, nothing is known of the machines) there is no prediction."""

    plan: Plan
    graph: ModelGraph
    num_rows: int
    case: Case | None = None
    found: Result | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    changed: Sequence[tuple[int, str]] = ()  # while training: after which step, and what
    why_not: str = "the plan was given, and nothing was measured"  # if there is no prediction

    @property
    def num_devices(self) -> int:
        return self.case.profile.cluster.num_devices if self.case else self.plan.devices[-1] + 1

    def device(self, rank: int) -> str:
        """Its name, where it is known."""
        return self.case.profile.cluster.devices[rank].name if self.case else ""

    def limit_bytes(self, ranks: Sequence[int]) -> int:
        """Bytes that a plan may take on each of these; 0: not known."""
        if self.case is None:
            return 0
        return self.case.limits.capacity_bytes(self.case.profile.cluster, ranks)


def told(plan: Plan, graph: ModelGraph, num_rows: int, case: Case | None = None,
         found: Result | None = None, measured: Timeline | None = None,
         profile: Profile | None = None, changed: Sequence[tuple[int, str]] = ()) -> Story:
    """The story of a plan: predicted, where the profile (the case's) knows what it needs."""
    story = Story(plan, graph, num_rows, case, found, None, measured, changed)
    profile = profile or (case.profile if case else None)
    if profile is None:
        return story
    try:
        predicted = simulate(plan, graph, profile, num_rows, draws=DRAWS)
    except ProfileError as error:
        return replace(story, why_not=error.what)
    return replace(story, predicted=predicted)


class Alike(NamedTuple):
    """Ranks that do the same at the same time, so that one of them is shown for all."""

    ranks: tuple[int, ...]
    device: str
    blocks: tuple[tuple[int, int], ...]
    rows: int
    spans: list[Span]
    parts: Parts
    memory: Memory | None

    @property
    def label(self) -> str:
        """`ranks 0-3, 64-67, ... (512)`, the device and what it has of the model."""
        count = f" ({len(self.ranks):,} alike)" if len(self.ranks) > 1 else ""
        own = ", ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in self.blocks)
        parts = [f"rank{'s' * (len(self.ranks) > 1)} {runs(self.ranks)}{count}", self.device,
                 f"block{'s' * (not own.isdigit())} {own}" if own else ""]
        return ", ".join(part for part in parts if part)


def runs(numbers: Sequence[int], most: int = 3) -> str:
    """`0-3, 8, ...`: numbers in order, shortly."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [f"{a}-{b}" if b > a else str(a) for a, b in found[:most]]
    return ", ".join([*texts, "..."] if len(found) > most else texts)


def groups(story: Story, timeline: Timeline) -> list[Alike]:
    """The ranks of a timeline, those that are alike together, in the order of the first."""
    first = {rank: ranks[0] for ranks in timeline.alike for rank in ranks}
    work = dict(_work(story))
    spans: dict[int, list[Span]] = {}
    for span in timeline.spans:
        spans.setdefault(span.rank, []).append(span)
    keys = {rank: _rounded(own, timeline.step_s * SAME) for rank, own in spans.items()}
    found: dict[object, list[int]] = {}
    for rank in timeline.ranks:
        memory = timeline.memory[rank] if timeline.memory else None
        key = (story.device(rank), work.get(rank), memory, keys.get(first.get(rank, rank)))
        found.setdefault(key, []).append(rank)
    return [_group(story, timeline, tuple(ranks), spans.get(first.get(ranks[0], ranks[0]), []),
                   work.get(ranks[0], ((), 0))) for ranks in found.values()]


Duty = tuple[tuple[tuple[int, int], ...], int]  # ranges of blocks, rows of a step


def _group(story: Story, timeline: Timeline, ranks: tuple[int, ...], spans: list[Span],
           work: Duty) -> Alike:
    memory = timeline.memory[ranks[0]] if timeline.memory else None
    return Alike(ranks, story.device(ranks[0]), *work, spans, timeline.parts(ranks[0]), memory)


def _rounded(spans: Sequence[Span], grain_s: float) -> tuple[tuple[str, str, int, int], ...]:
    scale = 1 / grain_s if grain_s else 0.0
    return tuple((s.stream, s.name, round(s.start_s * scale), round(s.end_s * scale))
                 for s in spans)


def _work(story: Story) -> Iterator[tuple[int, Duty]]:
    """Per rank: its blocks, and the rows that its replica takes of a step."""
    shares = story.plan.micro_batches(story.num_rows)
    for replica, own in zip(story.plan.replicas, shares, strict=True):
        rows = sum(end - start for start, end in own)
        for group in replica.positions:
            blocks = tuple(s.blocks for s in replica.stages if s.devices == group and s.blocks)
            yield from ((rank, (blocks, rows)) for rank in group)

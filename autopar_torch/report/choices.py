"""What else was considered, and on what it loses."""

from __future__ import annotations

from ..errors import SearchError
from ..plan import Plan
from ..search.best import Choice, Result
from ..search.explain import short
from ..search.reasons import Case, time_parts, variants
from ..units import size, time
from .story import Section, Story, TextTable

SIMPLER = "which knows nothing of shared cores and links, or of how times vary"


def candidates(story: Story) -> Section | None:
    """The plans that came close, and on what they lose."""
    found, given = story.found, story.predicted
    if not found or not given or not story.case:
        return None
    others = [c for c in found.choices if c.plan != story.plan]
    mine = next((c for c in found.choices if c.plan == story.plan), None) or Choice(
        story.plan, given.step_s, max(m.peak_bytes for m in given.memory))
    head = ("plan", "step", "against this", "memory, by the search", "where the time goes")
    rows = [_row(story.case, choice, mine) for choice in (mine, *others)]
    dropped = ", ".join(f"{count:,} by {rule}" for rule, count in found.discarded.items() if count)
    says = [f"{found.considered:,} candidates were considered, {found.priced:,} cuts into stages "
            f"priced; dropped: {dropped or 'none'}. {_proof(found)}"]
    if found.measured:
        says.append("Confirmed by real steps, in this order: "
                    + ", ".join(time(s) for s in found.measured))
    if not story.case.profile.assumed:
        says.append(f"The steps are simulated; where their time goes, the search says, {SIMPLER}.")
    return Section("candidates", "The candidates, and why they lost", says, TextTable(head, rows))


def otherwise(story: Story) -> Section | None:
    """Each degree chosen otherwise, the rest searched for again."""
    if not story.case or not story.found or len(story.case.profile.cluster.classes) > 1:
        return None
    if story.found.plan != story.plan:
        return None
    base = story.found.best if story.case.profile.assumed else story.case.best().best
    rows = [(v.change, "" if v.slower is None else f"{v.slower:+.1%}", v.said)
            for v in variants(story.case, base)]
    says = ["The best plan with one choice made otherwise and the rest searched for again."]
    if not story.case.profile.assumed:
        says.append(f"By the search alone, {SIMPLER}; its own best takes {time(base.step_s)}: "
                    f"{short(base.plan)}.")
    return Section("otherwise", "What another choice would cost", says,
                   TextTable(("choice", "step", "plan"), rows))


def _row(case: Case, choice: Choice, mine: Choice) -> tuple[str, ...]:
    against = choice.step_s / mine.step_s - 1
    return (short(choice.plan), time(choice.step_s), "this plan" if choice is mine else
            f"{against:+.1%}", size(choice.memory_bytes), _why(case, choice.plan, mine.plan))


def _why(case: Case, plan: Plan, mine: Plan) -> str:
    """The parts of time by which a plan differs most from this one; of this one, its largest."""
    if len(case.profile.cluster.classes) > 1:
        return "devices differ: compared as a whole only"
    try:
        its = time_parts(*case.pricer(plan))
        own = time_parts(*case.pricer(mine))
    except SearchError:
        return "replicas differ: compared as a whole only"
    if plan == mine:
        return ", ".join(f"{time(s)} {name}" for name, s in _largest(own))
    differ = {name: seconds - own[name] for name, seconds in its.items()}
    return ", ".join(f"{'+' if s > 0 else '-'}{time(abs(s))} {name}" for name, s in
                     _largest(differ))


def _largest(parts: dict[str, float], most: int = 2) -> list[tuple[str, float]]:
    seen = [(name, seconds) for name, seconds in parts.items() if abs(seconds) > 1e-7]
    return sorted(seen, key=lambda part: -abs(part[1]))[:most]


def _proof(found: Result) -> str:
    if found.gap:
        return f"It ended early: a plan that was not looked at may be {found.gap:.1%} faster."
    return "No plan of the space is faster, by these numbers."

"""What a run does when machines and links change: notice, look, tell, plan again, move.

Rank 0 decides. It raises a flag in the message of a step's loss, and before the next step all ranks
listen to its word. A plan is left when what its steps have cost more than those of another one is
what moving there costs (`policy.Regret`).
"""

from __future__ import annotations

import logging
import math
import time
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ..errors import RunError
from ..measure import detect
from ..measure.again import look
from ..measure.factors import Factors, Look, compared
from ..plan import Plan
from ..policy import Other, Regret
from ..run import optimizers
from ..run.batches import Settle
from ..run.model import ParallelModel
from ..run.pace import Detector, Slowed, Stopwatch
from ..run.randomness import untouched
from ..search.explain import short
from ..search.reasons import Case
from .replan import Asking, Priced, Question, name_of

log = logging.getLogger("autopar_torch")
OnChange = Literal["off", "tell", "follow"]
RARELY = 100  # times as long as a look takes passes before the next one
SURE = 0.05  # by which predictions may be off: less than that is no gain
REBUILD_S = 0.5  # of a move, beside its bytes, before one was made


class Deed(Struct, frozen=True):
    """What rank 0 has all ranks do before a step."""

    do: Literal["nothing", "look", "move"] = "nothing"
    plan: Plan | None = None


class Following:
    """Called before each step of training, on all ranks. Without a case it only tells."""

    def __init__(self, parallel: ParallelModel, pace: Stopwatch, case: Case | None) -> None:
        self.parallel, self.pace, self.world = parallel, pace, parallel.world
        self.nodes = self.world.gather(detect.here().node)
        self.replanning = Replanning(parallel, case) if case and not self.world.rank else None
        # All that follows is of rank 0.
        self.word, self.num_updates = Deed(), 0
        self.detector = Detector(self.world.size)
        self.suspect: Slowed | None = None
        self.usual: Look | None = None
        self.now = Factors((1.0,) * self.world.size, (1.0,) * len(set(self.nodes)))
        self.next_look_s = math.inf
        self.told: list[tuple[int, str]] = []  # after which step, and what; for a report

    def __call__(self, settle: Settle) -> None:
        heard, self.pace.heard = self.pace.heard, None
        if heard is None:
            return
        if heard.called:
            settle()
            self._obey(self.world.told(self._said(), Deed))
        if self.world.rank:
            return
        found = self.detector.step(heard.computed_s, heard.waited_s, self.parallel.num_steps)
        self.suspect = found or self.suspect
        if self.word.do == "nothing":
            self.word = self._next()
            self.pace.calls = self.word.do != "nothing"
        self.num_updates = optimizers.num_steps(self.parallel.module)

    def _said(self) -> Deed:
        """The word of rank 0. A plan changes between two steps of an optimizer only: before that,
        there may be a backward to come of what was computed under the old one."""
        if self.world.rank:
            return Deed()
        module = self.parallel.module
        early = self.num_updates == optimizers.num_steps(module) or optimizers.stepping(module)
        if self.word.do == "move" and early:
            return Deed()
        word, self.word, self.pace.calls = self.word, Deed(), False
        return word

    def _next(self) -> Deed:
        first = self.usual is None and self.detector.ready
        if self.suspect or first or time.perf_counter() > self.next_look_s:
            return Deed("look")
        if self.replanning and self.replanning.plan is not self.parallel.plan:
            self.replanning.found_moved()
        plan = self.replanning.wanted() if self.replanning else None
        return Deed("move", plan) if plan else Deed()

    def _obey(self, word: Deed) -> None:
        if word.plan is not None:
            self._move(word.plan)
        elif word.do != "nothing":
            with untouched(self.parallel.device):
                seen = look(self.nodes, self.world, self.parallel.device)
            if self.world.rank == 0:
                self._saw(seen)

    # --- rank 0 ---------------------------------------------------------------------------------

    def _saw(self, seen: Look) -> None:
        """What is usual, or what has changed since."""
        if self.usual is None:
            self.usual = seen
            return
        suspect, self.suspect = self.suspect, None
        now = compared(self.nodes, self.usual, seen, self.now)
        if now == self.now:
            if suspect:
                log.info("%s, but a look at all ranks and links finds none slower than before",
                         self._described(suspect))
        else:
            self._tell(now, suspect)
            self.now = now
            if self.replanning:
                since = suspect.since if suspect else self.parallel.num_steps
                self.replanning.ask(now, since)
        again_s = time.perf_counter() + RARELY * seen.seconds
        self.next_look_s = math.inf if now.usual else again_s

    def _described(self, found: Slowed) -> str:
        step = (f"since about step {found.since}; a step takes {found.step_s:.3f} s")
        if found.rank < 0:
            return f"steps take {found.factor:.2f} times as long, {step}"
        member = self.world.watch.members[found.rank]
        return f"{member} computes {found.factor:.2f} times as long in a step as before, {step}"

    def _tell(self, now: Factors, suspect: Slowed | None) -> None:
        """Name who has another speed now."""
        found = []
        for rank, (old, new) in enumerate(zip(self.now.speeds, now.speeds, strict=True)):
            if old != new:
                found.append((old, new, f"{self.world.watch.members[rank]} computes at"))
        names = list(dict.fromkeys(self.nodes))
        for node, (old, new) in enumerate(zip(self.now.links, now.links, strict=True)):
            if old != new:
                found.append((old, new, f"the link of node {names[node].split('/')[0]} runs at"))
        why = f" ({self._described(suspect)})" if suspect else ""
        for old, new, name in found:
            text = f"{name} {new:.2g} of what was usual, before that {old:.2g}"
            log.log(logging.WARNING if new < old else logging.INFO, "%s%s", text, why)
            self.told.append((self.parallel.num_steps, text))

    def _move(self, plan: Plan) -> None:
        """All ranks; rank 0 says what it was good for. What runs compiled still does."""
        start, refused = time.perf_counter(), ""
        try:
            self.parallel.move(replace(plan, compiled=self.parallel.plan.compiled))
        except RunError as error:
            refused = str(error)
        took_s = time.perf_counter() - start
        done = f"not moved: {refused}" if refused else f"moved in {took_s:.2f} s to {short(plan)}"
        self.told.append((self.parallel.num_steps, done))
        if self.replanning:
            self.detector = Detector(self.world.size)
            self.replanning.moved(name_of(plan), took_s, refused)


def begin(parallel: ParallelModel, changes: OnChange) -> None:
    """From now on changes of the machines are noticed."""
    untraced, pace, follows = parallel.fallback_reason, parallel.pace, changes == "follow"
    case = parallel.case
    if pace is not None and not untraced:
        parallel.between = Following(parallel, pace, case if follows else None)
    why = ("there is one process" if parallel.world.size == 1 else
           "the model cannot be traced" if untraced else "a plan is given" if case is None else
           "GPUs are not watched yet" if pace is None else "")
    if follows and why and parallel.world.rank == 0:
        log.warning("not honoured, as %s: changes=\"follow\"", why)


class Replanning:
    """Which plan would be the best now, and whether it is time to move to it. Of rank 0."""

    def __init__(self, parallel: ParallelModel, case: Case) -> None:
        self.parallel, self.case = parallel, case
        self.plan, self.current = parallel.plan, name_of(parallel.plan)
        self.plans = {self.current: replace(self.plan, compiled=())}  # all by the same measure
        self.asking: Asking | None = None
        self.priced: dict[str, Priced] = {}  # what steps take as machines are now
        self.regret, self.rebuild_s, self.since = Regret(), REBUILD_S, 0
        self.now: Factors | None = None

    def ask(self, now: Factors | None, since: int) -> None:
        """For the best plan, beside training; until there is an answer nothing is weighed."""
        if self.asking:
            self.asking.drop()
            self.asking = None
        self.priced, self.since, self.now = {}, since, now
        if now is None:  # nothing has changed yet
            return
        plans = {self.current: self.plans[self.current]} | self.plans
        case = self.case
        self.asking = Asking(Question(case.graph, tuple(case.options), case.profile, case.num_rows,
                                      case.limits, now, tuple(plans.values()),
                                      self._state_bytes()))

    def _state_bytes(self) -> float:
        """Per element of a parameter, with what optimizers keep of it."""
        parts = [held.part for held in self.parallel.store.held.values()]
        elements = sum(part.numel() for part in parts)
        held_bytes = sum(part.nbytes for part in parts)
        return (held_bytes + optimizers.state_bytes(self.parallel.module)) / max(1, elements)

    def wanted(self) -> Plan | None:
        """The plan to move to, once it is worth it. Called after each step."""
        steps = 1
        if self.asking and self.asking.failed:
            log.warning("no plan was found for the machines as they are now: %s",
                        self.asking.failed)
            self.asking = None
        if self.asking and self.asking.answer is not None:
            self.priced = {name_of(own.plan): own for own in self.asking.answer}
            self.plans |= {name: own.plan for name, own in self.priced.items()}
            self.asking, steps = None, max(1, self.parallel.num_steps - self.since)
        own = self.priced.get(self.current)
        if own is None:
            return None
        others = {name: Other(other.step_s, other.move_s + self.rebuild_s)
                  for name, other in self.priced.items() if other is not own}
        self.regret = self.regret.seen(own.step_s, others, steps)
        sure = {name: other for name, other in others.items()
                if other.step_s < own.step_s * (1 - SURE)}
        chosen = self.regret.chosen(own.step_s, sure)
        return replace(self.plans[chosen], reason="machines changed") if chosen else None

    def moved(self, name: str, seconds: float, refused: str) -> None:
        """It was tried; what was refused is not tried again until machines change."""
        if refused:
            log.warning("not moved to another plan: %s", refused)
            del self.priced[name]
            return
        old, new = self.priced[self.current], self.priced[name]
        log.info("the plan was changed as the machines have changed: it took %.2f s (expected were "
                 "%.2f s), and steps should take %.3f s instead of %.3f s", seconds,
                 new.move_s + self.rebuild_s, new.step_s, old.step_s)
        self.rebuild_s = max(0.0, seconds - new.move_s)
        self.regret = self.regret.moved(self.current, name, seconds)
        self.plan, self.current = self.parallel.plan, name
        self.ask(self.now, self.parallel.num_steps)  # what moving from here would take

    def found_moved(self) -> None:
        """The script itself has called `model.move`."""
        self.plan, self.regret = self.parallel.plan, Regret()
        self.current = name_of(self.plan)
        self.plans[self.current] = replace(self.plan, compiled=())
        self.ask(self.now, self.parallel.num_steps)

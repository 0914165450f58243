"""The best plan for machines that have changed: found by a process of its own, beside training.

    python -m autopar_torch.find.replan < question.json > answer.json

It runs at low priority, and imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import threading

from msgspec import Struct
from msgspec.structs import replace

from .. import files
from ..errors import AutoparError, SearchError
from ..limits import Amount, Seconds
from ..measure.factors import Factors
from ..model import ModelGraph
from ..plan import Plan
from ..profile import Lookup, Profile
from ..search.space import SAFETY, Constraints, Option
from ..search.unequal import FEW, fastest
from ..shard.holdings import all_holdings
from ..shard.reduction import boxes_of
from ..shard.transfers import transfers
from ..simulate import simulate
from ..simulate.network import lookup
from .changed import changed

LIMIT_S = 2.0  # of searching
TRIED = 4  # plans that the engine puts in order
NICE = 10


class Question(Struct, frozen=True):
    """What was measured, what is left of it, and between which plans to choose."""

    graph: ModelGraph
    options: tuple[Option, ...]
    profile: Profile
    num_rows: int
    limits: Constraints
    now: Factors
    plans: tuple[Plan, ...]  # that are known, the one in use first
    state_bytes: Amount  # per element of a parameter: it, and what optimizers keep


class Priced(Struct, frozen=True):
    """A plan, what a step of it takes now, and the seconds of the bytes of a move to it."""

    plan: Plan
    step_s: Seconds
    move_s: Seconds


def answered(asked: Question) -> list[Priced]:
    """The known plans and the best one for the machines as they are now."""
    profile = changed(asked.profile, asked.options, asked.graph, asked.num_rows, asked.limits,
                      asked.now)
    seen = lookup(profile)
    plans = [*asked.plans, *_best(asked, seen)]
    room = asked.limits.capacity_bytes(profile.cluster)
    priced: list[Priced] = []
    others: list[Priced] = []
    for plan in {name_of(plan): plan for plan in reversed(plans)}.values():
        try:
            step = simulate(plan, asked.graph, profile, asked.num_rows)
            found = Priced(plan, step.step_s, _move_s(asked, plan, seen))
        except AutoparError:
            continue  # of what it exchanges, too little was measured
        if plan in asked.plans:
            priced.append(found)
        elif SAFETY * max(memory.peak_bytes for memory in step.memory) <= room:
            others.append(found)
    return [*priced, *sorted(others, key=lambda own: own.step_s)[:1]]


def _best(asked: Question, seen: Lookup) -> list[Plan]:
    """The plans that are the fastest now, also those of fewer nodes: beside a slow link, others
    may be quicker alone. None if none fits."""
    cluster, plans = seen.profile.cluster, list[Plan]()
    few = len(cluster.classes) == 1 and len(cluster.nodes) <= FEW
    for count in range(1 if few else len(cluster.nodes), len(cluster.nodes) + 1):
        nodes = cluster.nodes[:count]
        fewer = replace(cluster, nodes=nodes, cores=cluster.cores[: sum(map(len, nodes))])
        with contextlib.suppress(SearchError):
            own = lookup(replace(seen.profile, cluster=fewer))
            found = fastest(asked.graph, asked.options, own, asked.num_rows, asked.limits, TRIED,
                            LIMIT_S)
            plans += [choice.plan for choice in found.choices]
    return plans


def name_of(plan: Plan) -> str:
    """Equal for plans that do the same."""
    return hashlib.sha256(files.encode(replace(plan, reason="", compiled=()))).hexdigest()[:16]


def _move_s(asked: Question, plan: Plan, seen: Lookup) -> float:
    """Of the rank that sends and receives longest: one message after the other."""
    if plan == asked.plans[0]:
        return 0.0
    before, after = (all_holdings(own, asked.graph) for own in (asked.plans[0], plan))
    travels: dict[tuple[int, int], int] = {}
    sent: dict[int, int] = {}
    for name in after:
        moves = transfers(boxes_of(asked.plans[0], asked.graph, name, before[name]),
                          boxes_of(plan, asked.graph, name, after[name]), sent)
        for move in moves:
            if move.source != move.target:
                pair = (move.source, move.target)
                travels[pair] = travels.get(pair, 0) + math.prod(move.box[1])
    by_rank: dict[int, float] = {}
    place = seen.profile.cluster.place
    for pair, elements in travels.items():
        op = "send" if ("send", place(sorted(pair))) in seen.curves else "sum"
        seconds = seen.curve(op, sorted(pair)).seconds(elements * asked.state_bytes)
        for rank in pair:
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    return max(by_rank.values(), default=0.0)


# --- the process --------------------------------------------------------------------------------


class Asking:
    """A question on its way; `answer` is None until there is one."""

    def __init__(self, question: Question) -> None:
        self.answer: list[Priced] | None = None
        self.failed = ""
        self._process = subprocess.Popen([sys.executable, "-m", __spec__.name],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE)
        self._thread = threading.Thread(target=self._wait, args=(files.encode(question),),
                                        daemon=True)
        self._thread.start()

    def _wait(self, question: bytes) -> None:
        said, errors = self._process.communicate(question)
        try:
            self.answer = files.decode(said, list[Priced])
        except AutoparError as error:
            last = errors.decode(errors="replace").strip().splitlines()[-3:]
            self.failed = " ".join(map(str.strip, last)) or str(error)

    def drop(self) -> None:
        """The answer is not wanted any more."""
        self._process.kill()
        self._thread.join()


def main() -> None:
    os.nice(NICE)
    question = files.decode(sys.stdin.buffer.read(), Question)
    sys.stdout.buffer.write(files.encode(answered(question)))


if __name__ == "__main__":
    main()

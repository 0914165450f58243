"""When to move to another plan: pure rules, and the best that hindsight could have done.

What a plan costs at a moment is what it loses: the seconds by which its steps are longer than those
of the best plan known then. A move costs its price in seconds.

What holds for `Regret`, for steps that are short beside the price P (tests/test_policy.py):

* One change, from a plan that was the best until then: it loses at most twice what it could have
  lost by knowing how long the change lasts (ski rental: the regret and the move, P each).
* Any number of changes between two plans, also timed against the rule: it loses at most three times
  what the best moves in hindsight lose, and 2 P. No rule without dice can promise less than three
  times (two states of a metrical task system). So a plan that was just paid for is left only for
  twice the regret; without that a wave around break-even would cost four times.
* The seconds for the same steps, useful ones included, are then at most (3M - 1) / (M + 1) times
  those of the best moves, and 2 P, where M is how many times slower than the best a plan becomes:
  twice for M = 3, and never three times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from .limits import Delta

MOST_S = 1e9  # behind; what cannot run at all is further behind


class Other(NamedTuple):
    """Another plan: what a step of it takes now, and what moving to it does."""

    step_s: float
    price_s: float


class Regret(Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan in use has lost against each other one, less what it gained: the differences of
    a work function. A rule of one run; its verbs return the rule as it is afterwards."""

    behind_s: dict[str, Delta] = {}

    def seen(self, step_s: float, others: Mapping[str, Other], num_steps: float = 1.0) -> Regret:
        """After so many steps of the plan in use. What a plan gained can never make up for more
        than the price of one move."""
        behind = {name: self.behind_s.get(name, 0.0) + (step_s - other.step_s) * num_steps
                  for name, other in others.items()}
        return Regret(self.behind_s | {name: min(max(own, -others[name].price_s), MOST_S)
                                       for name, own in behind.items()})

    def chosen(self, step_s: float, others: Mapping[str, Other]) -> str | None:
        """The plan to move to, if one is worth its price: of these the fastest at present."""
        worth = [name for name, other in others.items() if other.step_s < step_s
                 and self.behind_s.get(name, 0.0) >= other.price_s]
        return min(worth, key=lambda name: (others[name].step_s, name), default=None)

    def moved(self, old: str, new: str, price_s: float) -> Regret:
        """From now on the plan in use is the new one."""
        paid = self.behind_s.get(new, 0.0)
        rest = {name: max(own - paid, -price_s) for name, own in self.behind_s.items()}
        return Regret({name: own for name, own in rest.items() if name != new} | {old: -price_s})

    def steps_left(self, step_s: float, others: Mapping[str, Other]) -> float:
        """So many steps from now, if nothing changes, a faster plan is worth its price."""
        return min((max(0.0, other.price_s - self.behind_s.get(name, 0.0))
                    / (step_s - other.step_s)
                    for name, other in others.items() if other.step_s < step_s),
                   default=float("inf"))

"""Uneven plans on 2 to 4 ranks against one process: three steps, norms, state dicts, checkpoints."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import nn

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.plan import Plan, Replica, Stage
from autopar_torch.run import world
from oracle import TOLERANCE

ROWS = 8


class Untied(zoo.NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


zoo.OWN["untied"] = Untied, zoo.MODELS["nanogpt"][1]


def chain(*groups: str, blocks: tuple[int, ...] = (), micro: int = 1, rows: int | None = None,
          recompute: bool = False) -> Replica:
    """A replica with a stage per group of devices (`01`), which end at these of the 6 blocks."""
    ends = (0, *blocks, 6)
    return Replica(tuple(
        Stage(tuple(map(int, group)), (ends[i], ends[i + 1]) if blocks else None,
              recompute=recompute)
        for i, group in enumerate(groups)), micro, rows)


def plan(*replicas: Replica, **settings: Any) -> Plan:
    return Plan(replicas, **settings)


SHARES = chain("0", micro=3), chain("1")
ROW_SHARES = chain("0", rows=3), chain("1", rows=1)
BORDERS = chain("0", "1", blocks=(1,), micro=2)
WIDTHS = chain("01"), chain("2")
DEPTHS = chain("0", "1", micro=2, rows=2), chain("2", micro=2, rows=1)
DEPTH3 = chain("0", "1", "2", micro=2), chain("3")

BATCH_NORM: dict[int, dict[str, Plan]] = {
    2: {"rows 3:1": plan(*ROW_SHARES, zero=1)},
    3: {"tp2 + tp1": plan(*WIDTHS), "rows, tp2 + tp1": plan(chain("01", rows=3), chain("2", rows=1)),
        "pp2 + pp1": plan(chain("0", "1", rows=2), chain("2", rows=1), zero=1),
        "tp2|tp1": plan(chain("01", "2")),
        "idle": plan(chain("0", rows=3), chain("2", rows=1))},
    4: {"pp3 + pp1": plan(chain("0", "1", "2"), chain("3")),
        "pp2 + pp2, other borders": plan(chain("0", "1", blocks=(1,)), chain("2", "3", blocks=(4,))),
        "tp3 + tp1": plan(chain("012"), chain("3")),
        "tp2|tp1 + tp1": plan(chain("01", "2"), chain("3")),
        "tp2 + tp2, one alone": plan(chain("01", rows=5), chain("23", rows=1))},
}
PLANS: dict[int, dict[str, Plan]] = {
    2: {"replicas 3:1": plan(*SHARES),
        "rows 3:1": plan(*ROW_SHARES),
        "stages 1|5": plan(BORDERS),
        "stages 5|1, zero bubble": plan(chain("0", "1", blocks=(5,), micro=3),
                                        schedule="zero_bubble"),
        **{f"replicas 3:1, ZeRO {zero}": plan(*SHARES, zero=zero) for zero in (1, 2, 3)},
        **{f"rows 3:1, ZeRO {zero}": plan(*ROW_SHARES, zero=zero) for zero in (1, 2, 3)},
        "one recomputes": plan(chain("0", recompute=True), chain("1"), zero=1),
        **{f"idle 0, ZeRO {zero}": plan(chain("1", micro=2), zero=zero) for zero in (0, 3)}},
    3: {"tp2 + tp1": plan(*WIDTHS), "pp2 + pp1": plan(*DEPTHS),
        "tp2|tp1": plan(chain("01", "2", micro=2)), "tp1|tp2": plan(chain("0", "12")),
        **{f"tp2 + tp1, ZeRO {zero}": plan(*WIDTHS, zero=zero) for zero in (1, 2, 3)},
        **{f"pp2 + pp1, ZeRO {zero}": plan(*DEPTHS, zero=zero) for zero in (1, 2, 3)},
        "rows 5:2:1, ZeRO 3": plan(*(chain(f"{r}", micro=2, rows=n)
                                     for r, n in enumerate((5, 2, 1))), zero=3),
        "interleaved + one": plan(chain("0", "1", "0", "1", micro=2), chain("2", micro=2),
                                  schedule="interleaved", zero=2),
        **{f"idle 1, ZeRO {zero}": plan(chain("0", rows=3), chain("2", rows=1), zero=zero)
           for zero in (0, 1, 2, 3)},
        "idle 0, pp2": plan(chain("2", "1", micro=2), zero=1)},
    4: {"pp3 + pp1": plan(*DEPTH3), "tp3|tp1": plan(chain("012", "3")),
        **{f"pp3 + pp1, ZeRO {zero}": plan(*DEPTH3, zero=zero) for zero in (1, 2, 3)},
        "tp3 + tp1": plan(chain("012", rows=3), chain("3", rows=1), zero=1),
        "tp2 pp2 + pp1": plan(chain("01", "2", rows=5), chain("3", rows=3), zero=2),
        "pp2 + pp2, other borders, ZeRO 3": plan(
            chain("0", "1", blocks=(1,), micro=2, rows=3),
            chain("2", "3", blocks=(4,), micro=2, rows=1), zero=3)},
}

def other(num_ranks: int) -> Plan:
    return Plan.uniform(dp=num_ranks, zero=2)


_folders = count()


def checked(name: str, own: Plan, base: str) -> dict[str, float]:
    """Worst relative differences: trained, and gone on with from a checkpoint."""
    found = oracle.compare(name, own, True, ROWS)
    state, batches = {}, [zoo.batch(name, ROWS, seed, True) for seed in range(3)]
    folder = f"{base}/{next(_folders)}"
    for way in (own, own, other(len(found) and torch.distributed.get_world_size())):
        model = ap.parallelize(zoo.build(name, seed=bool(state)), batches[0], plan=way)
        opt = oracle.optimizer(model.parameters())
        for batch in [] if state else batches[:2]:
            step(model, opt, batch)
        if state:
            model.load(folder, opt)
        else:
            model.save(folder, opt)
        step(model, opt, batches[2])
        now = {**model.state_dict(), **{
            f"{i} {k}": v for i, s in opt.state_dict()["state"].items() for k, v in s.items()}}
        state = state or now
        assert set(state) == set(now)
        found[f"loaded into {'itself' if way is own else 'another'}"] = max(
            float((now[k] - v).abs().max()) for k, v in state.items())
    return found


def step(model: Any, opt: torch.optim.Optimizer, batch: zoo.Batch) -> None:
    oracle.loss_of(model(**batch)).backward()
    opt.step()
    opt.zero_grad()


def check(cases: list[str], base: str) -> dict[str, str]:
    """Case -> what is wrong."""
    rank, size = world.start()
    torch.set_num_threads(1)
    wrong = {}
    for case in cases:
        name, _, text = case.partition(": ")
        try:
            found = checked(name, (BATCH_NORM if name == 'resnet' else PLANS)[size][text], base)
            wrong[case] = str({k: v for k, v in found.items() if not v <= TOLERANCE} or "")
        except Exception as error:
            wrong[case] = f"{type(error).__name__}: {error}"
    return wrong

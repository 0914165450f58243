"""Uneven plans on 2 to 5 ranks, each against one process: training, norms, state, checkpoints."""

from __future__ import annotations

import functools
import tempfile
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.plan import Plan, Replica, Stage
from autopar_torch.run import world
from ranks import run_ranks

ROWS = 8
BFLOAT16 = 2**-8  # its rounding: gradients of a micro-batch are rounded before they are added


class Untied(zoo.NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


zoo.OWN["untied"] = Untied, zoo.MODELS["nanogpt"][1]


def chain(*groups: str, ends: tuple[int, ...] = (), micro: int = 1, rows: int | None = None,
          recompute: bool = False, mesh: tuple[int, ...] = (), share: int = 0) -> Replica:
    """A replica with a stage per group of devices (`01`), which end at these of the 6 blocks;
    `mesh`: of its first stage; `share`: what each of its devices keeps under ZeRO."""
    borders = (0, *ends, 6)
    stages = (Stage(tuple(map(int, group)), borders[i : i + 2] if ends else None,  # type: ignore[arg-type]
                    () if i else mesh, recompute, share=(share,) * len(group) if share else ())
              for i, group in enumerate(groups))
    return Replica(tuple(stages), micro, rows)


def plan(*replicas: Replica, **settings: Any) -> Plan:
    return Plan(replicas, **settings)


def with_zero(name: str, own: Plan) -> dict[str, Plan]:
    return {f"{name}, ZeRO {zero}": replace(own, zero=zero) for zero in range(4)}


SHARES = plan(chain("0", micro=3), chain("1"))
ROW_SHARES = plan(chain("0", rows=3, micro=2), chain("1", rows=1, micro=2))
WIDTHS = plan(chain("01", rows=3), chain("2", rows=1))
DEPTHS = plan(chain("0", "1", micro=2, rows=2), chain("2", micro=2, rows=1))
DEEPER = plan(chain("0", "1", "2", micro=2), chain("3"))
IDLE = plan(chain("0", rows=3), chain("2", rows=1))

# Ranks -> plans of the GPTs.
PLANS: dict[int, dict[str, Plan]] = {
    2: {**with_zero("replicas 3:1", SHARES), **with_zero("rows 3:1", ROW_SHARES),
        "stages 1|5": plan(chain("0", "1", ends=(1,), micro=2)),
        "stages 5|1, zero bubble": plan(chain("0", "1", ends=(5,), micro=3),
                                        schedule="zero_bubble"),
        **with_zero("one recomputes", plan(chain("0", recompute=True, micro=2),
                                           chain("1", micro=2))),
        "0 idles, ZeRO 3": plan(chain("1", micro=2), zero=3),
        **with_zero("pieces 5:2", plan(chain("0", micro=2, share=5),
                                       chain("1", micro=2, share=2)))},
    3: {**with_zero("tp2 + tp1", WIDTHS), **with_zero("pp2 + pp1", DEPTHS),
        "tp2|tp1": plan(chain("01", "2", micro=2)), "tp1|tp2": plan(chain("0", "12")),
        "rows 2:1:1, ZeRO 3": plan(*(chain(f"{r}", micro=2, rows=n)
                                     for r, n in enumerate((2, 1, 1))), zero=3),
        "interleaved + one, ZeRO 2": plan(chain("0", "1", "0", "1", micro=2),
                                          chain("2", micro=2), schedule="interleaved", zero=2),
        "the same stages in other places, ZeRO 3": plan(
            *(chain(*at, ends=(1, 3, 5), micro=2) for at in ("0101", "2222")),
            schedule="interleaved", zero=3),
        **with_zero("pieces, pp2 + pp1", plan(chain("0", "1", share=2), chain("2", share=90))),
        **with_zero("1 idles", IDLE), "0 idles, pp2": plan(chain("2", "1", micro=2), zero=1)},
    4: {**with_zero("pp3 + pp1", DEEPER), "tp3|tp1": plan(chain("012", "3")),
        **with_zero("pieces, tp2 + tp2", plan(chain("01", share=1), chain("23", share=4))),
        "tp3 + tp1": plan(chain("012", rows=3), chain("3", rows=1), zero=1),
        "tp2|pp + pp1": plan(chain("01", "2", rows=5), chain("3", rows=3), zero=2),
        "pp2 + pp2, other borders, ZeRO 3": plan(
            chain("0", "1", ends=(1,), micro=2, rows=3),
            chain("2", "3", ends=(4,), micro=2, rows=1), zero=3)},
    5: {"2x2|1": plan(chain("0123", "4", mesh=(2, 2))),
        "2x2 + 1": plan(chain("0123", rows=3, mesh=(2, 2)), chain("4", rows=1), zero=1),
        "tp3 + tp2": plan(chain("012", rows=3), chain("34", rows=2))},
}
# And of a network with batch normalisation, whose channels tensor axes cut.
CONV: dict[int, dict[str, Plan]] = {
    2: {"rows 3:1": plan(chain("0", rows=3), chain("1", rows=1), zero=1)},
    3: {"tp2 + tp1": WIDTHS, "pp2 + pp1": plan(chain("0", "1", rows=2), chain("2", rows=1), zero=1),
        "tp2|tp1": plan(chain("01", "2")), "1 idles": IDLE},
    4: {"pp3 + pp1": plan(chain("0", "1", "2"), chain("3")),
        "pp2 + pp2, other borders": plan(chain("0", "1", ends=(1,)), chain("2", "3", ends=(4,))),
        "tp2|tp1 + tp1": plan(chain("01", "2"), chain("3")),
        "tp2 + tp2": plan(chain("01", rows=5), chain("23", rows=1))},
    5: {"2x2 + 1": plan(chain("0123", mesh=(2, 2)), chain("4")),
        "tp3 + tp2": plan(chain("012", rows=3), chain("34", rows=2))},
}
HALF = ("replicas 3:1, ZeRO 0", "rows 3:1, ZeRO 3", "tp2 + tp1, ZeRO 1", "pp2 + pp1, ZeRO 2",
        "tp2|tp1", "pp3 + pp1, ZeRO 3", "tp3|tp1")
QUICK = ("nanogpt: stages 1|5", "resnet: rows 3:1", "untied: tp2 + tp1, ZeRO 1",
         "nanogpt: pp2 + pp1, ZeRO 3", "nanogpt: 1 idles, ZeRO 1")


def cases(quick: bool) -> list[tuple[int, str]]:
    every = [(size, f"{model}: {name}") for size in PLANS for model, plans in (
        ("nanogpt", PLANS), ("untied", PLANS), ("resnet", CONV),
        ("half", {size: dict.fromkeys(name for name in HALF if name in PLANS[size])}),
    ) for name in plans[size]]
    return [(size, case) for size, case in every if (size < 4 and case in QUICK) == quick]


@pytest.mark.parametrize(("size", "case"), cases(quick=True))
def test_uneven_plans_are_right(size: int, case: str) -> None:
    assert _checked(size, quick=True)[case] == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "case"), cases(quick=False))
def test_more_uneven_plans_are_right(size: int, case: str) -> None:
    assert _checked(size, quick=False)[case] == ""


@functools.cache
def _checked(size: int, quick: bool) -> dict[str, str]:
    own = [case for ranks, case in cases(quick) if ranks == size]
    with tempfile.TemporaryDirectory() as folder:
        each = run_ranks(size, "test_uneven_ranks:check", own, folder, timeout_s=1700)
    return {case: "\n".join(dict.fromkeys(found[case] for found in each if found[case]))
            for case in own}


@oracle.traced_once()
def check(names: list[str], folder: str) -> dict[str, str]:
    """On one rank: case -> what is wrong."""
    world.start()
    torch.set_num_threads(1)
    wrong = {}
    for place, case in enumerate(names):
        model, _, name = case.partition(": ")
        own = (CONV if model == "resnet" else PLANS)[dist.get_world_size()][name]
        limit = BFLOAT16 if model == "half" else oracle.TOLERANCE
        try:
            found = in_half(own) if model == "half" else oracle.compare(model, own, True, ROWS)
            found |= gone_on("nanogpt" if model == "half" else model, own, f"{folder}/{place}")
            wrong[case] = str({k: v for k, v in found.items() if not v <= limit} or "")
        except Exception as error:
            wrong[case] = f"{type(error).__name__}: {error}"
    return wrong


def in_half(own: Plan) -> dict[str, float]:
    """Beside one device in bfloat16. Of all parameters together: where a gradient is noise, as that
    of the bias of keys, Adam makes steps of it."""
    found = []
    for way in (own, plan(chain("0"))):
        model = ap.parallelize(zoo.build("nanogpt"), plan=replace(way, precision="bfloat16"))
        losses, norms = oracle.train(model, model.clip_grad_norm_, "nanogpt", True)
        state = torch.cat([value.flatten() for value in model.state_dict().values()])
        found.append({"losses": torch.tensor(losses), "norms": torch.tensor(norms), "state": state})
    return {k: float((v - found[0][k]).norm() / v.norm()) for k, v in found[1].items()}


def gone_on(name: str, own: Plan, folder: str) -> dict[str, float]:
    """Saved after two steps, and loaded into the same plan and into another: how far the third step
    leads from where it led."""
    batches, states, numbers = [zoo.batch(name, ROWS, s, True) for s in range(3)], [], count()
    for way in (own, own, Plan.uniform(dp=dist.get_world_size(), zero=2)):
        model = ap.parallelize(zoo.build(name, next(numbers)), batches[0], plan=way)
        opt = oracle.optimizer(model.parameters())
        if states:
            model.load(folder, opt)
        else:
            _train(model, opt, batches[:2])
            model.save(folder, opt)
        _train(model, opt, batches[2:])
        of_opt = opt.state_dict()["state"].items()
        states.append({**model.state_dict(),
                       **{f"{i} {key}": v for i, own in of_opt for key, v in own.items()}})
    return {f"loaded into {where}": max(_apart(states[0], other).values())
            for where, other in zip(("itself", "another"), states[1:], strict=True)}


def _train(model: Any, opt: torch.optim.Optimizer, batches: list[zoo.Batch]) -> None:
    for batch in batches:
        oracle.loss_of(model(**batch)).backward()
        opt.step()
        opt.zero_grad()


def _apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Differences, relative to the largest number of each (of small ones: to 1)."""
    assert set(one) == set(other)
    return {k: float((one[k].double() - v.double()).abs().max()) / max(1.0, float(v.abs().max()))
            for k, v in other.items()}

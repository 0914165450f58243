"""Edited shardings of real plans, really run on 2 ranks: each is right or refused.

python tests/edits.py --count 500      # counts, and what was wrong
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import autopar_torch as ap
import oracle
import zoo
from autopar_torch import files
from autopar_torch.errors import AutoparError, ShardingError
from autopar_torch.run import tracing, world
from autopar_torch.shard.lower import Lowering
from autopar_torch.shard.solve import combine
from autopar_torch.shard.square import all_strategies
from autopar_torch.trace.call import take_apart
from ranks import run_ranks

NAMES = ("nanogpt", "mlp", "unet")
DEGREES: tuple[dict[str, Any], ...] = (
    {"tp": 2}, {"tp": 2, "virtual": 2}, {"tp": 2, "num_micro_batches": 2},
)
FORMS = ("R|R", "R|P", "S0|S0", "S1|S1", "S0|R", "P|P", "P|R", "S5|S5", "S-1|S-1", "S0/3|S0/3",
         "S0/3b|S0/3b", "S0x1o|S0x1o", "", "S", "nonsense", "R.R|R.R", "S1|S0")
ROWS = 4
Loose = dict[str, Any]


@cache
def traced(name: str) -> Any:
    """Of each model once: what is edited does not change it."""
    call, _ = take_apart((), zoo.batch(name, ROWS))
    own = TRACER(zoo.build(name), torch.device("cpu"), None, "float32", False)
    return own(call, True, ("loss",))


TRACER = tracing.tracer


@contextlib.contextmanager
def traced_before(name: str) -> Any:
    """Models of the same name share one trace."""
    kept = tracing.once
    tracing.once = lambda own, place, model: lambda *asked: traced(name)
    try:
        yield
    finally:
        tracing.once = kept


@cache
def plan_of(name: str, which: int) -> Loose:
    with traced_before(name):
        plan = ap.Plan.uniform(**DEGREES[which])
        model = ap.parallelize(zoo.build(name), zoo.batch(name, ROWS), plan=plan)
    found: Loose = json.loads(files.encode(model.plan))
    return found


def losses(model: Any, name: str) -> list[float]:
    """Before and after a step: gradients show in the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        loss = oracle.loss_of(model(**zoo.batch(name, ROWS)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@cache
def expected(name: str) -> list[float]:
    return losses(zoo.build(name), name)


# --- edits: each changes a plan in place ----------------------------------------------------------


def _one(draw: random.Random, plan: Loose) -> Loose:
    found: Loose = draw.choice(plan["shardings"])
    return found


def _ops_swapped(draw: random.Random, plan: Loose, name: str) -> None:
    ops = _one(draw, plan)["ops"]
    a, b = draw.choice(list(ops)), draw.choice(list(ops))
    ops[a], ops[b] = ops[b], ops[a]


def _op_chosen(draw: random.Random, plan: Loose, name: str) -> None:
    """Another choice that is legal for this op, if not with its neighbours."""
    own = _one(draw, plan)
    mesh = tuple(own["mesh"])
    options = all_strategies(traced(name).programs[own["kind"]], mesh)
    for node in draw.sample(list(options), min(len(options), draw.choice((1, 1, 2, 5)))):
        own["ops"][node.name] = draw.choice(combine(node, options[node], mesh)).text


def _forms_swapped(draw: random.Random, plan: Loose, name: str) -> None:
    forms = _one(draw, plan)["forms"]
    a, b = draw.choice(list(forms)), draw.choice(list(forms))
    forms[a], forms[b] = forms[b], forms[a]


def _form_set(draw: random.Random, plan: Loose, name: str) -> None:
    forms = _one(draw, plan)["forms"]
    forms[draw.choice(list(forms))] = draw.choice(FORMS)


def _form_set_everywhere(draw: random.Random, plan: Loose, name: str) -> None:
    slot, text = draw.choice(list(_one(draw, plan)["forms"])), draw.choice(FORMS[:4])
    for own in plan["shardings"]:
        if slot in own["forms"]:
            own["forms"][slot] = text


def _key_dropped(draw: random.Random, plan: Loose, name: str) -> None:
    room = _one(draw, plan)[draw.choice(("ops", "forms"))]
    del room[draw.choice(list(room))]


def _key_added(draw: random.Random, plan: Loose, name: str) -> None:
    room = _one(draw, plan)[draw.choice(("ops", "forms"))]
    room[draw.choice(list(room)) + draw.choice(("x", ".form", "_1"))] = draw.choice(FORMS)


def _mesh_changed(draw: random.Random, plan: Loose, name: str) -> None:
    mesh = draw.choice(([2, 1], [1, 2], [4], [2, 2], [], [1], [0], [-2], [2]))
    if draw.random() < 0.5:
        for stage in plan["replicas"][0]["stages"]:
            stage["mesh"] = mesh
    for own in plan["shardings"] if draw.random() < 0.5 else [_one(draw, plan)]:
        own["mesh"] = mesh


def _numbers_changed(draw: random.Random, plan: Loose, name: str) -> None:
    numbers = draw.choice(plan["replicas"][0]["stages"])["shardings"]
    for _ in range(draw.choice((1, 1, 3))):
        numbers[draw.randrange(len(numbers))] = draw.randint(-2, len(plan["shardings"]))
    if draw.random() < 0.2:
        numbers.append(0)


def _all_whole(draw: random.Random, plan: Loose, name: str) -> None:
    for stage in plan["replicas"][0]["stages"]:
        numbers = stage["shardings"]
        stage["shardings"] = draw.choice((None, [-1] * len(numbers)))


def _kind_changed(draw: random.Random, plan: Loose, name: str) -> None:
    _one(draw, plan)["kind"] = draw.choice([own["kind"] for own in plan["shardings"]] + ["kind99"])


def _swapped(draw: random.Random, plan: Loose, name: str) -> None:
    a, b = _one(draw, plan), _one(draw, plan)
    room = draw.choice(("ops", "forms"))
    a[room], b[room] = b[room], a[room]


def _nudged(draw: random.Random, plan: Loose, name: str) -> None:
    own = _one(draw, plan)
    own[draw.choice(("cost_s", "kept_bytes"))] = draw.choice((0, 1, -1, 2**70, 0.5, "1", None))


EDITS: tuple[Callable[[random.Random, Loose, str], None], ...] = (
    _ops_swapped, _op_chosen, _op_chosen, _forms_swapped, _form_set, _form_set_everywhere,
    _key_dropped, _key_added, _mesh_changed, _numbers_changed, _numbers_changed, _all_whole,
    _kind_changed, _swapped, _nudged,
)


def tried(seed: int, folder: Path) -> tuple[str, str]:
    """(right, refused, wrong or raw, what happened) of one edit."""
    draw = random.Random(seed)
    name, which = NAMES[seed % len(NAMES)], draw.randrange(len(DEGREES))
    plan = copy.deepcopy(plan_of(name, which))
    edits = draw.choices(EDITS, k=draw.choice((1, 1, 1, 2)))
    about = f"{seed} {name} {DEGREES[which]} {[edit.__name__ for edit in edits]}"
    for edit in edits:
        with contextlib.suppress(IndexError, TypeError, KeyError):  # of what is not there any more
            edit(draw, plan, name)
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    try:
        with traced_before(name):
            model = ap.parallelize(zoo.build(name), zoo.batch(name, ROWS), plan=path)
        found = losses(model, name)
    except AutoparError as error:
        return "refused", f"{about}: {type(error).__name__}: {error.what}"
    except Exception as error:
        return "raw", f"{about}: {type(error).__name__}: {error}"
    off = max(abs(a - b) / abs(b) for a, b in zip(found, expected(name), strict=True))
    return ("right" if off <= 1e-5 else "wrong"), f"{about}: {off:.1e}"


def wrong_programs() -> str:
    """What is said where lowering adds a bias on every rank instead of once."""
    plan = ap.parallelize(
        zoo.build("gpt2"), zoo.batch("gpt2", ROWS), plan=ap.Plan.uniform(tp=2)
    ).plan
    kept = Lowering._summed
    Lowering._summed = lambda self, choice: 1  # type: ignore[method-assign]
    try:
        ap.parallelize(zoo.build("gpt2"), zoo.batch("gpt2", ROWS), plan=plan)
    except ShardingError as error:
        return error.what
    finally:
        Lowering._summed = kept  # type: ignore[method-assign]
    return ""


def try_edits(seeds: list[int]) -> dict[str, Any]:
    """On every rank: counts, and what is not as it should be."""
    world.start()
    torch.set_num_threads(1)
    logging.disable()
    counts: Counter[str] = Counter()
    bad, slowest = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            start = time.perf_counter()
            verdict, about = tried(seed, Path(folder))
            slowest = max(slowest, time.perf_counter() - start)
            counts[verdict] += 1
            bad += [about] if verdict in ("raw", "wrong") else []
    return {"counts": dict(counts), "bad": bad, "slowest_s": round(slowest, 1),
            "caught": wrong_programs()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    seeds = list(range(options.first, options.first + options.count))
    for rank, result in enumerate(run_ranks(2, "edits:try_edits", seeds, timeout_s=7200)):
        print(f"rank {rank}: {result['counts']}, slowest {result['slowest_s']} s")
        print("\n".join(result["bad"]))

"""Machines that change while a model trains: what is seen of them, the plan then, and the move."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

import autopar_torch as ap
import zoo
from autopar_torch import api, files
from autopar_torch.cluster import Cluster, Device, Link
from autopar_torch.find import following
from autopar_torch.find.changed import changed
from autopar_torch.find.replan import Asking, Priced, Question, answered, name_of
from autopar_torch.measure.factors import Factors, Look, compared
from autopar_torch.profile import Curve
from autopar_torch.run import optimizers
from autopar_torch.run.pace import NETWORK, Slowed
from autopar_torch.search.unequal import fastest
from autopar_torch.simulate.network import lookup
from problems import problem, unequal
from ranks import run_ranks

THREE = ("a", "a", "b", "c")  # nodes of ranks
USUAL = Look((0.1,) * 4, (1e-3, 1e-3, 1e-3), 0.2)  # of a and b, a and c, b and c
SAME = Factors((1.0,) * 4, (1.0,) * 3)


@pytest.mark.parametrize(("now", "left"), [
    (Look((0.1, 0.1, 0.3, 0.1), USUAL.sending_s, 0.2), Factors((1, 1, 0.35, 1), (1, 1, 1))),
    (Look((0.1,) * 4, (1e-2, 1e-3, 1e-2), 0.2), Factors((1,) * 4, (1, 0.1, 1))),
    (Look((0.1,) * 4, (1e-2, 1e-2, 1e-2), 0.2), Factors((1,) * 4, (0.1, 0.1, 0.1))),
    (Look((0.2,) * 4, (2e-3, 2e-3, 2e-3), 0.2), SAME),  # other work, everywhere
    (Look((0.105, 0.1, 0.1, 0.095), (1.1e-3, 1e-3, 9e-4), 0.2), SAME),
    (Look((0.05,) * 4, (5e-4,) * 3, 0.2), SAME),
])
def test_a_look_tells_who_is_slower_and_which_link(now: Look, left: Factors) -> None:
    assert compared(THREE, USUAL, now, SAME) == left
    assert compared(THREE, USUAL, now, left) == left  # and again
    assert compared(THREE, USUAL, USUAL, left) == SAME  # and back


def test_what_is_as_usual_keeps_its_profile() -> None:
    given = problem(3)
    profile, cluster = given.profile.profile, given.profile.profile.cluster
    same = Factors((1.0,) * cluster.num_devices, (1.0,) * len(cluster.nodes))
    assert changed(profile, given.options, given.graph, 8, given.limits, same) is profile


def two(curves: tuple[Curve, ...] = ()) -> tuple[Question, Factors]:
    """A problem on two nodes of one device, and the factors under which nothing changes."""
    given = problem(0)
    cluster = Cluster(((Device("d", 1e9, 1e9, 10**9),),) * 2, Link(1e-4, 1e8), Link(1e-3, 1e7))
    profile = replace(given.profile.profile, cluster=cluster, curves=curves)
    same = Factors((1.0, 1.0), (1.0, 1.0))
    plan = ap.Plan.uniform(dp=2)
    best = fastest(given.graph, given.options, lookup(profile), 8, given.limits).plan
    return Question(given.graph, tuple(given.options), profile, 8, given.limits, same,
                    (best or plan,), 12.0), same


def test_computing_is_scaled_by_what_is_left_of_a_rank() -> None:
    asked, _ = two()
    now = Factors((1.0, 0.5), (1.0, 1.0))
    found = changed(asked.profile, asked.options, asked.graph, 8, asked.limits, now)
    assert found.cluster.class_of == (0, 1)
    old, new = lookup(asked.profile), lookup(found)
    for (kind, sharding, device), cell in new.costs.items():
        before = old.costs[kind, sharding, 0].pieces[0]
        assert cell.pieces[0].forward_s == pytest.approx(before.forward_s * (1 + device))
        assert cell.pieces[0].comm_forward_s == before.comm_forward_s
        assert cell.pieces[0].kept_bytes == before.kept_bytes


def test_of_a_slow_link_latency_stays_and_bandwidth_goes() -> None:
    points = ((8.0, 1e-3), (1e6, 0.101))
    asked, _ = two(tuple(Curve(op, "1+1 on 2", points) for op in ("sum", "scatter", "gather",
                                                                 "send")))
    found = changed(asked.profile, asked.options, asked.graph, 8, asked.limits,
                    Factors((1.0, 1.0), (0.1, 0.1)))
    assert found.curves and all(curve.group == "1+1 on 2" for curve in found.curves)
    for curve in found.curves:
        assert curve.seconds(8) == pytest.approx(1e-3)
        assert curve.seconds(1e6) == pytest.approx(1.001)


@pytest.mark.parametrize("now", [Factors((1.0, 0.3), (1.0, 1.0)), Factors((1.0, 1.0), (0.05,) * 2)])
def test_the_plan_for_changed_machines_is_that_of_a_search_on_them(now: Factors) -> None:
    asked, _ = two()
    asked = replace(asked, now=now)
    found = answered(asked)
    assert name_of(found[0].plan) == name_of(asked.plans[0]) and found[0].move_s == 0.0
    profile = changed(asked.profile, asked.options, asked.graph, 8, asked.limits, now)
    best = fastest(asked.graph, asked.options, lookup(profile), 8, asked.limits)
    assert min(own.step_s for own in found) <= best.step_s * (1 + 1e-9)


def test_links_of_one_node_make_zones() -> None:
    given = unequal(5)
    cluster = given.profile.profile.cluster
    links = tuple(0.2 if n == 0 else 1.0 for n in range(len(cluster.nodes)))
    now = Factors((1.0,) * cluster.num_devices, links)
    found = changed(given.profile.profile, given.options, given.graph, 4, given.limits, now)
    ends = (0, cluster.num_devices - 1)
    assert found.cluster.link(ends).bytes_per_s == cluster.across.bytes_per_s * 0.2
    assert fastest(given.graph, given.options, lookup(found), 4, given.limits).choices


def test_a_process_of_its_own_answers_as_this_one() -> None:
    asked, _ = two()
    question = Asking(asked)
    question._thread.join(60)
    assert question.answer is not None, question.failed
    want = files.decode(files.encode(answered(asked)), list[Priced])
    assert [own.plan for own in question.answer] == [own.plan for own in want]
    broken = Asking(files.decode(b"{}", dict))  # type: ignore[arg-type]
    broken._thread.join(60)
    assert broken.answer is None and "Question" in broken.failed


def test_a_closure_is_within_a_step_of_its_optimizer() -> None:
    optimizers.attend()
    model, seen = torch.nn.Linear(2, 1), list[bool]()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        seen.append(optimizers.stepping(model))
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seen and all(seen) and not optimizers.stepping(model)
    assert optimizers.num_steps(model) == 1


# --- ranks --------------------------------------------------------------------------------------

CHANGES = {20: (0.05, 1.0), 60: (1.0, 1.0)}  # step -> what is left of the links, and of rank 1


def followed(steps: int, changes: str) -> tuple[list[str], list[float], list[str]]:
    """Plans and losses of a run whose machines seem to change, and what it has told of that. Two
    nodes by name only."""
    torch.set_num_threads(1)
    rank, batch = int(os.environ["RANK"]), zoo.batch("nanogpt", 8)
    model = ap.parallelize(zoo.build("nanogpt", 0), batch, plan=ap.Plan.uniform(dp=2),
                           changes="off" if changes == "follow" else "tell")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if changes == "follow":
        pretend(model, batch)
    plans, losses = [], []
    for step in range(steps):
        if step in CHANGES and changes == "follow":
            SEEN[0] = CHANGES[step]
            if rank == 0:
                model.between.suspect = Slowed(NETWORK, 3.0, step, 0.1)  # type: ignore[attr-defined]
        out = model(**batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        replanning = getattr(model.between, "replanning", None)
        if replanning and replanning.asking:
            replanning.asking._thread.join(60)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        plans.append(model.plan.describe(2))
    if folder := os.environ.get("KEEP_REPORT"):
        model.report(f"{folder}/{changes}.html", **batch)
    return plans, losses, [text for _, text in getattr(model.between, "told", ())]


SEEN = [(1.0, 1.0)]


def pretend(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Follow machines by a datasheet of two slow nodes, and see what `SEEN` says."""
    def seen(nodes: Sequence[str], *rest: object) -> Look:
        link, speed = SEEN[0]
        return Look((0.1, 0.1 / speed), (1e-3 / link,), 1e4)

    following.REBUILD_S = 0.01
    moved = following.Replanning.moved  # what a move takes does not hang on the clock here
    following.Replanning.moved = (  # type: ignore[method-assign]
        lambda self, name, seconds, refused: moved(self, name, 0.01, refused))
    following.look = seen  # type: ignore[assignment]
    following.detect.here = lambda: Here(os.environ["RANK"])  # type: ignore[assignment]
    cluster = Cluster(((Device("d", 2e9, 1e9, 2**33),),) * 2, Link(1e-4, 1e9), Link(1e-4, 2e8))
    case = api.case(zoo.build("nanogpt", 0), batch, cluster)
    model.pace = model.recorder = following.Stopwatch(model.world)  # type: ignore
    model.between = following.Following(model, model.pace, case)  # type: ignore
    model.between.usual = seen(())  # type: ignore


class Here:
    def __init__(self, node: str) -> None:
        self.node = node


@pytest.mark.slow
def test_a_run_moves_when_a_link_falls_and_back_when_it_returns() -> None:
    (plans, losses, told), _ = run_ranks(2, "test_following:followed", 120, "follow")
    kept, want, nothing = run_ranks(2, "test_following:followed", 120, "tell")[0]
    distinct = [plan for k, plan in enumerate(plans) if not k or plan != plans[k - 1]]
    assert [plan[0] for plan in distinct] == ["2", "1", "2"]  # replicas
    assert 20 < plans.index(distinct[1]) < 60 < plans.index(distinct[2])
    assert len(set(kept)) == 1 and not nothing
    assert [text.split()[0] for text in told if text.startswith("moved")] == ["moved"] * 2
    assert any("the link of node" in text for text in told)
    torch.testing.assert_close(losses, want, rtol=0, atol=1e-5)

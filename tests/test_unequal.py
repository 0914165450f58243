"""Devices that differ: the search finds what brute force finds, and more of them never harm."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st

import zoo
from autopar_torch import api
from autopar_torch.cluster import Cluster, Device, Link
from autopar_torch.errors import SearchError
from autopar_torch.find.probes import probes
from autopar_torch.plan import BUCKET_BYTES, Plan
from autopar_torch.profile import Curve, Lookup, Profile
from autopar_torch.search.best import search
from autopar_torch.search.explain import short, summary
from autopar_torch.search.judging import Judge
from autopar_torch.search.least import Possible
from autopar_torch.search.shapes import (
    Group,
    Lineup,
    Sharing,
    as_unequal_plan,
    groups_of,
    placed,
)
from autopar_torch.search.space import SAFETY, Constraints, candidates, divisors
from autopar_torch.search.unequal import fastest, search_unequal
from autopar_torch.simulate import simulate
from autopar_torch.simulate.network import lookup
from autopar_torch.simulate.to_measure import needs_of
from autopar_torch.units import ranges
from problems import Problem, problem, unequal
from slow import slowly

SOME = settings(deadline=None, max_examples=12)
MANY = settings(deadline=None, max_examples=300)
seeds = st.integers(0, 10**6)


def parted(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to part items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], list(items[1:])
    for parts in parted(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def shapes(problem: Problem) -> Iterator[tuple[Lineup, ...]]:
    """By devices, not by classes: sets of devices, in groups, in order, in replicas."""
    cluster, degrees = problem.profile.profile.cluster, {o.degree: k for k, o in
                                                          enumerate(problem.options)}
    world = range(cluster.num_devices)
    for used in itertools.chain.from_iterable(
            itertools.combinations(world, n) for n in range(1, len(world) + 1)):
        for groups in parted(used):
            alike = all(len({cluster.class_of[r] for r in group}) == 1 for group in groups)
            if not alike or any(len(group) not in degrees for group in groups):
                continue
            for replicas in parted(range(len(groups))):
                orders = [list(itertools.permutations(replica)) for replica in replicas]
                for order in itertools.product(*orders):
                    yield tuple(sorted(tuple(
                        Group(cluster.class_of[groups[g][0]], degrees[len(groups[g])],
                              len(groups[g])) for g in one) for one in order))


def sharings(count: int, num_rows: int) -> Iterator[Sharing]:
    """Equal micro-batches in any numbers, or equal numbers of micro-batches of any rows."""
    for total in divisors(num_rows):
        for numbers in itertools.product(range(1, total + 1), repeat=count):
            if sum(numbers) == total:
                yield Sharing(numbers, (num_rows // total,) * count)
        for rows in itertools.product(range(1, num_rows + 1), repeat=count):
            if len(set(rows)) > 1 and sum(rows) * total == num_rows:
                yield Sharing((total,) * count, rows)


def every_plan(problem: Problem) -> Iterator[Plan]:
    blocks, limits = len(problem.graph.blocks), problem.limits
    for shape in dict.fromkeys(shapes(problem)):
        places = placed(shape, problem.profile.profile.cluster)  # where each lies is not searched
        if places is None or len(shape) > problem.num_rows or max(map(len, shape)) > blocks:
            continue
        cuts = [[(0, *inner, blocks)
                 for inner in itertools.combinations(range(1, blocks), len(one) - 1)]
                for one in shape]
        zeros = [z for z in ((0, 1, 2, 3) if len(shape) > 1 else (0,)) if limits.zero in (None, z)]
        for sharing in sharings(len(shape), problem.num_rows):
            names = ["1f1b", "gpipe", "zero_bubble"][:3 if max(map(len, shape)) > 1 else 1]
            for cut, zero, name in itertools.product(itertools.product(*cuts), zeros, names):
                yield as_unequal_plan(shape, places, cut, sharing, problem.options, limits,
                                      name, zero, BUCKET_BYTES)  # type: ignore[arg-type]


def priced(problem: Problem, plan: Plan) -> float:
    """By the engine; infinite where it does not fit. What does not fit may recompute."""
    profile: Profile = problem.profile.profile
    timeline = simulate(plan, problem.graph, profile, problem.num_rows)
    devices = profile.cluster.devices
    over = {rank for rank in plan.devices
            if timeline.memory[rank].peak_bytes * SAFETY > devices[rank].memory_bytes}
    again = tuple(msgspec.structs.replace(r, stages=tuple(
        msgspec.structs.replace(s, recompute=s.recompute or bool(over & {*s.devices}))
        for s in r.stages)) for r in plan.replicas)
    if not over:
        return timeline.step_s
    changed = msgspec.structs.replace(plan, replicas=again)
    return priced(problem, changed) if changed != plan else float("inf")


def brute_force_s(problem: Problem) -> float:
    """The best of all unequal plans, and of all equal replicas on every set of classes."""
    cluster, found = problem.profile.profile.cluster, [float("inf")]
    found += [priced(problem, plan) for plan in every_plan(problem)]
    classes = range(len(cluster.classes))
    for chosen in itertools.chain.from_iterable(
            itertools.combinations(classes, n) for n in range(1, len(classes) + 1)):
        devices = [rank for rank, k in enumerate(cluster.class_of) if k in chosen]
        try:
            even = search(*problem[:4], problem.limits, exhaustive=True, kept=10**6,
                          devices=devices)
        except SearchError:
            continue
        found += [priced(problem, choice.plan) for choice in even.choices]
    return min(found)


def found_s(problem: Problem) -> float:
    try:
        return search_unequal(*problem[:4], problem.limits).step_s
    except SearchError:
        return float("inf")


def same_as_brute_force(seed: int, most: int, of: tuple[int, ...] = ()) -> None:
    given = unequal(seed, most, of=of)
    blocks = given.graph.blocks[:4]
    zero = seed % 4 if len(given.profile.profile.cluster.devices) > 2 else None
    if len(blocks) == len(given.graph.blocks):
        limits = msgspec.structs.replace(given.limits, zero=zero)
        small = given._replace(limits=limits)
        want, got = brute_force_s(small), found_s(small)
        assert got <= want * (1 + 1e-9)


@given(seeds)
@SOME
def test_the_search_finds_what_brute_force_finds_on_devices_that_differ(seed: int) -> None:
    same_as_brute_force(seed, 2)


@pytest.mark.slow
@given(seeds, st.sampled_from([(2, 2), (1, 3)]))
@settings(deadline=None, max_examples=5)
def test_the_search_finds_what_brute_force_finds_on_four_devices_of_two_classes(
        seed: int, of: tuple[int, ...]) -> None:
    same_as_brute_force(seed, 4, of)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(seeds)
@MANY
def test_the_search_finds_what_brute_force_finds_on_many_problems(seed: int) -> None:
    same_as_brute_force(seed, 3)


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_no_plan_of_unequal_devices_is_below_the_bound_by_which_gaps_are_told(seed: int) -> None:
    given = unequal(seed, 2, by_kind=True)
    if len(given.graph.blocks) <= 4:
        judge = Judge(*given, kept=1, many=True)
        groups = groups_of(judge.cluster, judge.options, judge.limits, judge.measured)
        best_s = min((priced(given, plan) for plan in every_plan(given)), default=float("inf"))
        assert Possible(judge, groups).least_s(1.5 * best_s) <= best_s * (1 + 1e-9)


def curves(plans: Sequence[Plan], given: Problem) -> set[Curve]:
    """What measuring would find of all that these plans exchange."""
    cluster, found = given.profile.profile.cluster, set()
    for need in needs_of(plans, given.graph, cluster, given.num_rows)[1]:
        seconds = given.profile.curve(need.op, need.ranks).seconds
        points = tuple((size, seconds(size)) for size in (8.0, 1e4, 1e6))
        found.add(Curve(need.op, cluster.place(need.ranks), points))
    return found


@pytest.mark.parametrize("seed", [0, 10])
def test_six_measured_devices_get_unequal_work_by_curves_that_their_plan_was_asked_for(
        seed: int) -> None:
    given = unequal(seed, of=(3, 3))._replace(num_rows=12)
    graph, options, true, rows, limits = given
    even = list(candidates(options, graph, 6, rows, limits))
    known = curves(probes(even, options, len(graph.blocks)), given)
    for _ in range(4):
        profile = msgspec.structs.replace(true.profile, assumed=False, curves=tuple(known))
        found = fastest(graph, options, lookup(profile), rows, limits)
        more = curves([found.plan], given)
        if more <= known:
            break
        known |= more
    measured = simulate(found.plan, graph, Lookup(profile), rows)  # nothing is derived
    assert measured.step_s == pytest.approx(found.step_s)
    assert found.step_s < 0.75 * search(graph, options, true, rows, limits).step_s


def with_one_more(given: Problem, draw: random.Random) -> Problem:
    """The same with another device of some class, on its node."""
    cluster = given.profile.profile.cluster
    node = draw.randrange(len(cluster.nodes))
    nodes = tuple((*own, own[0]) if k == node else own for k, own in enumerate(cluster.nodes))
    larger = msgspec.structs.replace(cluster, nodes=nodes)
    profile = msgspec.structs.replace(given.profile.profile, cluster=larger)
    return given._replace(profile=lookup(profile))


def loss_s(given: Problem) -> float:
    """Everyone gets the loss, also who idles."""
    return given.profile.curve("sum", range(given.profile.profile.cluster.num_devices)).seconds(4.0)


def never_slower_with_one_more(seed: int, most: int) -> None:
    small = unequal(seed, most)
    large = with_one_more(small, random.Random(seed))
    assert found_s(large) <= (found_s(small) + loss_s(large) - loss_s(small)) * (1 + 1e-9)


@given(seeds)
@settings(deadline=None, max_examples=5)
def test_one_more_device_never_makes_a_step_longer(seed: int) -> None:
    never_slower_with_one_more(seed, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(seeds)
@settings(deadline=None, max_examples=200)
def test_one_more_device_never_makes_a_step_longer_in_many_cases(seed: int) -> None:
    never_slower_with_one_more(seed, 3)


@pytest.mark.slow
def test_the_search_leaves_out_devices_that_only_slow_it_down() -> None:
    """Eight quick devices beside eight or two slow ones: the seconds are those of eight."""
    with torch.device("meta"):
        model = zoo.NanoGPT(512, 2048, 8, 16, 512)
    batch = {name: torch.empty(16, 512, dtype=torch.int64, device="meta")
             for name in ("idx", "targets")}
    found = {name: api.plan(model, batch, name, precision="bfloat16").step_s
             for name in ("8xH100", "8xH100 + 8xV100-32", "8xH100 + 2xV100-32")}
    assert max(found.values()) <= found["8xH100"] * (1 + 1e-9), found


@pytest.mark.parametrize("pins", [
    {"pp": 2}, *slowly({"dp": 8}, {"num_micro_batches": 2}, {"tp": 2})])
def test_pins_hold_on_many_devices_that_differ(pins: dict[str, int]) -> None:
    with torch.device("meta"):
        model = zoo.NanoGPT(512, 2048, 8, 16, 512)
    batch = {name: torch.empty(32, 512, dtype=torch.int64, device="meta")
             for name in ("idx", "targets")}
    plan = api.plan(model, batch, "8xH100 + 8xA100-80", precision="bfloat16",
                    constraints=pins).plan
    for replica in plan.replicas:
        own = {"pp": len(replica.stages), "dp": len(plan.replicas),
               "num_micro_batches": replica.num_micro_batches,
               "tp": len(replica.stages[0].devices)}
        assert pins.items() <= own.items()


def mixed_plan(draw: random.Random, given: Problem) -> tuple[Plan, Profile, int] | None:
    """Several replicas of each of two shapes, on twelve devices of two classes."""
    kinds = [Device(f"d{k}", 1e9, 1e9, 10**9) for k in range(2)]
    cluster = Cluster(((kinds[0],) * 4, (kinds[1],) * 4, (kinds[0],) * 4), Link(1e-4, 1e7),
                      Link(1e-3, 1e6))
    cells = tuple(msgspec.structs.replace(cell, device=k) for k in range(2)
                  for cell in given.profile.profile.cells)
    profile = msgspec.structs.replace(given.profile.profile, cluster=cluster, cells=cells,
                                      curves=())
    groups = [Group(k, o, option.degree) for k in range(2)
              for o, option in enumerate(given.options)]
    lines = [(draw.choice(groups),) * draw.choice([1, 2]) for _ in range(draw.choice([1, 2]))]
    shape = tuple(line for line in lines for _ in range(draw.choice([1, 2, 3])))
    places, blocks = placed(shape, cluster), len(given.graph.blocks)
    if places is None:
        return None
    cuts = [[blocks * p // len(line) for p in range(len(line) + 1)] for line in shape]
    numbers = tuple(draw.choice([1, 2]) for _ in shape)
    plan = as_unequal_plan(shape, places, cuts, Sharing(numbers, (2,) * len(shape)), given.options,
                           Constraints(), "1f1b", draw.randrange(4) if len(shape) > 1 else 0,
                           BUCKET_BYTES)
    return plan, profile, 2 * sum(numbers)


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_one_replica_of_each_shape_stands_for_the_others(seed: int) -> None:
    given = problem(seed)
    if found := mixed_plan(random.Random(seed), given):
        plan, profile, rows = found
        short = simulate(plan, given.graph, profile, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["autopar_torch.simulate"], "representatives",
                          lambda *_: {rank: rank for rank in range(12)})
            whole = simulate(plan, given.graph, profile, rows)
        assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
        pairs = zip(short.memory, whole.memory, strict=True)
        assert all(a.peak_bytes >= b.peak_bytes for a, b in pairs)


def test_a_batch_of_fewer_rows_than_devices_leaves_some_idle_or_says_why_no_plan_fits() -> None:
    model, batch = zoo.build("nanogpt"), zoo.batch("nanogpt", 2)
    found = api.plan(model, batch, "5x8xH100 + 4x8xT4", global_batch_size=1)
    assert len(found.plan.devices) < 72 == found.num_devices
    with pytest.raises(SearchError, match=r"fits into 10\.0 KiB per device"):
        api.plan(model, batch, "5x8xH100 + 4x8xT4", global_batch_size=1,
                 constraints={"memory_bytes": 10 * 2**10})


def test_a_plan_in_words_says_which_devices_idle() -> None:
    found = search_unequal(*unequal(3, 3)[:4])
    words = summary(found).splitlines()[0]
    idle = found.plan.idle(found.num_devices)
    assert (f", device(s) {ranges(idle)} idle" in words) == bool(idle)
    others = sorted(set(range(99)) - set(found.plan.devices))
    assert short(found.plan, 99).endswith(f", device(s) {ranges(others)} idle")


def test_devices_are_named_as_ranges_and_of_many_the_first_and_the_last() -> None:
    assert (ranges([]), ranges([3]), ranges([0, 1, 2, 5, 8, 9])) == ("", "3", "0-2, 5, 8-9")
    assert ranges(range(0, 1024, 2)) == "0, 2, 4, 6, 8, 10, 12, ..., 1022"

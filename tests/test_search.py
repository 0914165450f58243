"""The search finds what brute force finds, its bounds are bounds, its price is the engine's."""

from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from autopar_torch import files
from autopar_torch.errors import SearchError
from autopar_torch.plan import BUCKET_BYTES, Plan
from autopar_torch.profile import Curve, Lookup
from autopar_torch.schedule import Action, Op, build
from autopar_torch.search.best import Choice, Result, search, varied
from autopar_torch.search.borders import Once, ramped, smallest_bottleneck
from autopar_torch.search.bounds import Bounded
from autopar_torch.search.cut_bounds import lower_bounds
from autopar_torch.search.evaluate import Pricer
from autopar_torch.search.reasons import Case, against, candidate_of, time_parts, why
from autopar_torch.search.space import Candidate, Constraints, as_plan, candidates
from autopar_torch.search.tables import Tables
from autopar_torch.simulate import fluid, simulate
from autopar_torch.simulate.costs import Costs
from autopar_torch.simulate.memory import peaks
from autopar_torch.simulate.network import lookup
from autopar_torch.simulate.walk import Pipeline, walk
from lists import ends_of
from problems import Problem, problem, unshared
from slow import slowly

UNTIMED = settings(deadline=None, max_examples=100)
LONG = settings(deadline=None, max_examples=500)
seeds = st.integers(0, 10**6)


def solved(given: Problem, exhaustive: bool = False) -> Result | None:
    try:
        return search(*given[:4], given.limits, exhaustive=exhaustive)
    except SearchError:
        return None


def every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, blocks), stages - 1)
    return [(0, *borders, blocks) for borders in inner]


def same_as_brute_force(seed: int) -> None:
    given = problem(seed)
    quick, slow = solved(given), solved(given, exhaustive=True)
    assert (quick is None) == (slow is None)
    if quick and slow:
        assert quick.choices == slow.choices


@given(seeds)
@settings(UNTIMED, max_examples=20)
def test_best_first_finds_the_plans_of_brute_force(seed: int) -> None:
    same_as_brute_force(seed)


@pytest.mark.slow
@given(seeds)
@LONG
def test_best_first_finds_the_plans_of_brute_force_on_many_problems(seed: int) -> None:
    same_as_brute_force(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_best_first_finds_the_plans_of_brute_force_on_measured_machines() -> None:
    """Measures ranks on this machine; the command also prints what was compared."""
    scripts = str(Path(__file__).resolve().parent.parent / "profiling")
    command = [sys.executable, scripts, "search", "--measured", "--models=gpt", "--seconds=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results equal" in done.stdout


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_no_cut_is_below_its_bounds(seed: int) -> None:
    graph, options, profile, num_rows, limits = problem(seed)
    tables = Tables(options, graph, profile, limits.precision)
    found = candidates(options, graph, tables.cluster.num_devices, num_rows, limits)
    below = Bounded(found, tables, num_rows, np.inf)
    below.possible(np.arange(len(found)))
    for i in random.Random(seed).sample(range(len(found)), min(20, len(found))):
        pricer = Pricer(tables, found[i], num_rows)
        blocks = len(graph.blocks)
        cuts = every_cut(blocks, found[i].stages())
        for cut, lower_bound in zip(cuts, lower_bounds(pricer, cuts), strict=True):
            price = pricer.price(cut)
            assert below.seconds[i] <= price.step_s * (1 + 1e-9)
            assert lower_bound <= price.step_s * (1 + 1e-9)
            assert below.memory_bytes[i] <= price.memory_bytes * (1 + 1e-9)
            fits = Bounded(found[i : i + 1], tables, num_rows, price.memory_bytes * (1 + 1e-9))
            assert len(fits.possible(np.arange(1)))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=9), st.integers(1, 5), seeds)
@UNTIMED
def test_smallest_bottleneck_is_that_of_all_cuts(
    seconds: list[float], stages: int, seed: int
) -> None:
    stages = min(stages, len(seconds))
    room = random.Random(seed).choice([2, 3, 99])

    def fits(stage: int, first: int, end: int) -> bool:
        return end - first <= room + (stage % 2)

    def slowest(cut: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(cut))

    fitting = [cut for cut in every_cut(len(seconds), stages)
               if all(fits(s, *ab) for s, ab in enumerate(itertools.pairwise(cut)))]
    free = smallest_bottleneck(np.array(seconds), stages)
    assert free
    assert slowest(free) == pytest.approx(min(map(slowest, every_cut(len(seconds), stages))))
    found = smallest_bottleneck(np.array(seconds), stages, fits, slowest(free))
    assert found == smallest_bottleneck(np.array(seconds), stages, fits)
    assert (found is None) == (not fitting)
    if found:
        assert found in fitting
        assert slowest(found) == pytest.approx(min(map(slowest, fitting)))


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=2, max_size=9),
       st.integers(1, 5), st.floats(0, 3))
@example([(0.5, 1.0), (0.5, 0.5), (1.0, 4.0), (1.0, 1.0), (1.0, 1.0)], 4, 1.0)
@UNTIMED
def test_no_cut_has_a_single_micro_batch_done_sooner_than_the_ramped_one(
        blocks: list[tuple[float, float]], stages: int, message: float) -> None:
    stages, once = min(stages, len(blocks)), Once(*np.array(blocks).T)
    back = [message * stage for stage in range(stages)]

    def late(cut: tuple[int, ...]) -> float:
        return max(once.weight[a:b].sum() - once.input[:a].sum() - back[stage]
                   for stage, (a, b) in enumerate(itertools.pairwise(cut)))

    least, found = ramped(once, stages, back)
    assert late(found) == pytest.approx(min(map(late, every_cut(len(blocks), stages))), abs=1e-6)
    assert least == pytest.approx(max(0.0, late(found)), abs=1e-6)


PIPELINES = [("1f1b", 1, 1), ("1f1b", 2, 1), ("gpipe", 2, 1), ("zero_bubble", 2, 1),
             ("interleaved", 2, 2), ("interleaved", 2, 3)]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("schedule", "pp", "virtual"), PIPELINES)
def test_where_nothing_is_shared_a_plan_has_the_price_of_the_engine(
    schedule: str, pp: int, virtual: int, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the precision, the cuts and the buckets, with and without recompute."""
    small = random.Random(f"{schedule}{virtual}{zero}").choice([30_000, 10**6])
    monkeypatch.setattr(Tables, "bucket_bytes", lambda *_: small)
    stages = pp * virtual
    even_and_not = [tuple(7 * s // stages for s in range(stages + 1)), (*range(stages), 7)]
    for option, dp in ((0, 4 // pp), (1, 2 // pp)):
        graph, options, profile = unshared(10 * zero + option)
        choices = itertools.product(("float32", "bfloat16"), (False, True), even_and_not,
                                    (1, 2, 6) if schedule == "gpipe" or pp == 1 else (2, 6))
        for precision, again, cut, count in choices:
            own = Candidate(option, pp, dp, count, schedule, virtual, zero if dp > 1 else 0, again)
            pricer = Pricer(Tables(options, graph, profile, precision), own, 2 * dp * count)
            plan = as_plan(own, cut, options, precision, bucket_bytes=small)
            step_s = simulate(plan, graph, profile.profile, 2 * dp * count).step_s
            assert pricer.price(cut).step_s == pytest.approx(step_s, rel=1e-9), own


# What the memory of the search is below and above the engine's at most, until it is the engine's.
APART = {"1f1b": (0.09, 0.02), "gpipe": (0.18, 0.21), "zero_bubble": (0.04, 0.18),
         "interleaved": (0.15, 0.43)}


@pytest.mark.parametrize("zero", [0, 3, *slowly(1, 2)])
@pytest.mark.parametrize(("schedule", "pp", "virtual"), [*PIPELINES, ("1f1b", 4, 1)])
def test_memory_is_that_of_the_engine_but_for_9_percent_in_1f1b_and_43_elsewhere(
    schedule: str, pp: int, virtual: int, zero: int
) -> None:
    """Whatever the precision, the cuts and the rows, with and without recompute."""
    stages, (less, more) = pp * virtual, APART[schedule]
    cuts = [tuple(7 * s // stages for s in range(stages + 1)), (*range(stages), 7)]
    for option, dp in ((0, 4 // pp), *([(1, 2 // pp)] if pp <= 2 else [])):
        graph, options, profile = unshared(10 * zero + option)
        choices = itertools.product(("float32", "bfloat16"), (False, True), cuts,
                                    (1, 2, 16) if schedule == "gpipe" or pp == 1 else (4, 16),
                                    (2, 64))
        for precision, again, cut, count, rows in choices:
            own = Candidate(option, pp, dp, count, schedule, virtual, zero if dp > 1 else 0, again)
            tables, num_rows = Tables(options, graph, profile, precision), rows * dp * count
            plan = as_plan(own, cut, options, precision, bucket_bytes=tables.bucket_bytes(own))
            costs = Costs(plan, graph, lookup(profile.profile))
            engine = max(memory.peak_bytes for memory in peaks(costs, num_rows))
            found = Pricer(tables, own, num_rows).peak(cut)
            assert (1 - less) * engine <= found <= (1 + more) * engine, own


shapes = st.sampled_from(["gpipe", "1f1b", "zero_bubble", "interleaved"])


def pipeline(seed: int, stages: int) -> Pipeline:
    """Random stages, or (homogeneous) all alike but for the last."""
    draw = random.Random(seed)
    base = [draw.uniform(0.5, 2.0) for _ in range(stages)]
    if draw.random() < 0.5:
        base = [1.0] * (stages - 1) + [draw.choice([0.9, 1.0, 1.2])]
    inner, message = draw.uniform(0.5, 1.5), draw.choice([0.0, 0.01, 0.4, 3.0])
    factors = (1.0, 2.0, inner, 0.9, 1.8, 0.8, 2.5, 1.3)
    return Pipeline(*(tuple(factor * b for b in base) for factor in factors),
                    (message,) * stages, (message,) * stages)  # type: ignore[call-arg]


def seconds_of(pipe: Pipeline, count: int) -> Callable[[Action], float]:
    """Of an action among so many micro-batches."""
    usual = {Op.F: pipe.forward, Op.B: pipe.backward, Op.I: pipe.input, Op.W: pipe.weight,
             Op.SEND_F: pipe.send, Op.SEND_B: pipe.back}
    first, last = ({**usual, Op.B: b, Op.W: w} for b, w in (pipe[4:6], pipe[6:8]))
    found = {0: first, count - 1: last}
    return lambda a: found.get(a.micro_batch, usual).get(a.op, (0.0,) * 99)[a.stage]


def last_of(ends: list[float], places: tuple[int, ...]) -> list[float]:
    """Per position: the last end of its stages."""
    pairs = list(zip(ends, places, strict=True))
    return [max(end for end, place in pairs if place == k) for k in range(max(places) + 1)]


def counted(name: str, positions: int, micro_batches: int) -> tuple[int, int]:
    """(virtual stages, micro-batches) that the schedule can take."""
    return (
        (2, positions * (1 + micro_batches // 4)) if name == "interleaved" else (1, micro_batches)
    )


@given(shapes, st.integers(1, 6), st.integers(1, 60), seeds, st.booleans())
@UNTIMED
def test_the_walk_ends_when_the_lists_end(name: str, p: int, m: int, seed: int, vee: bool) -> None:
    virtual, m = counted(name, p, m)
    places = tuple(range(p)) * virtual
    places = (*range(p), *reversed(range(p))) if vee else places
    pipe = pipeline(seed, len(places))
    expected = ends_of(build(name, places, m), seconds_of(pipe, m))
    assert last_of(walk(name, places, pipe, m), places) == pytest.approx(expected, rel=1e-9)


@given(shapes, st.integers(2, 4), st.integers(1, 8), seeds)
@settings(deadline=None, max_examples=40)
def test_the_walk_ends_when_the_engine_does(name: str, p: int, m: int, seed: int) -> None:
    """Nobody shares anything: every position is a resource of its own, messages need none."""
    virtual, m = counted(name, p, m)
    pipe = pipeline(seed, p * virtual)
    tasks, number, places = [], {}, tuple(range(p)) * virtual
    seconds = seconds_of(pipe, m)
    todo = [list(actions) for actions in build(name, places, m).actions]
    last: dict[int, int] = {}
    while any(todo):
        for position, actions in enumerate(todo):
            while actions:
                action, after = actions[0], [last[position]] if position in last else []
                if action.op in (Op.RECV_F, Op.RECV_B):
                    if action.other_end() not in number:
                        break
                    after.append(number[action.other_end()])
                actions.pop(0)
                sends = action.op in (Op.SEND_F, Op.SEND_B)
                needs = {} if sends else {f"core {position}": 1.0}
                tasks.append(fluid.Task(str(action), seconds(action), needs, tuple(after)))
                number[action] = len(tasks) - 1
                if not sends:
                    last[position] = len(tasks) - 1
    times = fluid.run(tasks)
    expected = [times[last[k]][1] for k in range(p)]
    ends = last_of(walk(name, places, pipe, m), places)
    assert ends == pytest.approx(expected, rel=1e-6)


def test_equal_problems_have_equal_bytes() -> None:
    for seed in range(10):
        one, two = (solved(problem(seed)) for _ in range(2))
        if one and two:
            assert files.encode(one.choices) == files.encode(two.choices)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recomputing_keeps_less_whatever_a_split_backward_would_leave(schedule: str) -> None:
    graph, options, profile, _, _ = problem(5)
    tables, cut = Tables(options, graph, profile), (0, 1, len(graph.blocks))
    usual = Candidate(0, 2, 1, 4, schedule, 1, 0, False)
    again = usual._replace(recompute=True)
    kept, less = (Pricer(tables, c, num_rows=1024).peak(cut) for c in (usual, again))
    assert less < 0.8 * kept


def test_what_was_pinned_is_kept() -> None:
    given = next(p for p in map(problem, range(100)) if p.profile.profile.cluster.num_devices == 8
                 and solved(p) and len(p.graph.blocks) > 2)
    found = search(*given[:4], Constraints(pp=2, tp=2, memory_bytes=10**9)).best.plan
    assert len(found.replicas) == 2
    assert len(found.replicas[0].positions) == 2
    with pytest.raises(SearchError, match="meets the constraints"):
        search(*given[:4], Constraints(tp=3))


@pytest.mark.parametrize("seed", range(20))
def test_devices_as_large_as_is_advised_where_no_plan_fits_do_fit(seed: int) -> None:
    given = problem(seed)
    with pytest.raises(SearchError) as caught:
        search(*given[:4], Constraints(memory_bytes=100))
    number, unit = re.findall(r"devices of ([0-9.]+) (\w+)", str(caught.value))[0]
    enough = float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert search(*given[:4], Constraints(memory_bytes=math.ceil(enough))).choices


def test_when_nothing_fits_the_nearest_miss_is_told_by_category() -> None:
    given = problem(1)
    with pytest.raises(SearchError) as caught:
        search(*given[:4], Constraints(memory_bytes=2**13))
    text = str(caught.value)
    assert "nearest: tp=" in text and "optimizer" in text and "MiB" in text
    assert text.count("; or ") == 1


def test_the_best_of_all_degrees_that_are_near_come_before_a_second_of_any() -> None:
    kinds = ({"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"tp": 2}, {"pp": 2})
    times = (10.0, 11.0, 12.0, 13.0, 20.0)
    choices = [Choice(Plan.uniform(**k), t, 0.0) for k, t in zip(kinds, times, strict=True)]
    assert [c.step_s for c in varied(choices, 4)] == [10.0, 13.0, 11.0, 12.0]


def test_a_time_limit_gives_a_plan_and_a_gap() -> None:
    given = next(p for p in map(problem, range(100)) if (found := solved(p)) and found.priced > 8)
    best = solved(given)
    found = search(*given[:4], given.limits, time_limit_s=1e-9)
    assert best and found.best.step_s * (1 - found.gap) <= best.best.step_s


@pytest.mark.parametrize(("core", "is_small"), [(0.1, True), (0.9, False)])
def test_buckets_are_small_only_where_sending_leaves_the_core_free(
    core: float, is_small: bool
) -> None:
    given = next(p for p in map(problem, range(100)) if p.profile.profile.cluster.num_devices == 4)
    everyone = given.profile.profile.cluster.place(range(4))
    line = Curve("sum", everyone, ((8.0, 1e-3),), core=core)
    profile = msgspec.structs.replace(given.profile.profile, curves=(line,))
    whole = Candidate(0, 1, 4, 1, "1f1b", 1, 0, False)
    found = Tables(given.options[:1], given.graph, Lookup(profile)).bucket_bytes(whole)
    assert (found < BUCKET_BYTES) == is_small


@given(seeds)
@settings(deadline=None, max_examples=15)
def test_parts_of_time_sum_to_the_step_and_plans_read_back(seed: int) -> None:
    given = problem(seed)
    found = solved(given)
    if found is None:
        return
    case = Case(given.graph, given.options, given.profile.profile, given.num_rows, given.limits)
    pricer, borders = case.pricer(found.best.plan)
    again = as_plan(pricer.candidate, borders, given.options, given.limits.precision,
                    bucket_bytes=pricer.bucket)
    assert again == found.best.plan
    assert candidate_of(again, given.options) == (pricer.candidate, borders)
    assert sum(time_parts(pricer, borders).values()) == pytest.approx(found.best.step_s)
    assert why(case, found.best)
    if found.others:
        assert against(case, found.others[0].plan, found.best.plan)

"""What the rule for moving promises, against hindsight."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from autopar_torch.policy import Other, Regret
from slow import slowly

PRICE_S = 100.0
SHORT_S = 1.0  # of the best plan's steps, beside the price
Steps = list[tuple[float, float]]  # seconds of a step under plan a and under plan b


def hindsight(lost_s: Sequence[Sequence[float]], price_s: float, first: int = 0) -> float:
    """The least that moves at the right times lose: per step, what each plan loses. (A dynamic
    program over steps and plans.)"""
    best = [0.0 if plan == first else price_s for plan in range(len(lost_s[0]))]
    for own in lost_s:
        best = [min(b, min(best) + price_s) + lost for b, lost in zip(best, own, strict=True)]
    return min(best)


def walked(steps: Steps, price_s: float = PRICE_S) -> tuple[float, int]:
    """Seconds lost beside always being in the best plan, and how many moves."""
    rule, own, lost, moves = Regret(), 0, 0.0, 0
    for step in steps:
        others = {"ab"[1 - own]: Other(step[1 - own], price_s)}
        rule = rule.seen(step[own], others)
        lost += step[own] - min(step)
        if (new := rule.chosen(step[own], others)) is not None:
            rule, own, moves = rule.moved("ab"[own], new, price_s), 1 - own, moves + 1
            lost += price_s
    return lost, moves


def least(steps: Steps) -> float:
    return hindsight([[x - min(step) for x in step] for step in steps], PRICE_S)


def waves(slow: float, halves: list[int]) -> Steps:
    """By turns one plan is slow and the other is not."""
    return [((SHORT_S, slow) if k % 2 else (slow, SHORT_S))
            for k, count in enumerate(halves) for _ in range(count)]


slows = st.floats(1.01, 3.0)
lengths = st.lists(st.integers(1, 500), min_size=1, max_size=40)
random_steps = st.lists(st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.integers(1, 200)),
                        min_size=1, max_size=40).map(
    lambda runs: [(a, b) for a, b, count in runs for _ in range(count)])


@settings(max_examples=150, deadline=None)
@given(st.one_of(random_steps, st.builds(waves, slows, lengths)))
def test_regret_loses_at_most_three_times_hindsight_and_takes_at_most_twice_its_time(
        steps: Steps) -> None:
    lost, moves = walked(steps)
    beyond = moves * 2.0  # of a step that brings the regret past the price
    assert lost <= 3 * least(steps) + 2 * PRICE_S + beyond
    useful = sum(min(step) for step in steps)
    assert useful + lost <= 2 * (useful + least(steps)) + 2 * PRICE_S + beyond


@pytest.mark.parametrize("slow", [1.1, 1.5, 3.0])
def test_an_enemy_who_slows_whatever_is_in_use_gains_no_more_than_that(slow: float) -> None:
    rule, own, steps = Regret(), 0, []
    for _ in range(20_000):
        step = (slow, SHORT_S) if own == 0 else (SHORT_S, slow)
        others = {"ab"[1 - own]: Other(SHORT_S, PRICE_S)}
        steps.append(step)
        rule = rule.seen(slow, others)
        if (new := rule.chosen(slow, others)) is not None:
            rule, own = rule.moved("ab"[own], new, PRICE_S), 1 - own
    lost, moves = walked(steps)
    assert moves > 5
    assert 2.5 * least(steps) < lost <= 3 * least(steps) + 2 * PRICE_S + moves * (slow - 1)


@pytest.mark.parametrize("slow", [1.5, *slowly(1.1, 2.0, 3.0)])
@pytest.mark.parametrize("part", [0.5, 0.9, 1.0, 1.01, 1.1, 1.5, 2.0, 2.01, 2.2, 3.0])
def test_square_waves_around_break_even_take_at_most_twice_the_time(slow: float,
                                                                     part: float) -> None:
    """`part`: of the price, what half a wave makes the wrong plan lose."""
    steps = waves(slow, [max(1, round(part * PRICE_S / (slow - 1)))] * 60)
    lost, moves = walked(steps)
    useful = sum(min(step) for step in steps)
    assert useful + lost <= 2 * (useful + least(steps)) + (slow - 1) * moves


@settings(max_examples=100, deadline=None)
@given(slows, st.integers(1, 5000))
def test_one_change_costs_at_most_twice_what_knowing_its_length_does(slow: float,
                                                                      count: int) -> None:
    lost, _ = walked(waves(slow, [count]))
    assert lost <= 2 * least(waves(slow, [count])) + slow - 1


def test_a_wave_below_break_even_moves_nothing() -> None:
    assert walked(waves(1.5, [199] * 100))[1] <= 1


@given(st.lists(st.floats(-0.05, 0.05), min_size=1, max_size=300))
def test_noise_moves_nothing(noise: list[float]) -> None:
    assert walked([(1.0 + x, 1.0) for x in noise])[1] == 0


def test_a_long_change_moves_once() -> None:
    assert walked(waves(1.5, [1000]))[1] == 1


def test_steps_left_tells_when_the_rule_moves() -> None:
    rule, others = Regret({"b": 20.0}), {"b": Other(1.0, PRICE_S)}
    assert rule.steps_left(1.5, others) == pytest.approx(160)
    assert rule.steps_left(1.0, others) == float("inf")
    assert rule.seen(1.5, others, 159).chosen(1.5, others) is None
    assert rule.seen(1.5, others, 160).chosen(1.5, others) == "b"

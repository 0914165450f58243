"""Every schedule that is built passes the checker, and the checker refuses what would not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from autopar_torch.errors import ScheduleError
from autopar_torch.proof import check
from autopar_torch.schedule import NAMES, Action, Op, Schedule, build

LAYOUTS: dict[str, Callable[[int, int], list[int]]] = {
    "looped": lambda p, v: [stage % p for stage in range(p * v)],
    "blocked": lambda p, v: [stage // v for stage in range(p * v)],
    "folded": lambda p, v: [(*range(p), *reversed(range(p)))[s % (2 * p)] for s in range(p * v)],
}
UNTIMED = settings(deadline=None)  # the machine may be busy
COST = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}

names = st.sampled_from(NAMES)
regular = st.builds(
    lambda kind, p, v: LAYOUTS[kind](p, v),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 5),
    st.integers(1, 3),
)
# Any order at all; the interleaved rule alone would stop on some of these.
ragged = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(
    lambda stages: [sorted(set(stages)).index(stage) for stage in stages]
)
layouts = regular | ragged
counts = st.integers(0, 9)


def compute(schedule: Schedule, position: int) -> str:
    channel = (action for action in schedule.actions[position] if action.op in COST)
    return " ".join(f"{action.op}{action.micro_batch}" for action in channel)


def makespan(schedule: Schedule) -> int:
    """Unit times, free communication; the lists are known not to deadlock."""
    ends: dict[Action, int] = {}
    clocks = [0] * len(schedule.actions)
    rest = [list(channel) for channel in schedule.actions]
    while any(rest):
        for position, channel in enumerate(rest):
            while channel:
                action = channel[0]
                if action.op in (Op.RECV_F, Op.RECV_B):
                    if action.other_end() not in ends:
                        break
                    clocks[position] = max(clocks[position], ends[action.other_end()])
                clocks[position] += COST.get(action.op, 0)
                ends[channel.pop(0)] = clocks[position]
    return max(clocks)


def classic_1f1b(p: int, position: int, m: int) -> str:
    warm_up = min(p - position - 1, m)
    steady = [f"F{warm_up + i} B{i}" for i in range(m - warm_up)]
    words = [*(f"F{i}" for i in range(warm_up)), *steady, *(f"B{i}" for i in range(m - warm_up, m))]
    drained = range(max(0, m - p + position), m) if position else ()
    halves = {f"B{i}": f"I{i} W{i}" for i in drained}
    return " ".join(halves.get(word, word) for word in " ".join(words).split())


def edit(schedule: Schedule, position: int, change: Callable[[list[str]], None]) -> Schedule:
    channels = [line.split(",") for line in schedule.text().split("\n")]
    change(channels[position])
    return Schedule.parse("\n".join(map(",".join, channels)), schedule.position_of)


def move(words: list[str], word: str, before: str) -> None:
    words.remove(word)
    words.insert(words.index(before), word)


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2F0", "3SEND_F1", "2REDUCE", "10RECV_B12", "0I7", "1W3", "4B2"])
def test_an_action_reads_back_from_its_text(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2REDUCE0", "02F0", "2X1", "2F0 ", "2SEND_F", "٢F0"]
)
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action"):
        Action.parse(text)


@UNTIMED
@given(names, layouts, counts, st.booleans())
def test_a_schedule_reads_back_from_its_text(
    name: str, position_of: list[int], m: int, backward: bool
) -> None:
    schedule = build(name, position_of, m, backward)
    assert Schedule.parse(schedule.text(), position_of) == schedule


def test_more_lines_than_positions_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 lines of actions for 1 positions"):
        Schedule.parse("0F0\n1F0", (0,))


# --- what is built --------------------------------------------------------------------------------


def test_1f1b_on_two_positions_is_the_known_list() -> None:
    assert build("1f1b", (0, 1), 3).text().split("\n") == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2,0REDUCE",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1I2,1SEND_B2,1W2,1REDUCE",
    ]


def test_1f1b_on_four_positions_is_the_known_list() -> None:
    schedule = build("1f1b", range(4), 8)
    assert [compute(schedule, position) for position in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 I5 W5 I6 W6 I7 W7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 I6 W6 I7 W7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 I7 W7",
    ]


@UNTIMED
@given(st.integers(1, 8), st.integers(0, 16))
def test_1f1b_is_the_closed_form_for_one_stage_per_position(p: int, m: int) -> None:
    schedule = build("1f1b", range(p), m)
    assert [compute(schedule, k) for k in range(p)] == [classic_1f1b(p, k, m) for k in range(p)]


@UNTIMED
@given(names, layouts, counts, st.booleans())
def test_every_built_schedule_passes_the_check(
    name: str, position_of: list[int], m: int, backward: bool
) -> None:
    check(build(name, position_of, m, backward), m)


@UNTIMED
@given(names, layouts, counts, st.booleans())
def test_every_stage_computes_every_micro_batch_once(
    name: str, position_of: list[int], m: int, backward: bool
) -> None:
    """Stated apart from the checker, so that a blind checker does not hide it."""
    done: dict[tuple[int, int, int], list[Op]] = {}
    for position, channel in enumerate(build(name, position_of, m, backward).actions):
        for action in channel:
            if action.op in COST:
                place = (position, action.stage, action.micro_batch)
                done.setdefault(place, []).append(action.op)
    assert sorted(done) == sorted((p, s, j) for s, p in enumerate(position_of) for j in range(m))
    allowed = [[Op.F, Op.B]] if name != "zero_bubble" else []
    allowed += [[Op.F, Op.I, Op.W]] if name in ("1f1b", "zero_bubble") else []
    assert all(ops in (allowed if backward else [[Op.F]]) for ops in done.values())


@UNTIMED
@given(layouts, counts)
def test_1f1b_splits_backwards_that_others_wait_for_once_the_forwards_are_done(
    position_of: list[int], m: int
) -> None:
    for channel in build("1f1b", position_of, m).actions:
        seen = [action.op for action in channel]
        forwards_end = len(seen) - seen[::-1].index(Op.F) if Op.F in seen else 0
        for index, action in enumerate(channel):
            if action.op is Op.SEND_B:
                assert seen[index - 1] is (Op.I if index > forwards_end else Op.B)


def test_without_micro_batches_only_the_reductions_remain_highest_stage_first() -> None:
    assert build("interleaved", (0, 1, 0, 1), 0).text() == "2REDUCE,0REDUCE\n3REDUCE,1REDUCE"


def test_a_schedule_without_backward_reduces_nothing() -> None:
    schedule = build("1f1b", (0, 1), 1, backward=False)
    assert schedule.text() == "0F0,0SEND_F0\n1RECV_F0,1F0"


def test_stages_on_one_position_do_not_send_to_each_other() -> None:
    assert build("1f1b", (0, 0), 1).text() == "0F0,1F0,1B0,0B0,1REDUCE,0REDUCE"


def num_in_flight(schedule: Schedule, position: int) -> int:
    """Peak number of forwards here whose backward (its W, when split) is still to come."""
    peak = now = 0
    for action in schedule.actions[position]:
        now += (action.op is Op.F) - (action.op in (Op.B, Op.W))
        peak = max(peak, now)
    return peak


@UNTIMED
@given(st.integers(1, 6), st.integers(0, 9))
def test_gpipe_keeps_every_micro_batch_and_1f1b_only_those_under_way(p: int, m: int) -> None:
    gpipe, one = build("gpipe", range(p), m), build("1f1b", range(p), m)
    for position in range(p):
        assert num_in_flight(gpipe, position) == m
        assert num_in_flight(one, position) == min(p - position, m)


@UNTIMED
@given(st.integers(1, 6), st.integers(0, 9))
def test_zero_bubble_keeps_no_more_than_the_peak_of_1f1b(p: int, m: int) -> None:
    schedule = build("zero_bubble", range(p), m)
    assert max(num_in_flight(schedule, position) for position in range(p)) == min(p, m)


@UNTIMED
@given(regular, counts)
def test_zero_bubble_takes_no_longer_than_1f1b(position_of: list[int], m: int) -> None:
    assert makespan(build("zero_bubble", position_of, m)) <= makespan(build("1f1b", position_of, m))


@UNTIMED
@given(st.integers(1, 6), st.integers(0, 12))
def test_the_bubbles_of_1f1b_and_zero_bubble_are_two_and_one_thirds_of_gpipe_s(
    p: int, extra: int
) -> None:
    m = 2 * p + extra
    assert makespan(build("gpipe", range(p), m)) == 3 * m + 3 * (p - 1)
    assert makespan(build("1f1b", range(p), m)) == 3 * m + 2 * (p - 1)
    assert makespan(build("zero_bubble", range(p), m)) == 3 * m + (p - 1)


@UNTIMED
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_interleaving_divides_the_bubble_by_the_stages_per_position(
    p: int, v: int, rounds: int
) -> None:
    m = p * rounds
    schedule = build("interleaved", LAYOUTS["looped"](p, v), m)
    assert makespan(schedule) == 3 * m * v + 3 * (p - 1)


def test_the_interleaved_limits_give_way_where_they_would_stop_the_pipeline() -> None:
    check(build("interleaved", (1, 1, 1, 0, 3, 3, 2, 2), 7), 7)


def test_an_unknown_name_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ScheduleError, match="gpipe, 1f1b, interleaved, zero_bubble"):
        build("2f2b", (0, 1), 4)


@pytest.mark.parametrize("position_of", [(), (0, 2), (1,), (-1, 0)])
def test_positions_with_gaps_are_refused(position_of: Sequence[int]) -> None:
    with pytest.raises(ScheduleError, match="the stages are on positions"):
        build("1f1b", position_of, 1)


def test_a_negative_number_of_micro_batches_is_refused() -> None:
    with pytest.raises(ScheduleError, match="-1 micro-batches"):
        build("1f1b", (0,), -1)


# --- what is refused ------------------------------------------------------------------------------


@UNTIMED
@given(names, layouts, st.integers(1, 6), st.data())
def test_a_dropped_action_is_refused(
    name: str, position_of: list[int], m: int, data: st.DataObject
) -> None:
    schedule = build(name, position_of, m)
    position = data.draw(st.sampled_from(range(len(schedule.actions))))
    channel = schedule.actions[position]
    index = data.draw(st.sampled_from(range(len(channel))))
    broken = edit(schedule, position, lambda words: words.__delitem__(index))
    with pytest.raises(ScheduleError, match="missing"):
        check(broken, m)


def test_a_doubled_action_is_refused() -> None:
    broken = edit(build("gpipe", (0, 1), 2), 0, lambda words: words.insert(1, "0F0"))
    with pytest.raises(ScheduleError, match="0F0 is there 2 times"):
        check(broken, 2)


def test_an_action_on_the_wrong_position_is_refused() -> None:
    broken = edit(build("gpipe", (0, 1), 2), 0, lambda words: words.append("1F0"))
    with pytest.raises(ScheduleError, match=r"(?s)1F0 does not belong here.*position 0"):
        check(broken, 2)


def test_a_backward_both_whole_and_split_is_refused() -> None:
    broken = edit(build("zero_bubble", (0,), 1), 0, lambda words: words.insert(1, "0B0"))
    with pytest.raises(ScheduleError, match="0B0 does not belong here"):
        check(broken, 1)


def test_one_micro_batch_too_many_is_refused() -> None:
    with pytest.raises(ScheduleError, match="does not belong here"):
        check(build("1f1b", (0, 1), 3), 2)


@pytest.mark.parametrize(
    ("word", "before"),
    [("0B0", "0F0"), ("0SEND_F0", "0F0"), ("0REDUCE", "0B1"), ("0B0", "0RECV_B0")],
)
def test_an_action_before_what_it_needs_is_refused(word: str, before: str) -> None:
    broken = edit(build("1f1b", (0, 1), 2), 0, lambda words: move(words, word, before))
    with pytest.raises(ScheduleError, match=f"{word} comes before"):
        check(broken, 2)


def test_the_weight_part_before_the_input_part_is_refused() -> None:
    broken = edit(build("zero_bubble", (0,), 1), 0, lambda words: move(words, "0W0", "0I0"))
    with pytest.raises(ScheduleError, match="0W0 comes before 0I0"):
        check(broken, 1)


def test_sends_in_another_order_than_their_receives_are_refused() -> None:
    broken = edit(build("gpipe", (0, 1), 3), 0, lambda words: move(words, "0SEND_F0", "0F2"))
    with pytest.raises(ScheduleError, match="0SEND_F1 is sent where 1RECV_F0 is received"):
        check(broken, 3)


def test_activations_and_gradients_between_two_positions_share_one_order() -> None:
    schedule = build("1f1b", (0, 1, 0, 1), 2)
    broken = edit(schedule, 1, lambda words: move(words, "1SEND_F1", "3RECV_F1"))
    with pytest.raises(ScheduleError, match="3SEND_B0 is sent where 2RECV_F1 is received"):
        check(broken, 2)


def test_a_cyclic_wait_is_refused_with_a_picture_of_it() -> None:
    broken = edit(build("1f1b", (0, 1), 1), 0, lambda words: move(words, "0RECV_B0", "0F0"))
    with pytest.raises(ScheduleError) as caught:
        check(broken, 1)
    assert str(caught.value).split("\n") == [
        "deadlock: no position can go on",
        "  position 0: 0RECV_B0, 0F0, 0SEND_F0, 0B0  <-- stuck, waits for 1SEND_B0",
        "  position 1: 1RECV_F0, 1F0, 1I0, 1SEND_B0  <-- stuck, waits for 0SEND_F0",
    ]

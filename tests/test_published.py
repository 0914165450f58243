"""Claims about predictions from dimensions and datasheets alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs

from autopar_torch import schedule as schedules
from autopar_torch.datasheets import Hardware, hardware, known, named, networks
from autopar_torch.errors import PlanError
from autopar_torch.schedule import Op
from lists import ends_of
from published import closed, footprint, predictions, ranking, recipes, rows as rows_of
from published.roofline import Seconds, Worker
from published.transformer import ALL, NOTHING, Layout, Recipe, Transformer

PROFILING = Path(__file__).resolve().parent.parent / "profiling"
GPT_22B = Transformer(48, 6144, 64, 64, 24576, 51200, 2048, gated=False, tied=True)
LLAMA_8B = Transformer(32, 4096, 32, 8, 14336, 128256, 8192)
SPREAD = Layout(tp=2, pp=2, dp=16, micro_rows=1, rows=128, sequence=True, zero=1)


def worker(layout: Layout = SPREAD, machine: str = "H100", **changes: object) -> Worker:
    return Worker(LLAMA_8B, layout, Recipe(**changes), hardware(machine))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", known())
def test_every_description_says_where_its_numbers_are_from(name: str) -> None:
    found = hardware(name)
    assert found.device.name == name
    assert found.device.source == "datasheet"
    assert {"device", "inside", "network"} <= found.sources.keys()
    assert {"efficiency", "memory_efficiency", "fixed_bytes", "overlap"} <= found.calibrated.keys()
    parts = [part for _, part in found.device.efficiency]
    assert parts == sorted(parts)
    for part in (*parts, found.inside_reached, found.fabric.reached, *found.overlap.values()):
        assert 0 < part < 1


@pytest.mark.parametrize("name", networks())
def test_every_network_says_where_its_numbers_are_from(name: str) -> None:
    found = networks()[name]
    assert found.sources.keys() == {"link"}
    assert {"reached", "latency_s"} == found.calibrated.keys()
    assert 0 < found.reached < 1


def test_a_cluster_has_a_name() -> None:
    cluster = named("16x8xH100")
    assert (len(cluster.nodes), cluster.num_devices) == (16, 128)
    assert named("8xH200").nodes[0][0].name == "H200"
    assert named("2x8x910b").devices[0].name == "Ascend-910B"


@pytest.mark.parametrize("text", ["8xAbacus", "H100", "0x8xH100", "8 H100", ""])
def test_an_unknown_cluster_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(PlanError, match="fix:"):
        named(text)


def test_a_published_step_is_met() -> None:
    """Korthikanti et al., table 5: 22B on eight A100, 1.42 s with everything recomputed."""
    layout = Layout(tp=8, micro_rows=4, rows=4, recompute=ALL)
    recipe = Recipe(grad_bytes=2, attention=0, dropout=True, overlap_weight=True, fused_sum=True)
    predicted = closed.step(Worker(GPT_22B, layout, recipe, hardware("A100-80"))).seconds
    assert predicted == pytest.approx(1.42, rel=0.15)


times = st.floats(0.01, 10)


@settings(max_examples=40, deadline=None)
@given(times, times, st.integers(1, 6), st.integers(0, 12))
def test_the_formula_equals_the_walk_on_equal_stages(
    forward: float, backward: float, num_stages: int, extra: int
) -> None:
    num_micro_batches = num_stages + extra
    schedule = schedules.build("1f1b", range(num_stages), num_micro_batches)
    seconds = {Op.F: forward, Op.B: backward, Op.I: backward}  # whole ones, as others run them
    walked = max(ends_of(schedule, lambda action: np.float64(seconds.get(action.op, 0.0))))
    stages = [Seconds(forward, backward)] * num_stages
    assert closed.pipeline(stages, num_micro_batches) == pytest.approx(float(walked))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=5), st.integers(0, 12))
def test_on_unequal_stages_the_formula_is_a_close_lower_bound(
    stages: list[float], extra: int
) -> None:
    num_micro_batches = len(stages) + extra
    schedule = schedules.build("1f1b", range(len(stages)), num_micro_batches)
    parts = {Op.F: 1, Op.B: 2, Op.I: 2}
    walked = max(ends_of(schedule, lambda a: np.float64(stages[a.stage] * parts.get(a.op, 0))))
    formula = closed.pipeline([Seconds(s, 2 * s) for s in stages], num_micro_batches)
    assert 0.9 * walked <= formula <= walked * (1 + 1e-9)


def test_layers_are_shared_out_evenly_and_completely() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            counts = closed.layers_of(layers, Layout(pp=stages))
            assert sum(counts) == layers
            assert max(counts) - min(counts) <= 1 or counts[-1] == min(counts)


def faster(found: Hardware, **changes: float) -> Hardware:
    return structs.replace(found, device=structs.replace(found.device, **changes))


@pytest.mark.parametrize("layout", [SPREAD, replace(SPREAD, pp=1, zero=3), Layout(rows=8)])
def test_more_of_anything_is_never_slower(layout: Layout) -> None:
    slow = worker(layout)
    found = slow.hardware
    device = found.device
    better = [
        faster(found, flops_per_s=2 * device.flops_per_s),
        faster(found, memory_bytes_per_s=2 * device.memory_bytes_per_s),
        structs.replace(found, inside_reached=1.0),
        structs.replace(found, network=structs.replace(found.fabric, reached=1.0)),
        structs.replace(found, overlap=dict.fromkeys(found.overlap, 1.0)),
    ]
    for machine in better:
        quick = closed.step(replace(slow, hardware=machine)).seconds
        assert quick <= closed.step(slow).seconds * (1 + 1e-9)


def test_sharing_and_recomputing_take_less_memory() -> None:
    def peak(layout: Layout) -> int:
        return max(stage.peak_bytes for stage in footprint.memory(worker(layout)))

    states = [peak(replace(SPREAD, pp=1, zero=zero)) for zero in (0, 1, 2, 3)]
    assert states == sorted(states, reverse=True)
    assert peak(replace(SPREAD, recompute=ALL)) < peak(SPREAD)
    assert peak(replace(SPREAD, schedule="zero_bubble_h2")) > peak(SPREAD)


def test_a_stage_that_recomputes_more_keeps_less_and_takes_longer() -> None:
    layout = replace(SPREAD, recompute_by_stage=(ALL, NOTHING))
    first, last = footprint.memory(worker(layout))
    plain_first, plain_last = footprint.memory(worker())
    assert first.activations < plain_first.activations
    assert last == plain_last
    slow, _ = closed.stages_of(worker(layout))
    assert slow.total > closed.stages_of(worker())[0].total


def test_a_backward_needs_room_for_its_gradients() -> None:
    """Of the gated product, of what it was made of, and of what came in; or of all scores."""
    layout = Layout(tp=2, pp=2, micro_rows=1, rows=2)
    first, _ = footprint.memory(worker(layout))
    assert first.working == 2 * 8192 * (3 * 14336 / 2 + 4096)
    eager, _ = footprint.memory(worker(layout, attention=0.0))
    assert eager.working == 2 * 8192 * (2 * 8192 * 32 / 2 + 4096)


def test_sequence_parallelism_pays_for_what_it_gathers_again() -> None:
    """Its exchanges are as large, but fewer lie beside the gradient of a weight."""
    recipe = Recipe(overlap_weight=True)
    whole = Worker(LLAMA_8B, replace(SPREAD, sequence=False), recipe, hardware("H100"))
    split = replace(whole, layout=SPREAD)
    assert split.exchange.forward == whole.exchange.forward
    assert split.exchange.backward > whole.exchange.backward
    eager = replace(split, recipe=replace(recipe, lean=False))
    assert eager.exchange.backward < split.exchange.backward


def test_gradients_summed_everywhere_cost_what_plain_replicas_exchange() -> None:
    def data_s(layout: Layout, **changes: object) -> float:
        return closed.step(worker(layout, overlap_data=False, **changes)).data_s

    plain = data_s(replace(SPREAD, zero=0), grad_bytes=2.0, weight_bytes=2.0)
    sharded = data_s(SPREAD, grad_bytes=2.0, weight_bytes=2.0)
    summed = data_s(SPREAD, grad_bytes=2.0, weight_bytes=2.0, whole_reduce=True)
    assert sharded == pytest.approx(plain)
    assert summed == pytest.approx(1.5 * plain, rel=1e-3)
    wide = data_s(SPREAD, grad_bytes=2.0, weight_bytes=2.0, travel_bytes=4.0)
    assert wide == pytest.approx(1.5 * sharded, rel=1e-3)  # but for latencies


def test_a_table_of_words_is_filled_up() -> None:
    odd = replace(LLAMA_8B, vocab=128249)
    assert replace(worker(), model=odd).head.total == pytest.approx(worker().head.total, rel=1e-3)


def test_programs_cut_their_layers_as_their_sources_say() -> None:
    table = replace(LLAMA_8B, layers=16, vocab=int(4 * LLAMA_8B.layer_params / LLAMA_8B.hidden))
    assert rows_of.balanced(table, 4) == (6.0, 5.0, 5.0, 0.0)  # the head alone counts as four
    assert rows_of.uniform(60, 4) == (15.0, 16.0, 16.0, 13.0)
    assert list(rows_of.layers_of_operators([157, 158])) == [12.0, 12.0]  # embedding; norm and head


def test_weights_in_8_bit_are_kept_twice_before_blackwell() -> None:
    found = {key[1]: job.row for key, job in rows_of.read(PROFILING / "published").jobs.items()}
    assert recipes.recipe(found["mlperf_v5.0_eos-dfw_n256_ngc25.01_nemo"]).weight_bytes == 2
    assert recipes.recipe(found["mlperf_v5.0_carina_ngpu2048_ngc25.04_nemo"]).weight_bytes == 1


def test_no_order_beats_noise() -> None:
    assert ranking.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert ranking.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert ranking.ceiling([1.0, 2.0, 4.0], 0.001) == pytest.approx(1)
    assert ranking.ceiling([1.0, 1.001, 1.002], 0.1) < 0.5


def test_a_folder_without_rows_does_not_pass(tmp_path: Path) -> None:
    command = [sys.executable, str(PROFILING), "published", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no row" in done.stdout


def test_the_command_reads_rows_and_says_what_it_left_out(tmp_path: Path) -> None:
    rows = rows_of.read(PROFILING / "published")
    assert len(rows.jobs) > 3000
    assert all(reason for _, _, reason in rows.left_out)
    job = rows.jobs["korthikanti", "korth_22B_selective"]
    assert abs(predictions.predict(job).error) < 0.15
    assert rows_of.read(tmp_path).jobs == {}

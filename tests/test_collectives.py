"""Claims about which collectives run off Gloo, in a world whose other ranks are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar_torch as ap
import zoo
from autopar_torch.measure.links import Line
from autopar_torch.measure.overlap import probe
from autopar_torch.run.world import World
from fakes import Recorder, fake_ranks

MESSAGES = {"send", "recv_", "alltoall_", "alltoall_base_"}


def steps(count: int, **plan: Any) -> Recorder:
    """The last of some steps of training."""
    model = ap.parallelize(zoo.build("nanogpt"), plan=ap.Plan.uniform(dp=4, **plan),
                           guards={"first_step": False})  # nobody answers
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(count):
        with Recorder() as record:
            model(**zoo.batch("nanogpt", 4))[1].backward()
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return record


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_pieces_are_summed_by_reduce_scatters_and_gathered_by_all_gathers(zero: int) -> None:
    with fake_ranks(4):
        record = steps(2, zero=zero)
    assert {"_reduce_scatter_base_", "_allgather_base_"} <= record.exchanges
    assert not record.exchanges & MESSAGES


def test_a_reduce_scatter_begins_while_the_backward_goes_on() -> None:
    with fake_ranks(4):
        ops = steps(2, zero=1, bucket_bytes=1000).ops
    first = ops.index("c10d::_reduce_scatter_base_")
    assert any("backward" in name for name in ops[first:])


@pytest.mark.parametrize("op, name", [("scatter", "_reduce_scatter_base_"), ("sum", "allreduce_"),
                                      ("gather", "_allgather_base_")])
def test_what_is_measured_is_what_runs(op: str, name: str) -> None:
    ranks = tuple(range(4))
    with fake_ranks(4):
        line = Line(op, ranks, [4096.0], World(0, 4), torch.device("cpu"), False)
        with Recorder() as record:
            line.round()
        assert record.exchanges - {"barrier"} == {name}
        assert line.axis is not None
        with Recorder() as record:
            probe(op, 4096.0, line.axis, torch.device("cpu"))
    assert record.exchanges - {"barrier", "allreduce_"} == {name} - {"allreduce_"}

"""Measuring for a traced model: what the simulator would ask, on the ranks that will train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cluster import Cluster
from ..measure import detect
from ..measure.blocks import Context
from ..measure.session import Session
from ..measure.speeds import speeds
from ..model import ModelGraph, item_bytes
from ..plan import Plan, Replica
from ..profile import BlockNeed, CurveNeed
from ..run.executor import Executor, Mail
from ..run.handover import hand_over
from ..run.prologue import Prologue
from ..run.record import SILENT
from ..run.world import World, device as own_device
from ..schedule import Schedule
from ..simulate.to_measure import needs_of
from ..trace import Traced
from ..trace.call import Call, take_apart


def session(traced: Traced, candidates: Sequence[Plan], call: Call, tensors: Sequence[Tensor],
            buffers: Mapping[str, Tensor], world: World,
            device: torch.device) -> Session:
    """Everything that simulating these plans needs, ready to be measured. All ranks call it."""
    found = cluster_of(world, traced.graph)
    blocks, curves = needs_of(candidates, traced.graph, found, call.num_rows)
    return session_on(found, blocks, curves, traced, call, tensors, buffers, world, device)


def session_on(cluster: Cluster, blocks: Sequence[BlockNeed], curves: Sequence[CurveNeed],
               traced: Traced, call: Call, tensors: Sequence[Tensor],
               buffers: Mapping[str, Tensor], world: World, device: torch.device,
               quick: bool = False) -> Session:
    """The same for given needs; with `quick`, what recomputes is not measured but derived."""
    meshes = {need.sharding.mesh for need in blocks if need.sharding}
    world.make_mesh_groups(sorted(meshes))
    names = [n for block in traced.graph.blocks for n in block.context.values()]
    prologue = Prologue(traced, names, dict(buffers), device)
    return Session(traced, blocks, curves, cluster, world, world.mesh_axes,
                   _contexts(prologue, call, tensors),
                   _fixed_step(prologue, call, tensors, world, device), device, quick)


def cluster_of(world: World, graph: ModelGraph) -> Cluster:
    """The devices for a model, each with its speed beside the others. All ranks call this."""
    sites = world.gather(detect.here())
    held = sum(info.num_elements * item_bytes(info.dtype) for info in graph.params.values())
    return detect.cluster(sites, speeds(sites, world, own_device()), held)


def _fixed_step(prologue: Prologue, call: Call, tensors: Sequence[Tensor], world: World,
                device: torch.device) -> Callable[[], None]:
    """What a step does once, whatever its stages: it takes the batch apart, runs the prologue
    and an empty schedule, and hands over no gradients (see `run/model.py`)."""
    args, kwargs = call.rebuild(tensors)
    batch_dim = max((dim for dim in call.rows_dims if dim is not None), default=0)
    anchor = torch.zeros((), device=device, requires_grad=True)
    nothing, alone = Schedule(((),), ()), Replica(())
    programs = {call.key: prologue}

    def work() -> None:
        taken, given = take_apart(args, kwargs, batch_dim)
        if call.in_one_row:
            taken, given = taken.as_one_row(given)
        whole = programs.get(taken.key, prologue).for_batch(taken, given)
        executor = Executor({}, alone, Mail(world, alone, device), None, SILENT)
        executor.run(nothing, 0, (), lambda *_: whole, True, lambda _: None)
        with torch.enable_grad():
            hand_over(anchor, torch.zeros((), device=device), [], lambda *_: ()).backward()

    return work


def _contexts(prologue: Prologue, call: Call, tensors: Sequence[Tensor]) -> Context:
    """Values of the prologue for the first rows of a real batch."""
    whole = prologue.for_batch(call, tensors)

    def context(rows: int) -> dict[str, Any]:
        """Of the first rows. What numbers rows, as the edges of a graph do, numbers these."""
        found = prologue.for_rows(call, tensors, whole, 0, rows)
        return {name: x % rows if name in prologue.traced.rowless and isinstance(x, Tensor)
                and x.dtype == torch.int64 and x.numel() and rows <= int(x.max()) < call.num_rows
                else x for name, x in found.items()}

    return context

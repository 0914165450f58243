"""Seconds of a step as Sailor (SOSP 2025) works them out, written again from what it does.

Its plan is a list of pipelines; each stage of one is a list of groups, which share its rows.
Nothing overlaps: of the slowest pipeline T = (m - 1) max(compute + messages) + sum(compute +
messages) + update; then come the longest sum of gradients inside a pipeline and the longest across
them. Checked against its own program on its own plans (`planning/plans.json`).

One thing is added: it gives all groups equally many micro-batches, here groups may have their own.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from autopar_torch.cluster import Cluster
from autopar_torch.plan import Plan, Replica, Stage
from autopar_torch.search.space import Option
from published.planning import FIXED_BYTES, FLOAT_BYTES, HERE, TENSOR_BYTES, Data

BUCKET_BYTES = 5e8
BYTES_PER_PARAM = 24
ZONE = "us-central1-a"
Group = tuple[str, int]  # devices of one kind that hold a stage together, and how many


class Pipeline(NamedTuple):
    """Stages: first layer and end, and the groups that hold each; micro-batches of the n-th group
    of every stage."""

    layers: tuple[tuple[int, int], ...]
    stages: tuple[tuple[Group, ...], ...]
    numbers: tuple[int, ...]

    def in_step(self) -> list[Pipeline]:
        """The same in parts that compute equally often."""
        found = []
        for number in dict.fromkeys(self.numbers):
            places = [n for n, other in enumerate(self.numbers) if other == number]
            stages = tuple(tuple(stage[n] for n in places) for stage in self.stages)
            found.append(Pipeline(self.layers, stages, (number,) * len(places)))
        return found


class Pipelines(NamedTuple):
    """A plan as Sailor has it: pipelines, and the rows of each micro-batch."""

    pipelines: tuple[Pipeline, ...]
    rows: int

    def written(self) -> dict[str, Any]:
        """As its simulator reads it, with the numbers of micro-batches beside."""
        used = Counter(group for own in self.pipelines for stage in own.stages for group in stage)
        devices = {kind: sum(n * degree for (k, degree), n in used.items() if k == kind)
                   for kind, _ in used}
        return {"mbs": self.rows, "used_gpus": devices, "pipeline_list": [
            {"num_stages": len(own.stages), "dp": [len(stage) for stage in own.stages],
             "layers_per_stage": [list(range(*layers)) for layers in own.layers],
             "tmp_per_stage": [[[[[kind, degree, ZONE]], degree] for kind, degree in stage]
                               for stage in own.stages],
             "num_micro_batches": own.numbers} for own in self.pipelines]}


# --- plans of either side -------------------------------------------------------------------------


def own_plans(num_rows: int, path: Path = HERE / "plans.json") -> list[dict[str, Any]]:
    """The plans that its planner gave, with the pool of each, and steps/s by its own simulator;
    the batch is rounded up."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for row in found:
        ends = [0]
        for count in row["layers"]:
            ends.append(ends[-1] + count)
        stages = tuple(tuple((kind, degree) for kind, degree, count in stage for _ in range(count))
                       for stage in row["stages"])
        number = math.ceil(num_rows / (row["rows"] * len(stages[0])))
        own = Pipeline(tuple(pairwise(ends)), stages, (number,) * len(stages[0]))
        row["plan"] = Pipelines((own,), row["rows"])
    return found


def of_plan(plan: Plan, cluster: Cluster, num_rows: int) -> Pipelines:
    """A plan of ours. Replicas with equal borders are one pipeline, as they sum in one ring."""
    rows = {end - start for spans in plan.micro_batches(num_rows) for start, end in spans}
    found: dict[tuple[Any, ...], list[Replica]] = {}
    for replica in plan.replicas:
        found.setdefault(tuple(stage.blocks for stage in replica.stages), []).append(replica)
    return Pipelines(tuple(
        Pipeline(layers, tuple(tuple(_group(stage, cluster) for stage in stages)
                               for stages in zip(*(r.stages for r in replicas), strict=True)),
                 tuple(replica.num_micro_batches for replica in replicas))
        for layers, replicas in found.items()), max(rows))


def _group(stage: Stage, cluster: Cluster) -> Group:
    return cluster.devices[stage.devices[0]].name, len(stage.devices)


def as_plan(pipelines: Pipelines, cluster: Cluster, num_rows: int,
            options: Sequence[Option]) -> Plan:
    """A plan of one pipeline as one of ours: the n-th group of every stage makes replica n.
    Micro-batches that rounding the batch up adds are left out."""
    (own,), rows = pipelines
    free: dict[str, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        free.setdefault(device.name, []).append(rank)
    known = {option.degree: option for option in options}
    table = list(dict.fromkeys(s.key for o in options for s in o.shardings if s is not None))
    shardings = {s.key: s for o in options for s in o.shardings if s is not None}

    def stage(kind: str, degree: int, layers: tuple[int, int]) -> Stage:
        devices = tuple(free[kind][:degree])
        del free[kind][:degree]
        keys = [s.key if s else "" for s in known[degree].shardings[slice(*layers)]]
        numbers = tuple(table.index(key) if key else -1 for key in keys)
        return Stage(devices, layers, shardings=numbers if degree > 1 else None)

    stages = [[stage(kind, degree, layers) for kind, degree in groups]
              for layers, groups in zip(own.layers, own.stages, strict=True)]
    whole, more = divmod(num_rows // rows, len(stages[0]))
    return Plan(tuple(Replica(tuple(groups), whole + (r < more))
                      for r, groups in enumerate(zip(*stages, strict=True))),
                shardings=tuple(shardings[key] for key in table), reason="found by Sailor",
                bucket_bytes=int(BUCKET_BYTES))


# --- its formula ----------------------------------------------------------------------------------


def seconds(plan: Pipelines, data: Data) -> float:
    steps = [_compute(part, plan.rows, data) for own in plan.pipelines for part in own.in_step()]
    inside = max(max(_inside(own, data)) for own in plan.pipelines)
    return max(steps) + inside + _across(plan, data)


def _compute(own: Pipeline, rows: int, data: Data) -> float:
    work = [max(sum(sum(data.seconds(kind, rows, degree, layer)[:2]) for layer in range(*layers))
                for kind, degree in stage)
            for layers, stage in zip(own.layers, own.stages, strict=True)]
    update = max(data.seconds(kind, rows, degree, layers[0])[2]
                 for layers, stage in zip(own.layers, own.stages, strict=True)
                 for kind, degree in stage)
    sent = _messages(own, rows, data)
    slowest = max(w + s for w, s in zip(work, sent, strict=True))
    return (own.numbers[0] - 1) * slowest + sum(work) + sum(sent) + update


def _messages(own: Pipeline, rows: int, data: Data) -> list[float]:
    """Of every stage: what it sends ahead and back, by the slowest of its groups."""
    size = [rows * FLOAT_BYTES * data.size(1, layer, "act_output_floats")
            for layers in own.layers for layer in (layers[0], layers[1] - 1)]
    found, last = [], len(own.stages) - 1
    for p, stage in enumerate(own.stages):
        ahead = _slowest(stage, own.stages[p + 1], size[2 * p + 1], data) if p < last else 0.0
        back = _slowest(stage, own.stages[p - 1], size[2 * p], data) if p else 0.0
        if 0 < p < last:
            found.append(ahead + back)
        elif p:
            found.append(2 * back)
        else:
            found.append(ahead if last <= 2 else 2 * ahead)
    return found


def _slowest(stage: Sequence[Group], other: Sequence[Group], size: float, data: Data) -> float:
    return max(data.slower(group, other[j % len(other)]).seconds(size)
               for j, group in enumerate(stage))


def _inside(own: Pipeline, data: Data) -> list[float]:
    """Of every stage: the sum of its gradients over its groups, in a ring of single devices."""
    found = []
    for layers, stage in zip(own.layers, own.stages, strict=True):
        degree = min(min(degree for _, degree in stage), 4)
        size = _bytes(layers, data) / degree
        links = {data.slower((a, 1), (b, 1)) for (a, _), (b, _) in pairwise(stage)}
        found.append(max((_bucketed(size, len(stage), fit) for fit in links), default=0.0))
    return found


def _across(plan: Pipelines, data: Data) -> float:
    """The sum over pipelines, by the one with the most stages."""
    longest, count = max(plan.pipelines, key=lambda own: len(own.stages)), len(plan.pipelines)
    return max(_bucketed(_bytes(layers, data), count, data.fits[kind, 1])
               for layers, stage in zip(longest.layers, longest.stages, strict=True)
               for kind, _ in stage)


def _bytes(layers: tuple[int, int], data: Data) -> float:
    return FLOAT_BYTES * float(sum(data.size(1, k, "params_floats") for k in range(*layers)))


def _bucketed(size: float, count: int, fit: Any) -> float:
    whole, rest = divmod(size, BUCKET_BYTES)
    return (whole * fit.ring(BUCKET_BYTES, count) + fit.ring(rest, count)) if count > 1 else 0.0


def peak_bytes(plan: Pipelines, data: Data) -> dict[str, float]:
    """Most bytes on a device of each kind."""
    found: dict[str, float] = {}
    for own in plan.pipelines:
        for p, (layers, stage) in enumerate(zip(own.layers, own.stages, strict=True)):
            for kind, degree in set(stage):
                params, kept = (sum(data.size(degree, k, what) for k in range(*layers))
                                for what in ("params_floats", "act_mem_floats"))
                flight = plan.rows * (len(own.stages) - p) * FLOAT_BYTES
                size = params * BYTES_PER_PARAM + kept * flight + FIXED_BYTES
                size += TENSOR_BYTES if degree > 1 else 0.0
                found[kind] = max(found.get(kind, 0.0), size)
    return found

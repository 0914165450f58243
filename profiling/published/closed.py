"""A step in closed form: a pipeline of stages that share nothing, then sums and the optimizer.

`walk` adds up any schedule; these formulas give the same where stages are equal, and serve
where thousands of micro-batches on dozens of stages would be played for one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from published.roofline import Group, Seconds, Worker
from published.transformer import Layout


def pipeline(stages: Sequence[Seconds], num_micro_batches: int, schedule: str = "1f1b",
             virtual: int = 1, send_s: float = 0.0) -> float:
    """Seconds until the first stage has finished. `send_s` is one message that is waited for."""
    busy = [num_micro_batches * stage.total for stage in stages]
    idle = [_idle(stages, s) for s in range(len(stages))]
    if schedule.startswith("zero_bubble"):
        weight = max(stage.weight for stage in stages) * (len(stages) - 1)
        times = 2 if schedule == "zero_bubble_h2" else 1  # twice the activations, half the bubble
        idle = [max(0.0, wait - (1 + times) * weight) for wait in idle]
    hops = len(stages) - 1
    waits = (num_micro_batches * virtual * 2 + 2 * hops) * send_s if hops else 0.0
    return max(work + wait / virtual for work, wait in zip(busy, idle, strict=True)) + waits


def _idle(stages: Sequence[Seconds], stage: int) -> float:
    """How long a stage waits: for those before it, and for those after it beyond what it has to do.

    With so many micro-batches ahead as stages follow, it runs their forwards while it waits for the
    first backward, and their backwards while the last forward is on its way.
    """
    before = sum(other.total for other in stages[:stage])
    after = sum(other.total for other in stages[stage + 1 :])
    ahead = len(stages) - 1 - stage
    mine = stages[stage]
    return (before + max(0.0, after - ahead * mine.forward)
            + max(0.0, after - ahead * mine.backward))


@dataclass(frozen=True)
class Step:
    """Where the time of a step goes."""

    pipeline_s: float
    data_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        return self.pipeline_s + self.data_s + self.update_s


def layers_of(num_layers: int, layout: Layout) -> list[float]:
    """Layers per stage: as even as it goes, the last stage the lightest."""
    most = -(-num_layers // layout.pp)
    rest, found = num_layers, []
    for stage in range(layout.pp):
        left = layout.pp - stage
        found.append(min(most, rest - (left - 1) * (rest // left)) if rest % left else rest // left)
        rest -= found[-1]
    return [float(n) for n in found]


def stages_of(worker: Worker, layers: Sequence[float] | None = None) -> list[Seconds]:
    """Seconds per stage: layers, the embedding on the first, the head on the last."""
    layers = layers or layers_of(worker.model.layers, worker.layout)
    stages = [worker.at(stage).layer * count for stage, count in enumerate(layers)]
    stages[0] += worker.embedding
    stages[-1] += worker.head
    return stages


def params_of(worker: Worker, layers: Sequence[float] | None = None) -> list[float]:
    """Parameters per stage on one rank, before ZeRO."""
    model, layout = worker.model, worker.layout
    layers = layers or layers_of(model.layers, layout)
    found = [count * model.layer_params for count in layers]
    found[0] += model.vocab_params
    if len(found) > 1 or not model.tied:
        found[-1] += model.vocab_params
    return [count / layout.tp for count in found]


def step(worker: Worker, layers: Sequence[float] | None = None) -> Step:
    """One training step of a transformer under a layout."""
    layout = worker.layout
    layers = layers or layers_of(worker.model.layers, layout)
    stages, params = stages_of(worker, layers), params_of(worker, layers)
    if layout.zero == 3:
        stages = [_gathered(worker, s, n) for s, n in zip(stages, params, strict=True)]
    piped = pipeline(stages, layout.num_micro_batches, layout.schedule, layout.virtual,
                     _send(worker))
    data = max(_data(worker, s, n) for s, n in zip(stages, params, strict=True))
    return Step(piped, data, worker.update(max(params)))


def _send(worker: Worker) -> float:
    layout = worker.layout
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.cp * layout.dp
    size = 2 * worker.tokens * worker.model.hidden
    size /= 1 if worker.recipe.whole_sends and not layout.sequence else layout.tp
    seconds = worker.group(layout.pp, stride).send(size)
    hides = worker.hardware.overlap.get("pipeline", 0.0) if worker.recipe.overlap_pipeline else 0.0
    return seconds * (1 - hides)


def _replicas(worker: Worker) -> Group:
    layout = worker.layout
    return worker.group(layout.dp * layout.cp, layout.tp)


def _gathered(worker: Worker, stage: Seconds, params: float) -> Seconds:
    """ZeRO 3: parameters are gathered before each use, gradients scattered after."""
    layout, recipe = worker.layout, worker.recipe
    team = worker.group(layout.shards, layout.tp)
    hides = worker.hardware.overlap.get("data", 0.0)
    gather = team.gather(2 * params)
    scatter = team.gather(recipe.grad_bytes * params)
    forward = max(stage.forward, gather + (1 - hides) * stage.forward)
    backward = max(stage.backward, gather + scatter + (1 - hides) * stage.backward)
    return Seconds(forward, backward, stage.weight)


def _data(worker: Worker, stage: Seconds, params: float) -> float:
    """What replicas exchange once per step, beyond what the last backward hides."""
    layout, recipe = worker.layout, worker.recipe
    team = _replicas(worker)
    if team.size == 1 or layout.zero == 3:
        return 0.0
    travel = recipe.travel_bytes or recipe.grad_bytes
    scatter = team.gather(travel * params) * (2 if layout.zero and recipe.whole_reduce else 1)
    gather = team.gather((recipe.weight_bytes if layout.zero else travel) * params)
    if not recipe.overlap_data:
        return scatter + gather
    hides = worker.hardware.overlap.get("data", 0.0)
    last = layout.virtual * layout.pp  # the first message waits for a whole layer's backward
    return (max(scatter / last / 8, scatter - hides * stage.backward)
            + max(gather / last / 8, gather - hides * stage.forward))

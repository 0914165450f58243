"""Bytes that the ranks of a transformer's stages hold at the worst moment, from its dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from autopar_torch.timeline import Memory
from published.closed import layers_of, params_of
from published.roofline import Worker

# Per score of a word: 16-bit logits, their 32-bit copy, its softmax; where nothing is done in place
# both gradients and a gathered copy as well; a fused loss needs one copy and its gradient.
LOGITS, EAGER_LOGITS, FUSED_LOGITS = 10.0, 18.0, 4.0
EAGER_NORM_KEPT = 8.0  # a norm written out keeps its input and its result in 32 bit
EAGER_SCORES = 6.0
LSE = 4.0  # a fused attention keeps one float per row and head
SCORES, DROPPED_SCORES = 2.0, 5.0  # softmax; with dropout a mask and the result as well
FRAGMENTS = 1.2  # what an allocator takes for what comes and goes, relative to what it hands out
GATHERED_LAYERS = 2  # ZeRO 3 runs one layer and has asked for the next


def kept(worker: Worker) -> float:
    """What the forward of one layer leaves for its backward, for one micro-batch."""
    recompute = worker.layout.recompute
    size = 2.0 * worker.width
    begin = recompute.passes * size * worker.between
    products, passes, attention = _parts(worker)
    return (begin + (1 - recompute.outputs) * products + (1 - recompute.passes) * passes
            + (1 - recompute.attention) * attention)


def _parts(worker: Worker) -> tuple[float, float, float]:
    """Bytes kept of a layer's products, of its passes over memory, and of its attention core."""
    m, recipe, t = worker.model, worker.recipe, worker.layout.tp
    size, item = 2.0 * worker.width, 1.0 if worker.eight_bit else 2.0 * worker.width
    up = 2 * m.ffn if m.gated else m.ffn
    products = worker.tokens * size * (2 * m.hidden + 2 * m.kv_width + up) / t
    inputs = worker.between if recipe.lean else worker.tokens * m.hidden
    wide = EAGER_NORM_KEPT if m.gated and not recipe.fused else 0.0
    norms = worker.between * (2 * (size + wide) + (2 if recipe.dropout else 0)) + 2 * item * inputs
    act = worker.tokens * m.ffn * (item if recipe.lean or not m.gated else item + size) / t
    if recipe.attention:
        core = worker.tokens * m.heads / t * LSE
    else:
        each = SCORES if recipe.fused_softmax else EAGER_SCORES
        core = worker.scores * worker.width * (DROPPED_SCORES if recipe.dropout else each)
    return products, norms + act, core


def in_flight(worker: Worker, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    layout = worker.layout
    p, v, m = layout.pp, layout.virtual, layout.num_micro_batches
    if layout.schedule == "zero_bubble_h2":
        return min(m, 2 * p - 1)
    if layout.schedule == "zero_bubble":
        return min(m, p)
    if v > 1:
        return min(m * v, (v - 1) * p + 2 * (p - stage - 1) + 1) / v
    return min(m, p - stage)


def stage_memory(worker: Worker, stage: int, layers: Sequence[float],
                 params: Sequence[float]) -> Memory:
    """One rank of a stage at its peak."""
    layout, recipe, last = worker.layout, worker.recipe, stage == len(layers) - 1
    count, held = layers[stage], params[stage]
    share = layout.shards if layout.zero else 1
    whole = held / share if layout.zero == 3 else held
    grads = held / share if layout.zero >= 2 else held
    activations = in_flight(worker, stage) * count * kept(worker)
    return Memory(
        params=int(whole * recipe.weight_bytes),
        grads=int(grads * recipe.grad_bytes + whole * recipe.work_grad_bytes),
        optimizer=int(held / share * recipe.state_bytes),
        activations=int(activations + (2.0 * worker.between if stage == 0 else 0.0)),
        working=int(max(_again(worker) + _back(worker), _head(worker) if last else 0.0)),
        buffers=int(_gathered(worker)),
        fixed=worker.hardware.device.fixed_bytes,
    )


def _again(worker: Worker) -> float:
    """What recomputing a layer makes at once."""
    recompute = worker.layout.recompute
    products, passes, attention = _parts(worker)
    return (recompute.outputs * products + recompute.passes * passes
            + ceil(recompute.attention) * attention)


def _back(worker: Worker) -> float:
    """Gradients that the backward of a layer has at once: what its largest product read and wrote,
    or the scores of an attention before and after their softmax."""
    m, size = worker.model, 2.0 * worker.width
    wide = worker.tokens * size * (3 if m.gated else 2) * m.ffn / worker.layout.tp
    scores = 0.0 if worker.recipe.attention else 2 * worker.scores * size
    return max(wide, scores) + size * worker.between


def _head(worker: Worker) -> float:
    each = LOGITS if worker.recipe.lean else EAGER_LOGITS
    return worker.logits * (FUSED_LOGITS if worker.recipe.fused_loss else each) + 4 * worker.between


def _gathered(worker: Worker) -> float:
    if worker.layout.zero < 3:
        return 0.0
    m, t = worker.model, worker.layout.tp
    layer = GATHERED_LAYERS * (2.0 + worker.recipe.grad_bytes) * m.layer_params
    return max(layer, (2.0 + worker.recipe.grad_bytes) * m.vocab_params) / t


def memory(worker: Worker, layers: Sequence[float] = ()) -> tuple[Memory, ...]:
    """Every stage of a pipeline, first to last."""
    layers = layers or layers_of(worker.model.layers, worker.layout)
    params = params_of(worker, layers)
    stages = range(ceil(worker.layout.pp))
    return tuple(stage_memory(worker.at(s), s, layers, params) for s in stages)


def taken(memory: Memory) -> float:
    """What a rank takes from its device, unused parts of the allocator's blocks included."""
    passing = memory.activations + memory.working + memory.buffers
    return memory.peak_bytes + (FRAGMENTS - 1) * passing

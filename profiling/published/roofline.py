"""Prices of the parts of a transformer on a device: a roofline over the operators of a layer.

For hardware and models that are not here to be measured. An operator is a matrix product or a pass
over memory; what is exchanged between them goes round a ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar_torch.cluster import Link
from autopar_torch.datasheets import Hardware
from published.transformer import Layout, Recipe, Transformer

# Bytes moved per element of a [tokens, hidden] or [tokens, ffn] tensor in 16 bit. An operator reads
# and writes; a backward reads its gradient and what was kept as well.
NORM, ADD, ROTARY, GELU, SWIGLU = 4.0, 6.0, 4.0, 4.0, 6.0
MASK = 1.0  # of dropout within a sum
EAGER_NORM, EAGER_ROTARY, EAGER_GELU, EAGER_SWIGLU, EAGER_DROPOUT = 36.0, 16.0, 8.0, 10.0, 5.0
EAGER_COPY = 12.0  # queries, keys and values laid out anew
EAGER_SOFTMAX = 2.2  # scale, mask and softmax one after another, the softmax in 32 bit
# Per score: written by a product, scaled and masked, dropped, read by a product. (What products
# write is part of their speed, but these are only as deep as a head.)
SOFTMAX, SOFTMAX_BACKWARD = 13.0, 19.0
BACKWARD_BYTES = 2.0  # of a pass over memory, relative to its forward
LOSS, EAGER_LOSS = 12.0, 30.0  # per logit, forward and backward
CAST = 4.0  # an 8-bit copy and its transpose, per element of a product's input
FLASH_BACKWARD = 2.5  # five products for two
CAUSAL = 0.5  # what a fused attention skips
VOCAB_TILE = 128
UNEVEN, ODD = 0.72, 0.5  # speed where widths are no multiple of 64, of 8
ADAM = 46.0  # norm, clipping, update of weight and moments, a 16-bit copy, zeros: per parameter
ACCUMULATE = 2.0  # a gradient is read in 16 bit, beside the sum it is added to


@dataclass(frozen=True)
class Seconds:
    """One micro-batch through something, forward and back (`weight`: within `backward`)."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward,
                       self.weight + other.weight)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(self.forward * times, self.backward * times, self.weight * times)

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Group:
    """How ranks that exchange lie: so many, so many of them in each node, over which link."""

    size: int
    local: int
    inside: Link
    across: Link

    def gather(self, num_bytes: float) -> float:
        """A ring all-gather or reduce-scatter; `num_bytes` is the whole."""
        if self.size < 2:
            return 0.0
        nodes = math.ceil(self.size / self.local)
        link = self.inside
        rate, latency = link.bytes_per_s, (self.local - 1) * link.latency_s
        if nodes > 1:
            # Every local rank brings its own share of the node's network.
            rate = min(rate, self.across.bytes_per_s * self.local)
            latency += (nodes - 1) * self.across.latency_s
        return latency + (self.size - 1) / self.size * num_bytes / rate

    def reduce(self, num_bytes: float) -> float:
        return 2 * self.gather(num_bytes)

    def send(self, num_bytes: float) -> float:
        link = self.inside if self.local > 1 else self.across
        return link.latency_s + num_bytes / link.bytes_per_s


def _alignment(*widths: float) -> float:
    """Part of the speed that is left where rows do not fill tiles."""
    worst = min(next(tile for tile in (64, 8, 1) if not round(width) % tile) for width in widths)
    return {64: 1.0, 8: UNEVEN, 1: ODD}[worst]


def padded(width: float) -> float:
    """Columns of a table of words: programs fill it up until its products are fast."""
    return VOCAB_TILE * math.ceil(width / VOCAB_TILE)


def group(hardware: Hardware, size: int, stride: int, per_node: int) -> Group:
    """Ranks `stride` apart, placed one node after the other."""
    local = max(1, min(size, per_node // stride))
    links = hardware.cluster()
    return Group(size, local, links.inside, links.across)


@dataclass(frozen=True)
class Worker:
    """A device under a layout and a recipe: prices the parts of a transformer."""

    model: Transformer
    layout: Layout
    recipe: Recipe
    hardware: Hardware
    per_node: int = 8

    def at(self, stage: int) -> Worker:
        """As it works on a stage."""
        by_stage = self.layout.recompute_by_stage
        if not by_stage:
            return self
        return replace(self, layout=replace(self.layout, recompute=by_stage[stage]))

    # --- sizes ----------------------------------------------------------------------------------

    @property
    def tokens(self) -> float:
        return self.layout.micro_rows * self.model.seq / self.layout.cp

    @property
    def scores(self) -> float:
        """Elements of the attention matrix of one layer, where it is made."""
        return self.tokens * self.model.seq * self.model.heads / self.layout.tp

    @property
    def logits(self) -> float:
        whole = self.tokens * self.model.vocab
        return whole if self.recipe.whole_logits else whole / self.layout.tp

    @property
    def between(self) -> float:
        """Elements between the tensor-parallel regions."""
        split = self.layout.tp if self.layout.sequence else 1
        return self.tokens * self.model.hidden / split

    def group(self, size: int, stride: int) -> Group:
        return group(self.hardware, size, stride, self.per_node)

    @property
    def tensor_group(self) -> Group:
        return self.group(self.layout.tp, 1)

    # --- computing ------------------------------------------------------------------------------

    def _product(self, rows: float, inner: float, columns: float) -> float:
        flops = 2 * rows * inner * columns / _alignment(inner, columns)
        return self.hardware.device.matmul_seconds(flops, self.recipe.precision)

    def _pass(self, num_bytes: float) -> float:
        return self.hardware.device.memory_seconds(num_bytes) if num_bytes else 0.0

    @property
    def products(self) -> float:
        """The linears of a layer."""
        m, t, n = self.model, self.layout.tp, self.tokens
        up = 2 * m.ffn if m.gated else m.ffn
        return (self._product(n, m.hidden, (m.hidden + 2 * m.kv_width) / t)
                + self._product(n, m.hidden / t, m.hidden)
                + self._product(n, m.hidden, up / t)
                + self._product(n, m.ffn / t, m.hidden))

    @property
    def attention(self) -> Seconds:
        """Scores, softmax and their product with the values."""
        flops = 4 * self.tokens * self.model.seq * self.model.hidden / self.layout.tp
        device = self.hardware.device
        if self.recipe.attention:
            forward = device.matmul_seconds(flops * CAUSAL, self._wide) / self.recipe.attention
            return Seconds(forward, FLASH_BACKWARD * forward)
        width = _alignment(self.model.hidden / self.model.heads * 8)  # a head of 8 n is enough
        core = 2 * device.matmul_seconds(flops / 2 / width, self._wide)
        size = self.width * (1 if self.recipe.fused_softmax else EAGER_SOFTMAX)
        return Seconds(core + self._pass(SOFTMAX * size * self.scores),
                       2 * core + self._pass(SOFTMAX_BACKWARD * size * self.scores))

    @property
    def passes(self) -> float:
        """What only moves bytes: norms, residuals, rotation, activation, casts."""
        m, t, n, r = self.model, self.layout.tp, self.tokens, self.recipe
        norm = EAGER_NORM if m.gated and not r.fused else NORM
        drop = (MASK if r.fused else EAGER_DROPOUT) if r.dropout else 0.0
        outer = self.between * 2 * (norm + ADD + drop)
        act = ((SWIGLU if r.fused else EAGER_SWIGLU) if m.gated else
               GELU if r.fused else EAGER_GELU)
        rotary = (ROTARY if r.fused else EAGER_ROTARY) * (m.hidden + m.kv_width) if m.gated else 0.0
        copies = 0.0 if r.fused else EAGER_COPY * m.hidden
        inner = n * (act * m.ffn + rotary + copies) / t
        casts = CAST * (2 * n * m.hidden + n * (m.hidden + m.ffn) / t) if self.eight_bit else 0.0
        size = self.width
        return self._pass(size * outer) + self._pass(size * inner) + self._pass(casts)

    @property
    def _wide(self) -> str:
        """The format of what has no 8-bit kernels."""
        return "float32" if self.recipe.precision == "float32" else ""

    @property
    def eight_bit(self) -> bool:
        return self.recipe.precision in ("float8", "float4")

    @property
    def width(self) -> int:
        """Bytes of an activation in units of 16 bit."""
        return 2 if self._wide else 1

    # --- exchanging -----------------------------------------------------------------------------

    @property
    def exchange(self) -> Seconds:
        """What a layer exchanges in its tensor group, beyond what computing hides."""
        size = 2 * self.tokens * self.model.hidden * self.width
        whole = 2 * self.tensor_group.reduce(size)
        hides, r = self.hardware.overlap.get("tensor", 0.0), self.recipe
        forward = whole * (1 - hides * r.overlap_tensor)
        beside = 1 - hides * (r.overlap_tensor or r.overlap_weight)
        if not self.layout.sequence:
            return Seconds(forward, whole * beside)
        # What a product needs is gathered before it, so only what it yields travels beside the
        # weight's gradient; and inputs of which only the own part was kept are gathered again.
        again = whole / 2 if r.lean else 0.0
        return Seconds(forward, forward / 2 + (whole / 2 + again) * beside)

    @property
    def ring(self) -> float:
        """Keys and values that pass along a context group while attention runs."""
        cp, m = self.layout.cp, self.model
        if cp == 1:
            return 0.0
        near = self.group(cp, self.layout.tp)
        piece = 2 * self.tokens * 2 * m.kv_width / self.layout.tp
        return max(0.0, (cp - 1) * near.send(piece) - self.attention.forward)

    # --- parts of a stage -----------------------------------------------------------------------

    @property
    def layer(self) -> Seconds:
        recompute, core = self.layout.recompute, self.attention
        products, passes, exchange = self.products, self.passes, self.exchange
        again = (recompute.products * products + recompute.attention * core.forward
                 + recompute.passes * passes + recompute.exchange * exchange.forward)
        grads = (
            0.0
            if self.recipe.fused_sum
            else self._pass(
                (ACCUMULATE + 2 * self.recipe.grad_bytes) * self.model.layer_params / self.layout.tp
            )
        )
        weight = products + grads
        backward = (products + core.backward + BACKWARD_BYTES * passes
                    + exchange.backward + 2 * self.ring)
        return Seconds(products + core.forward + passes + exchange.forward + self.ring,
                       backward + weight + again, weight)

    @property
    def head(self) -> Seconds:
        """The product with the vocabulary, and the loss."""
        m, t = self.model, self.layout.tp
        product = self._product(self.tokens, m.hidden, padded(m.vocab / t))
        per_logit = LOSS if self.recipe.fused_loss else EAGER_LOSS
        loss = self._pass(per_logit * self.logits) / 2
        reach = self.tensor_group.gather(2 * self.tokens * m.hidden)
        if self.recipe.whole_logits:
            reach += self.tensor_group.gather(2 * self.logits)
        return Seconds(product + loss + reach, 2 * product + loss + reach, product)

    @property
    def embedding(self) -> Seconds:
        reach = self.tensor_group.gather(2 * self.tokens * self.model.hidden)
        table = self._pass(ADD * self.between)
        return Seconds(table + reach, table)

    def update(self, params: float) -> float:
        """The optimizer on what this rank owns."""
        return self._pass(ADAM * params / (self.layout.shards if self.layout.zero else 1))

"""One block of a plan: how its operators and parameters are split over a tensor group."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..shard.holdings import Box, LocalParam
from ..shard.layout import Layout, Split, is_cut, local_shape, parse_forms
from ..units import shape
from .story import Section, Story, TextTable


class Param(NamedTuple):
    """A parameter of a block, and the part of it that the first device has."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    layout: str
    boxes: list[Box]


class SplitBlock(NamedTuple):
    """The first block of the kind that comes most often among those that are split."""

    name: str
    num_alike: int
    mesh: tuple[int, ...]
    params: list[Param]
    num_ops: int
    num_split: int


def split_block(story: Story) -> SplitBlock | None:
    """The block that is drawn, if any is split."""
    plan, blocks = story.plan, story.graph.blocks
    counts = Counter(block.kind for block in blocks)
    stages = [stage for replica in plan.replicas for stage in replica.stages if stage.shardings]
    places = [(stage, b) for stage in stages for b in range(*(stage.blocks or (0, 0)))
              if plan.sharding(stage, b)]
    place = min(places, key=lambda p: (-counts[blocks[p[1]].kind], p[1]), default=None)
    own = plan.sharding(*place) if place else None
    if place is None or own is None:
        return None
    block = blocks[place[1]]
    infos = story.graph.kinds[block.kind].params
    inside = f"{block.name}."
    params = [_param(block.params[slot].removeprefix(inside), info.shape, own.forms[slot], own.mesh)
              for slot, info in infos.items()]
    split = sum("S" in text for text in own.ops.values())
    return SplitBlock(block.name, counts[block.kind], own.mesh, params, len(own.ops), split)


def _param(name: str, whole: tuple[int, ...], text: str, mesh: tuple[int, ...]) -> Param:
    forms = parse_forms(text)
    held = LocalParam(0, (0, 0), forms, mesh, (0,) * len(mesh))
    words = [_in_words(layout, parts) for layout, parts in zip(forms.value, mesh, strict=True)]
    return Param(name, whole, tuple(local_shape(whole, forms.value, mesh)), ", ".join(words),
                 held.boxes(whole))


def _in_words(layout: Layout, parts: int) -> str:
    if isinstance(layout, Split):
        inside = f", inside each of {layout.outer}" if layout.outer > 1 else ""
        return f"dim {layout.dim} in {parts}{inside}"
    return f"a square of {parts}" if is_cut(layout) else f"whole on {parts}"


def sharding(story: Story) -> Section:
    """One block: which part of each parameter a device has."""
    title, found = "How a block is split", split_block(story)
    if found is None:
        return Section("sharding", title, ["No block is split: a device computes whole blocks."])
    count = "x".join(map(str, found.mesh))
    says = [f"{found.name}, one of {found.num_alike:,} equal blocks: {found.num_split} of its "
            f"{found.num_ops} operators are shared by {count} devices. Of each parameter, what the "
            "first device has is filled."]
    rows = [(p.name, shape(p.shape), shape(p.local), p.layout) for p in found.params]
    head = ("parameter", "whole, elements", "per device, elements", "cut")
    return Section("sharding", title, says, TextTable(head, rows))

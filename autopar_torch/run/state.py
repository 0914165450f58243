"""Things that concern all parameters at once: norms, full state, loading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from ..errors import CheckpointError
from ..model import TensorInfo
from ..trace import Traced
from .params import Held, paste

if TYPE_CHECKING:
    from .model import ParallelModel


def output_info(traced: Traced, name: str) -> TensorInfo:
    """Shape and type of what the model returns under a name."""
    value = traced.graph.outputs[name]
    for block in traced.graph.blocks:
        for slot, made in block.outputs.items():
            if made == value:
                return traced.graph.kinds[block.kind].outputs[slot]
    node = next(n for n in traced.prologue.nodes if n.name == value)
    return node.meta["info"]


def is_summed(traced: Traced, name: str) -> bool:
    """Whether parts of the batch give parts of an output that are to be added."""
    return name == "loss" or name in traced.graph.summed


def same_shape(name: str, there: Sequence[int], here: Sequence[int], where: str) -> None:
    """What is given has the shape of the full tensor."""
    if tuple(there) != tuple(here):
        raise CheckpointError(f"{name} is {tuple(there)} there, {tuple(here)} here", where=where)


def num_holders(model: ParallelModel, held: Held) -> int:
    """How many ranks have the same elements as this one."""
    holdings = model.store.holdings[held.name]
    same = Counter(h.region for h in holdings)[held.holding.region]
    return same // len(held.team.ranks) if held.zero else same


def is_speaker(model: ParallelModel, held: Held) -> bool:
    """Exactly one rank speaks for every element: the first that has it."""
    region = held.holding.region
    holders = [h for h in model.store.holdings[held.name] if h.region == region]
    if held.zero:
        first_team = {h.family for h in holders if h.rank == holders[0].rank}
        return held.holding.family in first_team
    return holders[0].rank == model.world.rank


def clip_grad_norm(model: ParallelModel, max_norm: float) -> Tensor:
    """torch's clip_grad_norm_ over every element of the model once."""
    if model.fallback_reason:
        return torch.nn.utils.clip_grad_norm_(model.module.parameters(), max_norm)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for held in model.store.held.values():
        if held.tensor.grad is not None and held.tensor.grad.numel():
            norm = torch.linalg.vector_norm(held.tensor.grad)
            total += norm.double().square() / num_holders(model, held)
    norm = model.world.sum(total).sqrt().float()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if float(factor) < 1.0:
        for held in model.store.held.values():
            if held.tensor.grad is not None:
                held.tensor.grad.mul_(factor)
    return norm


def full_tensor(model: ParallelModel, name: str, local: Tensor | None) -> Tensor:
    """The full tensor of which `local` is this rank's part (same cut as the parameter)."""
    info = model.graph.params[name]
    kind = getattr(torch, info.dtype) if local is None else local.dtype
    full = torch.zeros(info.shape, dtype=kind, device=model.device)
    held = model.store.held.get(name)
    if held is not None and local is not None and is_speaker(model, held):
        paste(full, local, held.boxes())
    return model.world.sum(full)


def full_state(model: ParallelModel) -> dict[str, Any]:
    """Every parameter and persistent buffer, whole, under all of its original names."""
    own = dict(model.module.state_dict(keep_vars=True))
    if model._plan is None or model.fallback_reason:
        return {name: value.detach().clone() for name, value in own.items()}
    names = {id(t): n for n, t in model.store.tensors.items()}
    made: dict[str, Tensor] = {}
    result = {}
    for name, tensor in own.items():
        first = names.get(id(tensor), name)
        if first not in made:
            split = first in model.store.holdings
            made[first] = full_tensor(model, first, tensor.detach()) if split else tensor.detach()
        result[name] = made[first]
    return result


def load_full(model: ParallelModel, state: Mapping[str, Any], strict: bool) -> Any:
    """Full tensors in, this rank's parts kept."""
    own = model.module.state_dict(keep_vars=True)
    missing = [n for n in own if n not in state]
    extra = [n for n in state if n not in own]
    if strict and (missing or extra):
        raise CheckpointError(
            f"missing {missing[:5]}, unexpected {extra[:5]}", where="load_state_dict",
            fix="pass strict=False to ignore",
        )  # fmt: skip
    if model._plan is None or model.fallback_reason:
        return model.module.load_state_dict(state, strict)
    names = {id(t): n for n, t in model.store.tensors.items()}
    given = {name: names.get(id(tensor), name) for name, tensor in own.items() if name in state}
    for name, known in given.items():
        split = known in model.store.holdings
        full = model.graph.params[known].shape if split else own[name].shape
        same_shape(name, state[name].shape, full, "load_state_dict")
    with torch.no_grad():
        for name, known in given.items():
            held = model.store.held.get(known)
            if held is not None:
                own[name].copy_(model.store.cut(held, state[name].to(own[name].device)))
            elif known not in model.store.holdings:
                own[name].copy_(state[name])
    return _IncompatibleKeys(missing, extra)

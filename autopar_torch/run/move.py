"""Another plan between two steps: parts go from the ranks that had them to those that will.

Parameters, buffers, gradients and what optimizers keep of them move one tensor after the other.
Parameter objects and optimizers stay the same objects. All ranks must move together.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor
from torch.optim import Optimizer

from ..errors import RunError
from ..measure import quotas
from ..shard.transfers import transfers
from . import optimizers, plainly as values
from .optimizers import NUMBERS
from .params import ParamStore, put
from .sharded import Sharded, local, mark, plainly, unmark
from .spread import view_of
from .tensorfile import DTYPES, dtype_name

GRAD = "grad"


class Beside(Struct, frozen=True):
    """What is kept beside a parameter under one name, as a holder says."""

    dtype: str = ""  # of a tensor
    cut: bool = False  # like the parameter
    value: Any = None  # of anything else
    on_cpu: bool = False


class KeptAt(NamedTuple):
    """Of what: a gradient (of no optimizer, -1), or a value in the state of an optimizer."""

    optimizer: int
    param: str
    key: str


class Moved(Struct, frozen=True):
    """What a move cost this rank."""

    sent_bytes: int
    more_bytes: int  # at most beside what it had
    seconds: float


Everything = dict[KeptAt, tuple[Beside, Any]]  # with this rank's part or value, None without one


def move(before: ParamStore, after: ParamStore, own_optimizers: Sequence[Optimizer],
         begin: Callable[[], object]) -> Moved:
    """Fill a new plan's store from the old one's. `begin` is called when there is room for sure."""
    start = time.perf_counter()
    with plainly(), torch.no_grad():
        found = _everything(before, own_optimizers)
        mover = _Mover(before, after)
        more_bytes = _refuse_too_large(mover, found)
        begin()
        _let_go(before, own_optimizers, found)
        beside: dict[str, list[KeptAt]] = {}
        for place, (kept, _) in found.items():
            if kept.cut:
                beside.setdefault(place.param, []).append(place)
        for name in after.holdings:
            tensor = after.tensors[name]
            for place in beside.get(name, ()):
                kept, old = found[place]
                found[place] = kept, mover.moved(name, old, DTYPES[kept.dtype], tensor.device)
            old = local(tensor).detach() if name in before.held else None
            new = mover.moved(name, old, tensor.dtype, tensor.device)
            unmark(tensor)
            if new is not old:
                put(tensor, new)
            del old, new
    after.begin()
    with plainly(), torch.no_grad():
        _hand_back(after, own_optimizers, found)
    return Moved(mover.sent_bytes, more_bytes, time.perf_counter() - start)


# --- what there is ----------------------------------------------------------------------------


def _own(store: ParamStore, own_optimizers: Sequence[Optimizer]) -> Iterator[tuple[KeptAt, Any]]:
    names = {id(tensor): name for name, tensor in reversed(store.tensors.items())}
    for name in store.holdings:
        if (grad := store.tensors[name].grad) is not None:
            yield KeptAt(-1, name, GRAD), grad
    for i, optimizer in enumerate(own_optimizers):
        for param, state in optimizer.state.items():
            name = names.get(id(param), "")
            if name in store.holdings:
                yield from ((KeptAt(i, name, key), value) for key, value in state.items())


def _described(store: ParamStore, place: KeptAt, value: Any) -> Beside:
    where = f"the optimizer's state of {place.param}: {place.key}"
    if not isinstance(value, Tensor):
        return Beside(value=values.plain(value, where))
    # A gradient is a plain part until it is asked for. What is plain beside a parameter of parts is
    # whole on every rank, and stays so; beside a whole parameter it is cut as that will be.
    whole = place.param not in store.spreads and place.key not in NUMBERS
    cut = place.optimizer < 0 or isinstance(value, Sharded) or (
        whole and tuple(value.shape) == store.graph.params[place.param].shape)
    number = None if value.dim() or cut else values.plain(value, where)
    return Beside(dtype_name(value, where), cut, number, value.device.type == "cpu")


def _everything(store: ParamStore, own_optimizers: Sequence[Optimizer]) -> Everything:
    """What any rank keeps, in the same order on all of them."""
    own = dict(_own(store, own_optimizers))
    said = store.world.everyones([(*place, _described(store, place, value))
                                  for place, value in own.items()],
                                 list[tuple[int, str, str, Beside]])
    first = {KeptAt(i, name, key): kept for one in reversed(said) for i, name, key, kept in one}
    return {place: (first[place], _plain_part(store, place, own.get(place)))
            for place in sorted(first)}


def _plain_part(store: ParamStore, place: KeptAt, value: Any) -> Any:
    return local(value).detach() if isinstance(value, Tensor) and place.param in store.held \
        else value


def _let_go(store: ParamStore, own_optimizers: Sequence[Optimizer], found: Everything) -> None:
    """From now on only `found` has what will move, so that it is released when it has moved."""
    for held in store.held.values():
        held.leaf.data = torch.empty(0, device="cpu")  # whoever else knows it
    for place, (kept, _) in found.items():
        param = store.tensors[place.param]
        if place.optimizer < 0:
            param.grad = None
        elif kept.cut and param in own_optimizers[place.optimizer].state:
            own_optimizers[place.optimizer].state[param][place.key] = None


# --- moving -----------------------------------------------------------------------------------


class _Mover:
    """Moves what is cut like a parameter from the cut of one plan to that of another."""

    def __init__(self, before: ParamStore, after: ParamStore) -> None:
        self.after, self.world, self.sent_bytes = after, after.world, 0
        self.boxes = {name: (before.boxes_of(name), after.boxes_of(name))
                      for name in after.holdings}
        sent: dict[int, int] = {}  # elements by rank, so that no holder sends most
        # Of all ranks; none where all keep what they have.
        self.moves = {name: [] if old == new else list(transfers(old, new, sent))
                      for name, (old, new) in self.boxes.items()}

    def moved(self, name: str, old: Tensor | None, dtype: torch.dtype,
              device: torch.device) -> Tensor:
        """This rank's new part of a tensor of which it has `old`."""
        moves = self.moves[name]
        if not moves and old is not None:
            return old
        rank, ops, landing = self.world.rank, [], []
        mine, ours = (boxes.get(rank, ()) for boxes in self.boxes[name])
        new = torch.empty(self.after.part_shape(name), dtype=dtype, device=device)
        for source, target, box in moves:
            if source == target == rank and old is not None:
                view_of(new, ours, box).copy_(view_of(old, mine, box))
            elif source == rank and old is not None:
                message = _message(view_of(old, mine, box).clone())  # a thread may release it late
                self.sent_bytes += message.nbytes
                ops.append(dist.P2POp(dist.isend, message, target, self.world.aside))
            elif target == rank:
                view = view_of(new, ours, box)
                received = torch.empty(view.shape, dtype=dtype, device=device)
                landing.append((view, received))
                ops.append(dist.P2POp(dist.irecv, _message(received), source, self.world.aside))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        for view, received in landing:
            view.copy_(received)
        return new


def _message(tensor: Tensor) -> Tensor:
    """As bytes, since not every backend sends every type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _refuse_too_large(mover: _Mover, found: Everything) -> int:
    """Before anything has moved: the bytes that this rank will need at most beside those that it
    has; an error on all if one has no room."""
    widths: dict[str, list[int]] = {}
    for place, (kept, _) in found.items():
        if kept.cut:
            widths.setdefault(place.param, []).append(DTYPES[kept.dtype].itemsize)
    rank, now, most, room_bytes = mover.world.rank, 0, 0, _free_bytes(mover.after.device)
    for name in mover.after.holdings:
        old, new = (sum(math.prod(size) for _, size in boxes.get(rank, ()))
                    for boxes in mover.boxes[name])
        under_way = sum(math.prod(move.box[1]) for move in mover.moves[name]
                        if move.source != move.target and rank in (move.source, move.target))
        extra = new + under_way if mover.moves[name] else 0
        for width in [*widths.get(name, ()), mover.after.tensors[name].element_size()]:
            most = max(most, now + width * extra)
            now += width * (new - old)

    def refuse() -> None:
        if most > room_bytes:
            raise RunError(f"moving to the plan needs {most / 1e9:.2f} GB more on rank {rank}, and "
                           f"{room_bytes / 1e9:.2f} GB are free", where="move",
                           fix="save(folder, opt), and start again with the plan: "
                           "parallelize(model, plan=plan), load(folder, opt)")

    mover.world.jointly(refuse)
    return most


def _free_bytes(device: torch.device) -> float:
    """Of this rank's device; of what a machine or a control group has left an equal share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text() if info.exists() else "")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine = int(found[1]) * 1024 / ranks if found else math.inf
    return min(machine, quotas.group_bytes() / ranks - quotas.used_bytes(), quotas.own_bytes())


# --- the end ----------------------------------------------------------------------------------


def _hand_back(store: ParamStore, own_optimizers: Sequence[Optimizer], found: Everything) -> None:
    """Gradients and optimizers get what has moved."""
    for place, (kept, value) in found.items():
        param, spread = store.tensors[place.param], store.spreads.get(place.param)
        if kept.cut and spread is not None:
            value = mark(value, spread)
        if place.optimizer < 0:
            param.grad = value
            continue
        state = own_optimizers[place.optimizer].state
        if kept.cut or place.key not in state.get(param, {}):
            state[param][place.key] = _again(kept, value, param)
    for optimizer in own_optimizers:
        optimizers.learn(optimizer)


def _again(kept: Beside, value: Any, param: Tensor) -> Any:
    """A value that this rank had, or now has as others said."""
    if value is not None or not kept.dtype:
        return value if value is not None else values.parsed(kept.value)
    return torch.tensor(kept.value, dtype=DTYPES[kept.dtype],
                        device="cpu" if kept.on_cpu else param.device)

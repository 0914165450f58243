"""Where full values of parameters come from: the model itself, files, or its own initialisation.

A model on `meta` is never whole in memory: each module is filled alone, its parts are cut off, and
it is let go. Its values depend on the seed and the module's name only, so any plan gets the same.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError, RunError
from ..trace.capture import describe_params
from . import steps
from .full_state import same_shape
from .stored import FILE
from .tensorfile import DTYPES, TensorFile
from .world import World

log = logging.getLogger("autopar_torch")
FullValues = Callable[[str], Tensor | None]
Reader = dict[str, tuple[str, tuple[int, ...], Callable[[], Tensor]]]  # type, shape, what reads it


def full_values(model: nn.Module, world: World, device: torch.device, seed: int,
                weights: str | os.PathLike[str] | None) -> FullValues:
    """Parameter or buffer name -> its full value, the same on every rank."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    there: dict[str, Callable[[], Tensor]] = {}
    if weights is not None:
        read = _reader(world, Path(weights))
        there = _fitting(model, tensors, read, str(weights), world.rank)
    fill = _Initialiser(model, seed)

    def value(name: str) -> Tensor | None:
        if name in there:
            return there[name]().to(device, tensors[name].dtype, copy=True)
        if tensors[name].is_meta:
            return fill(name).to(device)
        full = tensors[name].detach().to(device)
        if full.layout != torch.strided:
            return full  # such are not sent
        full = full.contiguous()
        if world.size > 1:
            dist.broadcast(full, 0)
        return full

    return value


def _fitting(model: nn.Module, tensors: dict[str, Tensor], read: Reader, where: str,
             rank: int) -> dict[str, Callable[[], Tensor]]:
    """What reads each tensor that is there, under any of its names. Floats become floats of other
    precision; nothing else changes its type."""
    names = {name: (name, *info.aliases) for name, info in describe_params(model).items()}
    found = {name: next((n for n in own if n in read), "") for name, own in names.items()}
    there = {name: read[place][2] for name, place in found.items() if place}
    for name in there:
        (dtype, shape, _), here = read[found[name]], tensors[name]
        same_shape(found[name], shape, here.shape, where)
        kind = DTYPES[dtype]
        if kind != here.dtype and not (kind.is_floating_point and here.is_floating_point()):
            raise CheckpointError(f"{found[name]} is {kind} there, {here.dtype} here", where=where,
                                  fix="give weights of the type that the model has")
    if not there:
        raise CheckpointError(
            f"none of the {len(names)} tensors of the model is there, but "
            f"{', '.join(sorted(read)[:3]) or 'nothing'}",
            where=where, fix="give weights that were saved from this model",
        )
    missing = [name for name in model.state_dict() if found.get(name) == ""]
    if missing and rank == 0:
        log.warning("weights: %d tensors of the model are not in %s and are initialised as if none "
                    "were given, first %s", len(missing), where,
                    ", ".join(missing[:3]))
    return there


class _Initialiser:
    """Runs the initialisation of one module at a time, on the CPU."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.now: tuple[str | None, dict[str, Tensor]] = (None, {})

    def __call__(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        if self.now[0] != owner:
            self.now = (owner, self._filled(owner))
        return self.now[1][leaf]

    def _filled(self, owner: str) -> dict[str, Tensor]:
        """Real values of a module's own parameters and buffers, made in a copy of it."""
        module = copy.copy(self.model.get_submodule(owner))
        module._parameters = {k: v if v is None else nn.Parameter(_nan_like(v), v.requires_grad)
                              for k, v in module._parameters.items()}
        module._buffers = {k: v if v is None else _nan_like(v)
                           for k, v in module._buffers.items()}
        digest = hashlib.sha256(f"{self.seed}:{owner}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
            for name in ("reset_parameters", "reset_running_stats"):
                if callable(reset := getattr(module, name, None)):
                    reset()
            if callable(hook := getattr(self.model, "_init_weights", None)):
                hook(module)
        made = {**module._parameters, **module._buffers}
        values = {name: value.detach() for name, value in made.items() if value is not None}
        empty = [k for k, v in values.items() if v.is_floating_point() and v.numel()
                 and bool(v.reshape(-1)[:1].isnan())]
        if empty:
            raise RunError(
                f"{type(module).__name__} does not initialise {', '.join(empty)}",
                where=owner or "the model",
                fix="give the module reset_parameters(), the model _init_weights(module), or pass "
                "weights=",
            )
        return values


def _nan_like(tensor: Tensor) -> Tensor:
    """A real tensor that shows if nobody filled it."""
    fill = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu")


def _reader(world: World, path: Path) -> Reader:
    """A reader of safetensors files or of a checkpoint, verified by all ranks together."""
    if world.by_first(bool, lambda: _is_plain(path)):
        return world.jointly(lambda: _of_files(path))
    saved = steps.opened(world, path)
    return {name.removeprefix("model."): (one.dtype, one.shape, partial(saved.whole, name))
            for name, one in saved.manifest.tensors.items()
            if name.startswith("model.")}


def _is_plain(path: Path) -> bool:
    """Whether there are safetensors that this package did not write."""
    return path.is_file() or any(not FILE.fullmatch(p.name) for p in path.glob("*.safetensors"))


def _of_files(path: Path) -> Reader:
    found: Reader = {}
    for name in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        file = TensorFile(name, follow=True)
        if twice := sorted(found.keys() & file.slots.keys()):
            raise CheckpointError(f"{twice[0]!a} is in two files", where=str(name),
                                  fix="keep one of them")
        found |= {key: (slot.dtype, slot.shape, partial(file.tensor, key, slot.dtype, slot.shape))
                  for key, slot in file.slots.items()}
    return found

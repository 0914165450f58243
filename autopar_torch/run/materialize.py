"""Where full values of parameters come from: the model itself, files, or its own initialisation.

A model on `meta` is never whole in memory: each module is filled alone, its parts are cut off, and
it is let go. Its values depend on the seed and the module's name only, so any plan gets the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError, RunError
from ..trace.capture import describe_params
from . import steps, stored
from .jointly import by_first, jointly
from .state import same_shape
from .tensorfile import DTYPES, Spec, TensorFile
from .world import World

log = logging.getLogger("autopar_torch")
Source = Callable[[str], Tensor | None]


def full_values(model: nn.Module, world: World, device: torch.device, seed: int,
                weights: str | os.PathLike[str] | None) -> Source:  # fmt: skip
    """Parameter or buffer name -> its full value, the same on every rank."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    read = None if weights is None else _reader(world, Path(weights))
    there = {} if read is None else _places(model, tensors, read, str(weights), world.rank)
    fill = _Initialiser(model, seed)

    def value(name: str) -> Tensor | None:
        found = None if read is None or name not in there else read.read(there[name])
        if found is not None:
            return found.to(device=device, dtype=tensors[name].dtype)
        if tensors[name].is_meta:
            return fill(name).to(device)
        full = tensors[name].detach().to(device).contiguous()
        if world.size > 1:
            dist.broadcast(full, 0)
        return full

    return value


def _places(model: nn.Module, tensors: dict[str, Tensor], read: Reader, where: str,
            rank: int) -> dict[str, str]:  # fmt: skip
    """Under which of its names each tensor is there."""
    names = {name: (name, *info.aliases) for name, info in describe_params(model).items()}
    found = {name: next((n for n in own if n in read.specs), "") for name, own in names.items()}
    there = {name: place for name, place in found.items() if place}
    for name, place in there.items():
        dtype, shape = read.specs[place]
        same_shape(place, shape, tensors[name].shape, where)
        _same_kind(place, DTYPES[dtype], tensors[name].dtype, where)
    if not there:
        raise CheckpointError(
            f"none of the {len(names)} tensors of the model is there, but "
            f"{', '.join(sorted(read.specs)[:3]) or 'nothing'}",
            where=where, fix="give weights that were saved from this model",
        )  # fmt: skip
    if rank == 0:
        _tell_missing([name for name in model.state_dict() if found.get(name) == ""], where)
    return there


def _same_kind(name: str, there: torch.dtype, here: torch.dtype, where: str) -> None:
    """Floats become floats of other precision; nothing else changes its kind."""
    if there != here and not (there.is_floating_point and here.is_floating_point):
        raise CheckpointError(f"{name} is {there} there, {here} here", where=where,
                              fix="give weights of the type that the model has")  # fmt: skip


def _tell_missing(missing: list[str], where: str) -> None:
    """What is not there keeps the values that it would have anyway."""
    if missing:
        log.warning("weights: %d tensors of the model are not in %s and are initialised as if none "
                    "were given, first %s", len(missing), where,
                    ", ".join(missing[:3]))  # fmt: skip


class _Initialiser:
    """Runs the initialisation of one module at a time, on the CPU."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.now: tuple[str, dict[str, Tensor]] = ("", {})
        self.hook = getattr(model, "_init_weights", None)

    def __call__(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        if self.now[0] != owner or not self.now[1]:
            self.now = (owner, self._filled(owner))
        return self.now[1][leaf]

    def _filled(self, owner: str) -> dict[str, Tensor]:
        """Real values of a module's own parameters and buffers."""
        module = self.model.get_submodule(owner)
        own = {**module._parameters, **module._buffers}
        saved = {k: v for k, v in own.items() if v is not None}
        digest = hashlib.sha256(f"{self.seed}:{owner}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
            try:
                for key, tensor in saved.items():
                    _set(module, key, _nan_like(tensor))
                self._initialise(module)
                made = {k: getattr(module, k).detach() for k in saved}
            finally:
                for key, tensor in saved.items():
                    _set(module, key, tensor)
        self._check(owner, made)
        return made

    def _initialise(self, module: nn.Module) -> None:
        with torch.no_grad():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            stats = getattr(module, "reset_running_stats", None)
            if callable(stats):
                stats()
            if callable(self.hook):
                self.hook(module)

    def _check(self, owner: str, made: dict[str, Tensor]) -> None:
        empty = [k for k, v in made.items() if v.is_floating_point() and v.numel()
                 and bool(v.reshape(-1)[:1].isnan())]  # fmt: skip
        if empty:
            raise RunError(
                f"{type(self.model.get_submodule(owner)).__name__} does not initialise "
                f"{', '.join(empty)}", where=owner or "the model",
                fix="give the module reset_parameters(), the model _init_weights(module), or pass "
                "weights=",
            )  # fmt: skip


def _nan_like(tensor: Tensor) -> Tensor:
    """A real tensor that shows if nobody filled it."""
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _set(module: nn.Module, key: str, tensor: Tensor) -> None:
    if key in module._parameters:
        param = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(
            tensor, requires_grad=tensor.is_floating_point())  # fmt: skip
        module._parameters[key] = param
    else:
        module._buffers[key] = tensor


class Reader(NamedTuple):
    """Reads single tensors; of those that are there type and shape are known."""

    specs: dict[str, Spec]
    read: Source


def _reader(world: World, path: Path) -> Reader:
    """Of a safetensors file or folder, or of a checkpoint, verified by all ranks together."""
    found: list[Reader] = []
    if not by_first(world, bool, lambda: _is_checkpoint(path)):
        jointly(world, type(None), lambda: found.append(_of_files(path)))
        return found[0]
    saved = steps.opened(world, path)
    own = {name.removeprefix("model."): stored for name, stored in saved.manifest.tensors.items()
           if name.startswith("model.")}  # fmt: skip

    def read(name: str) -> Tensor:
        shape = own[name].shape
        value = torch.empty(shape, dtype=DTYPES[own[name].dtype])
        saved.fill(f"model.{name}", ((0,) * len(shape), shape), value)
        return value

    return Reader({name: (stored.dtype, stored.shape) for name, stored in own.items()}, read)


def _is_checkpoint(path: Path) -> bool:
    """Whether this package wrote it, now or before, or began to."""
    if path.is_file() or not path.is_dir():
        return False
    return bool(steps.committed(path)) or stored.is_own(path)


def _of_files(path: Path) -> Reader:
    found = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError("no safetensors file and no checkpoint there", where=str(path),
                              fix="give a safetensors file, a folder of them, or the folder that "
                              "model.save() wrote")  # fmt: skip
    where: dict[str, TensorFile] = {}
    for file in (TensorFile(name, follow=True) for name in found):
        if twice := sorted(where.keys() & file.slots.keys()):
            raise CheckpointError(f"{twice[0]!a} is in {where[twice[0]].path.name} too",
                                  where=str(file.path), fix="keep one of them")  # fmt: skip
        where |= dict.fromkeys(file.slots, file)
    slots = {name: file.slots[name] for name, file in where.items()}
    specs = {name: (slot.dtype, slot.shape) for name, slot in slots.items()}
    return Reader(specs, lambda name: where[name].tensor(name).clone())

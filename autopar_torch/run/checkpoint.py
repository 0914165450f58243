"""Checkpoints that any plan can load: torch.distributed.checkpoint over the parts every rank has.

A parameter and its optimizer state lie in the file under the parameter's first name, as rectangles
of the full tensor; whoever loads asks for the rectangles of its own plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .. import files
from ..errors import CheckpointError
from ..shard.holdings import Box
from .params import Held
from .sharded import local as plain, mark
from .spread import views
from .state import same_shape, spoken

if TYPE_CHECKING:
    from .model import ParallelModel

_SETTINGS = "optimizer.json"


class OptimizerSettings(Struct, frozen=True):
    """Hyper-parameters of every parameter group, and which parameters it has."""

    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]


class Rectangles(torch.Tensor):
    """A part of a full tensor, as torch.distributed.checkpoint wants to see it."""

    boxes: list[Box]
    full: torch.Size
    pieces: list[Tensor]

    @staticmethod
    def of(local: Tensor, pieces: list[tuple[Box, Tensor]], full: tuple[int, ...]) -> Rectangles:
        made = local.as_subclass(Rectangles)
        made.boxes, made.full = [box for box, _ in pieces], torch.Size(full)
        made.pieces = [piece for _, piece in pieces]
        return made

    def size(self, dim: int | None = None) -> Any:
        """Of the full tensor: that is what a checkpoint compares."""
        return self.full if dim is None else self.full[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), properties,
                    self.full,
                ),
            )
            for offsets, sizes in self.boxes
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = [torch.Size(o) for o, _ in self.boxes]
        return self.pieces[offsets.index(index.offset)]  # type: ignore[arg-type]


def _wrap(model: ParallelModel, held: Held, value: Tensor, saves: bool) -> Rectangles:
    """All that this rank reads of it, or what it writes (views, so that loading fills the part)."""
    part, boxes = plain(value).detach(), held.boxes()
    pieces = list(zip(boxes, views(part, boxes), strict=True))
    return Rectangles.of(part, spoken(model, held, part) if saves else pieces, held.shape)


def _model_state(model: ParallelModel, saves: bool) -> dict[str, Any]:
    held = {f"model.{h.name}": _wrap(model, h, h.tensor, saves)
            for h in model.store.held.values()}  # fmt: skip
    rest = {
        f"model.{name}": tensor.detach()
        for name, tensor in model.store.tensors.items()
        if name not in model.store.holdings and not tensor.is_meta
    }
    return {**held, **rest}


def _names(model: ParallelModel) -> dict[int, str]:
    return {id(t): n for n, t in model.store.tensors.items()}


def _optimizer_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = _names(model)
    state: dict[str, Any] = {}
    for param, values in optimizer.state.items():
        held = model.store.held.get(names.get(id(param), ""))
        if held is None:
            continue
        for key, value in values.items():
            value = value if isinstance(value, Tensor) else torch.tensor(float(value))
            whole = value.shape != param.shape or value.dim() == 0
            state[f"optim.{held.name}.{key}"] = (
                value if whole else _wrap(model, held, value, True))  # fmt: skip
    return state


def save(model: ParallelModel, folder: str | os.PathLike[str],
         optimizer: torch.optim.Optimizer | None) -> None:  # fmt: skip
    """Every rank writes what it speaks for."""
    state = _model_state(model, True)
    settings = None if optimizer is None else _settings(model, optimizer)
    if optimizer is not None:
        state |= _optimizer_state(model, optimizer)
    with torch.no_grad():
        _quietly("save", lambda: dcp_save(state, checkpoint_id=str(folder), no_dist=_alone()))
    if settings is not None and model.world.rank == 0:
        files.save(settings, Path(folder) / _SETTINGS)
    if not _alone():
        dist.barrier()


def _settings(model: ParallelModel, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    names = _names(model)
    groups, members = [], []
    for group in optimizer.param_groups:
        plain = {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str, tuple))}
        groups.append(plain)
        if any(id(p) not in names for p in group["params"]):
            raise CheckpointError("the optimizer has parameters that are not the model's",
                                  fix="make it of model.parameters()")  # fmt: skip
        members.append(tuple(names[id(p)] for p in group["params"]))
    return OptimizerSettings(tuple(groups), tuple(members))


def load(model: ParallelModel, folder: str | os.PathLike[str],
         optimizer: torch.optim.Optimizer | None) -> None:  # fmt: skip
    """Every rank reads the rectangles of its own plan."""
    metadata = _read_metadata(folder)
    state = _model_state(model, False)
    missing = sorted(name for name in state if name not in metadata)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are not in it, first {', '.join(missing[:3])}",
            where=str(folder), fix="load it into the model that it was saved from",
        )  # fmt: skip
    if optimizer is not None:
        settings = _same_groups(model, optimizer, Path(folder) / _SETTINGS)
        state |= dict(_empty_optimizer_state(model, optimizer, metadata))
    _check_shapes(state, metadata, folder)
    with torch.no_grad():
        _quietly("load", lambda: dcp_load(state, checkpoint_id=str(folder), no_dist=_alone()))
    if optimizer is not None:
        for group, saved in zip(optimizer.param_groups, settings.groups, strict=True):
            group |= {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}


def _read_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return dict(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"no readable checkpoint: {error}", where=str(folder),
                              fix="give the folder that model.save() wrote") from error  # fmt: skip


def _check_shapes(state: dict[str, Any], metadata: dict[str, Any],
                  folder: str | os.PathLike[str]) -> None:  # fmt: skip
    for name, value in state.items():
        there = metadata.get(name)
        full = value.full if isinstance(value, Rectangles) else value.shape
        if isinstance(there, TensorStorageMetadata):
            same_shape(name, there.size, full, str(folder))


def _empty_optimizer_state(model: ParallelModel, optimizer: torch.optim.Optimizer,
                           metadata: dict[str, Any]) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """Room for this rank's part of what the file has for its parameters."""
    by_name = {f"optim.{held.name}.": held for held in model.store.held.values()}
    for key, info in metadata.items():
        prefix = key.rpartition(".")[0] + "."
        held = by_name.get(prefix)
        if held is None or isinstance(info, BytesStorageMetadata):
            continue
        own = optimizer.state[held.tensor]
        split = tuple(info.size) == held.shape and info.size != torch.Size([])
        shape = held.part.shape if split else info.size
        device = held.tensor.device if split else torch.device("cpu")
        value = torch.zeros(shape, dtype=info.properties.dtype, device=device)
        yield key, _wrap(model, held, value, False) if split else value
        spread = model.store.spreads.get(held.name) if split else None
        own[key.removeprefix(prefix)] = value if spread is None else mark(value, spread)


def _same_groups(model: ParallelModel, optimizer: torch.optim.Optimizer,
                 path: Path) -> OptimizerSettings:  # fmt: skip
    """What was saved of groups that hold the same parameters."""
    settings, here = files.load(path, OptimizerSettings), _settings(model, optimizer)
    if [set(own) for own in settings.names] != [set(own) for own in here.names]:
        raise CheckpointError(
            f"groups of {', '.join(str(len(own)) for own in settings.names)} parameters there, of "
            f"{', '.join(str(len(own)) for own in here.names)} here, or of others",
            where=str(path), fix="build the optimizer with the same groups",
        )  # fmt: skip
    return settings


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _quietly(what: str, act: Any) -> None:
    """torch's checkpoint errors are no Exceptions; make them ours."""
    try:
        act()
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what} failed: {first}") from error

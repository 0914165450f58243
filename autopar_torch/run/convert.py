"""From the form of earlier versions (torch.distributed.checkpoint) to the present one.

The old metadata are a pickle: reading them runs what they hold. So nothing but `autopar convert`
does it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .. import files
from ..errors import CheckpointError
from . import stored
from .stored import Manifest, OptimizerState, Piece, Stored, StoredFile
from .tensorfile import DTYPES, NAMES, write

_SETTINGS = "optimizer.json"


class _OldSettings(Struct, frozen=True):
    """Hyper-parameters of every parameter group, and which parameters it has."""

    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]


def convert(old: Path, new: Path) -> int:
    """Write the checkpoint again, a tensor at a time; how many tensors it has."""
    if os.path.lexists(new / stored.MANIFEST) or (new / stored.OLD).exists():
        raise CheckpointError("there is a checkpoint already", where=str(new),
                              fix="give a new folder")  # fmt: skip
    tensors = _tensors(old)
    state = _optimizer(old, tensors)
    try:
        generation = stored.begin(new)
        name = f"{generation}-0.safetensors"
        specs = {key: (one.dtype, one.shape) for key, one in tensors.items()}
        size, digest = write(new / name, specs, _values(old, tensors))
        stored.commit(new, Manifest(stored.FORM, generation, "", (StoredFile(name, size, digest),),
                                    tensors, state))  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"cannot write: {error}", where=str(new),
                              fix="make room or choose another folder") from error  # fmt: skip
    return len(tensors)


def _tensors(old: Path) -> dict[str, Stored]:
    try:
        metadata = FileSystemReader(str(old)).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle may raise anything
        raise CheckpointError(f"no readable checkpoint of the old form: {error}", where=str(old),
                              fix="give a folder with .metadata in it") from error  # fmt: skip
    found = {}
    for name, info in sorted(metadata.items()):
        if not isinstance(info, TensorStorageMetadata) or info.properties.dtype not in NAMES:
            raise CheckpointError(f"{name} is no tensor that can be kept", where=str(old))
        shape = tuple(info.size)
        whole = (Piece(0, (0,) * len(shape), shape),) if all(shape) else ()
        found[name] = Stored(NAMES[info.properties.dtype], shape, whole)
    return found


def _values(old: Path, tensors: dict[str, Stored]) -> Iterator[Tensor]:
    for name, saved in tensors.items():
        value = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        try:
            load({name: value}, checkpoint_id=str(old), no_dist=True)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise CheckpointError(f"{name} cannot be read: {error}", where=str(old)) from error
        yield value


def _optimizer(old: Path, tensors: dict[str, Stored]) -> OptimizerState | None:
    """Of which class it was, the old form does not say."""
    if not (old / _SETTINGS).exists():
        return None
    settings = files.load(old / _SETTINGS, _OldSettings)
    keys: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        if name.startswith("optim."):
            param, _, key = name.removeprefix("optim.").rpartition(".")
            keys[param].append(key)
    return OptimizerState("", settings.groups, settings.names,
                          {param: tuple(own) for param, own in keys.items()}, {})  # fmt: skip

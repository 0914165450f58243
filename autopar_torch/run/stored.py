"""A checkpoint in a folder: one safetensors file per rank, and the manifest that makes it one.

Files are written first, under names that were never used; the manifest names them with their sizes
and hashes, and replaces the one before by a rename. So the folder holds the old checkpoint or the
new one, whole, at any moment. Nothing in it is a program, and no name leads out of it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from torch import Tensor

from .. import files
from ..errors import CheckpointError, FileError
from ..shard.atoms import common, within
from ..shard.holdings import Box
from .tensorfile import DTYPES, Size, TensorFile, damaged, durable, open_regular, sha256, sync

log = logging.getLogger("autopar_torch")
MANIFEST = "manifest.json"
FORM = 1
FILE = re.compile(r"([0-9a-f]{16})-([0-9]{1,7})\.safetensors")
_NOTE = re.compile(r"([0-9a-f]{16})-([0-9]{1,7})\.json")
_DRAFT = re.compile(r"manifest\.([0-9a-f]{16})()")
_Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
TENSOR = {"tensor": ""}  # in the state of an optimizer: it lies in the files


class StoredPart(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A rectangle of a tensor, and the file that has it (a place in the manifest's list)."""

    file: Size
    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]


class Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor, by the rectangles that make it up."""

    dtype: str
    shape: tuple[Size, ...]
    pieces: tuple[StoredPart, ...]


class StoredFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file, and how to see that it is what was written."""

    name: str
    num_bytes: Size
    sha256: _Hash


SavedState = dict[str, dict[str, Any]]  # parameter -> key -> value, or TENSOR for `optim.NAME.KEY`


class OptimizerState(Struct, frozen=True, forbid_unknown_fields=True):
    """What an optimizer is, has in its groups, and keeps of each parameter."""

    kind: str  # name of the class
    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]  # parameters of each group
    state: SavedState


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is made of."""

    form: int
    generation: str
    model: str  # name of the class
    step: Size | None
    files: tuple[StoredFile, ...]
    tensors: dict[str, Stored]
    optimizer: OptimizerState | None
    numbers: dict[str, int] = {}  # those that dropout draws: where they are


class Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest with its own hash."""

    sha256: _Hash
    manifest: Manifest


def key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """What a rectangle is called in its file."""
    return name if box == ((0,) * len(shape), shape) else f"{name}@{','.join(map(str, box[0]))}"


# --- writing --------------------------------------------------------------------------------------


def begin(folder: Path) -> str:
    """Make room; the name of the new generation."""
    folder.mkdir(parents=True, exist_ok=True)
    there = os.path.lexists(folder / MANIFEST)
    if there and not any(FILE.fullmatch(name) for name in os.listdir(folder)):
        raise CheckpointError("there is a manifest.json of something else", where=str(folder),
                              fix="save into another folder")
    try:
        sweep(folder, read(folder).generation if there else "")
    except CheckpointError as error:
        log.warning("what is saved replaces a checkpoint that cannot be read: %s", error)
    return secrets.token_hex(8)


def note_name(generation: str, rank: int) -> str:
    """The file in which a rank that saves beside training says what it has written."""
    return f"{generation}-{rank}.json"


def sweep(folder: Path, kept: str = "", rank: int = 0, size: int = 1) -> None:
    """Remove files of all generations but the kept one, as no manifest names them any more. Each
    rank removes its share, as freeing much memory of the disk's cache takes time."""
    for name in os.listdir(folder):
        found = FILE.fullmatch(name) or _DRAFT.fullmatch(name) or _NOTE.fullmatch(name)
        if found and (found[1] != kept or found.re is _NOTE) and int(found[2] or 0) % size == rank:
            (folder / name).unlink(missing_ok=True)


def commit(folder: Path, manifest: Manifest) -> None:
    """Make this the checkpoint of the folder, by one rename: before it, the old one is in force."""
    check(manifest, folder)
    for file in manifest.files:
        _same_size(folder, file)
    data = files.encode(Sealed(_hash(manifest), manifest))
    files.decode(data, Sealed, where=str(folder))  # it can be read again
    draft = folder / f"manifest.{manifest.generation}"
    with durable(draft) as out:
        out.write(data)
    sync(folder)
    draft.rename(folder / MANIFEST)
    sync(folder)


def _hash(manifest: Manifest) -> str:
    return hashlib.sha256(files.encode(manifest)).hexdigest()


# --- reading --------------------------------------------------------------------------------------


def read(folder: Path) -> Manifest:
    """A manifest that says of itself that it is whole, and that makes sense."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise CheckpointError(
            "no readable checkpoint: there is no manifest.json", where=str(folder),
            fix="give the folder that model.save() wrote (as weights= also safetensors files); how "
            "one of the old form, with .metadata, is loaded docs/guide/save_and_load.md shows",
        )
    with open_regular(path) as file:
        data = file.read(files.MAX_BYTES + 1)
    try:
        sealed = files.decode(data, Sealed, where=str(path))
    except FileError as error:
        raise damaged(error.what, path) from error
    if _hash(sealed.manifest) != sealed.sha256:
        raise damaged("what it says is not what was written", path)
    check(sealed.manifest, path)
    return sealed.manifest


def check(manifest: Manifest, where: Path) -> None:
    """Every element of every tensor lies in one file, once."""
    if manifest.form != FORM:
        raise CheckpointError(f"form {manifest.form}, this version reads {FORM}", where=str(where),
                              fix="read it with the version that wrote it")
    names = [file.name for file in manifest.files]
    found = [FILE.fullmatch(name) for name in names]
    if len(set(names)) < len(names) or any(m is None or m[1] != manifest.generation for m in found):
        raise damaged("its files are not of one generation", where)
    for name, stored in manifest.tensors.items():
        if stored.dtype not in DTYPES:
            raise damaged(f"{name!a} is of type {stored.dtype!a}", where)
        if any(piece.file >= len(names) for piece in stored.pieces) or not _covered(stored):
            raise damaged(f"the pieces of {name!a} do not make up a tensor of {stored.shape}",
                          where)
    state = manifest.optimizer.state if manifest.optimizer else {}
    said = {f"optim.{n}.{k}" for n, own in state.items() for k, v in own.items() if v == TENSOR}
    if said != {name for name in manifest.tensors if name.startswith("optim.")}:
        raise damaged("tensors of the optimizer's state are missing, or too many", where)


def _covered(stored: Stored) -> bool:
    """Whether the pieces lie inside, do not overlap, and are as many elements as the whole."""
    shape, boxes = stored.shape, [(p.offsets, p.sizes) for p in stored.pieces]
    whole = (0,) * len(shape), shape
    inside = all(len(box[0]) == len(box[1]) == len(shape) and common(box, whole) == box
                 for box in boxes)
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    dim = max(range(len(shape)), key=lambda d: len({o[d] for o, _ in boxes}), default=0)
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][dim : dim + 1]):
        active = [a for a in active if a[0][dim] + a[1][dim] > box[0][dim]]
        if any(common(a, box) for a in active):
            return False
        active.append(box)
    return True


def _same_size(folder: Path, file: StoredFile) -> None:
    path = folder / file.name
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
    if size != file.num_bytes:
        raise damaged(f"{size} bytes, {file.num_bytes} were written", path)


def verify(folder: Path, found: Iterable[StoredFile]) -> None:
    """Files are what was written, to the last byte."""
    for file in found:
        _same_size(folder, file)
        if sha256(folder / file.name) != file.sha256:
            raise damaged("its bytes are not those that were written", folder / file.name)


class Checkpoint:
    """A folder and its manifest: tensors by rectangles."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[int, TensorFile] = {}

    def _file(self, index: int) -> TensorFile:
        if index not in self._open:
            self._open[index] = TensorFile(self.folder / self.manifest.files[index].name)
        return self._open[index]

    def copies(self, name: str, box: Box, view: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What to copy to fill a view with a rectangle: (part of it, what belongs there, unread)"""
        stored = self.manifest.tensors[name]
        for piece in stored.pieces:
            own = piece.offsets, piece.sizes
            if part := common(box, own):
                called = key(name, own, stored.shape)
                source = self._file(piece.file).tensor(called, stored.dtype, piece.sizes)
                yield view[within(part, box)], source[within(part, own)]

    def whole(self, name: str) -> Tensor:
        stored = self.manifest.tensors[name]
        value = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")
        for target, source in self.copies(name, ((0,) * len(stored.shape), stored.shape), value):
            target.copy_(source)
        return value

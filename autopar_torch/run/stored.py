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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from torch import Tensor

from .. import files
from ..errors import CheckpointError, FileError
from ..shard.holdings import Box
from .jointly import by_first, jointly
from .tensorfile import DTYPES, Count, TensorFile, durable, open_regular, sha256, sync_folder
from .world import World

log = logging.getLogger("autopar_torch")
MANIFEST = "manifest.json"
FORM = 1
_FILE = re.compile(r"([0-9a-f]{16})-([0-9]{1,7})\.safetensors")
_DRAFT = re.compile(r"manifest\.([0-9a-f]{16})()")
OLD = ".metadata"  # of torch.distributed.checkpoint, which this package wrote before
_Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Piece(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A rectangle of a tensor, and the file that has it (a place in the manifest's list)."""

    file: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


class Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor, by the rectangles that make it up."""

    dtype: str
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]


class StoredFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file, and how to see that it is what was written."""

    name: str
    num_bytes: Count
    sha256: _Hash


class OptimizerState(Struct, frozen=True, forbid_unknown_fields=True):
    """What an optimizer is, has in its groups, and keeps of each parameter."""

    kind: str  # name of the class; "" if it is not known
    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]  # parameters of each group
    tensors: dict[str, tuple[str, ...]]  # parameter -> keys; the tensors are `optim.NAME.KEY`
    values: dict[str, dict[str, Any]]  # parameter -> key -> what is no tensor


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is made of."""

    form: int
    generation: str
    model: str  # name of the class
    files: tuple[StoredFile, ...]
    tensors: dict[str, Stored]
    optimizer: OptimizerState | None = None
    extra: dict[str, Any] = {}


class Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest with its own hash."""

    sha256: _Hash
    manifest: Manifest


def is_own(folder: Path) -> bool:
    """Whether there is a checkpoint, whole or not: others too call files manifest.json."""
    names = os.listdir(folder)
    if any(name == OLD or _FILE.fullmatch(name) or _DRAFT.fullmatch(name) for name in names):
        return True
    return MANIFEST in names and not any(name.endswith(".safetensors") for name in names)


def key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """What a rectangle is called in its file."""
    return name if box == ((0,) * len(shape), shape) else f"{name}@{','.join(map(str, box[0]))}"


# --- writing --------------------------------------------------------------------------------------


def begin(folder: Path) -> str:
    """Make room; the name of the new generation."""
    folder.mkdir(parents=True, exist_ok=True)
    there = os.path.lexists(folder / MANIFEST)
    if there and not any(_FILE.fullmatch(name) for name in os.listdir(folder)):
        raise CheckpointError("there is a manifest.json of something else", where=str(folder),
                              fix="save into another folder")  # fmt: skip
    try:
        sweep(folder, read(folder).generation if there else "")
    except CheckpointError as error:
        log.warning("what is saved replaces a checkpoint that cannot be read: %s", error)
    return secrets.token_hex(8)


def sweep(folder: Path, kept: str = "", rank: int = 0, size: int = 1) -> None:
    """Remove files of other generations than the one that is kept, which nobody knows any more:
    each rank its share, for freeing much memory of the disk's cache takes time."""
    for entry in list(os.scandir(folder)):
        found = _FILE.fullmatch(entry.name) or _DRAFT.fullmatch(entry.name)
        if found and found[1] != kept and int(found[2] or 0) % size == rank:
            Path(entry.path).unlink(missing_ok=True)


def commit(folder: Path, manifest: Manifest) -> None:
    """From here on this is the checkpoint."""
    check(manifest, str(folder))
    for file in manifest.files:
        _same_size(folder, file)
    data = files.encode(Sealed(_hash(manifest), manifest))
    if len(data) > files.MAX_BYTES:
        raise CheckpointError(f"a manifest of {len(data)} bytes, the limit is {files.MAX_BYTES}",
                              where=str(folder), fix="save under a plan with fewer parts"
                              )  # fmt: skip
    draft = folder / f"manifest.{manifest.generation}"
    with durable(draft) as out:
        out.write(data)
    sync_folder(folder)
    draft.rename(folder / MANIFEST)
    sync_folder(folder)


def _hash(manifest: Manifest) -> str:
    return hashlib.sha256(files.encode(manifest)).hexdigest()


# --- reading --------------------------------------------------------------------------------------


def read(folder: Path) -> Manifest:
    """A manifest that says of itself that it is whole, and that makes sense."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        old = (folder / OLD).exists()
        raise CheckpointError(
            "a checkpoint of the old form, whose files are programs" if old else
            "no readable checkpoint: there is no manifest.json", where=str(folder),
            fix=f"if you trust it: autopar convert {folder} NEW_FOLDER" if old else
            "give the folder that model.save() wrote",
        )  # fmt: skip
    with open_regular(path) as file:
        data = file.read(files.MAX_BYTES + 1)
    try:
        sealed = files.decode(data, Sealed, where=str(path))
    except (FileError, RecursionError) as error:
        what = error.what if isinstance(error, FileError) else str(error)
        raise _damaged(what, path) from error
    if _hash(sealed.manifest) != sealed.sha256:
        raise _damaged("what it says is not what was written", path)
    check(sealed.manifest, str(path))
    return sealed.manifest


def _damaged(what: str, where: Path | str) -> CheckpointError:
    return CheckpointError(f"damaged: {what}", where=str(where),
                           fix="load another checkpoint, or another copy of this one")  # fmt: skip


def check(manifest: Manifest, where: str) -> None:
    """Every element of every tensor lies in one file, once."""
    if manifest.form != FORM:
        raise CheckpointError(f"form {manifest.form}, this version reads {FORM}", where=where,
                              fix="read it with the version that wrote it")  # fmt: skip
    names = [file.name for file in manifest.files]
    found = [_FILE.fullmatch(name) for name in names]
    if len(set(names)) < len(names) or any(m is None or m[1] != manifest.generation for m in found):
        raise _damaged("its files are not of one generation", where)
    for name, stored in manifest.tensors.items():
        if stored.dtype not in DTYPES:
            raise _damaged(f"{name!a} is of type {stored.dtype!a}", where)
        if any(piece.file >= len(names) for piece in stored.pieces) or not _covered(stored):
            raise _damaged(f"the pieces of {name!a} do not make up a tensor of {stored.shape}",
                           where)  # fmt: skip
    state = manifest.optimizer.tensors if manifest.optimizer else {}
    expected = {f"optim.{name}.{k}" for name, keys in state.items() for k in keys}
    there = {name for name in manifest.tensors if name.startswith("optim.")}
    if expected != there:
        raise _damaged(f"optimizer state of {len(expected)} tensors, {len(there)} are there", where)


def _covered(stored: Stored) -> bool:
    """Whether the pieces lie inside, do not overlap, and are as many elements as the whole."""
    shape, boxes = stored.shape, [(p.offsets, p.sizes) for p in stored.pieces]
    inside = all(
        len(offsets) == len(sizes) == len(shape) and all(sizes)
        and all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes in boxes
    )  # fmt: skip
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    dim = max(range(len(shape)), key=lambda d: len({o[d] for o, _ in boxes}), default=0)
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][dim : dim + 1]):
        active = [a for a in active if a[0][dim] + a[1][dim] > box[0][dim]] if shape else active
        if any(overlap(a, box) is not None for a in active):
            return False
        active.append(box)
    return True


def overlap(a: Box, b: Box) -> Box | None:
    """What two rectangles have in common."""
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    if any(e <= s for s, e in zip(starts, ends, strict=True)):
        return None
    return starts, tuple(e - s for s, e in zip(starts, ends, strict=True))


def within(view: Tensor, box: Box, part: Box) -> Tensor:
    """The rectangle `part` of what holds the rectangle `box`."""
    pairs = zip(box[0], *part, strict=True)
    return view[tuple(slice(p - o, p - o + n) for o, p, n in pairs)]


def _same_size(folder: Path, file: StoredFile) -> None:
    path = folder / file.name
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
    if size != file.num_bytes:
        raise _damaged(f"{size} bytes, {file.num_bytes} were written", path)


class Checkpoint:
    """A checkpoint that was verified: its tensors by rectangles."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[int, TensorFile] = {}
        self._expected = _headers(manifest)

    def verify(self, indices: Iterable[int], hashes: bool) -> None:
        """That files are what the manifest says: sizes, headers, and every byte if `hashes`."""
        for index in indices:
            file = self.manifest.files[index]
            _same_size(self.folder, file)
            if hashes and sha256(self.folder / file.name) != file.sha256:
                raise _damaged("its bytes are not those that were written",
                               self.folder / file.name)  # fmt: skip
            self._file(index)

    def _file(self, index: int) -> TensorFile:
        if index not in self._open:
            opened = TensorFile(self.folder / self.manifest.files[index].name)
            has = {k: (slot.dtype, slot.shape) for k, slot in opened.slots.items()}
            if has != self._expected[index]:
                raise opened.damaged("it has other tensors than the manifest says")
            self._open[index] = opened
        return self._open[index]

    def open(self, name: str, box: Box) -> None:
        """Open the files that have a part of it: what is not there is noticed now."""
        for piece, _ in self._parts(name, box):
            self._file(piece.file)

    def fill(self, name: str, box: Box, view: Tensor) -> None:
        """Write a rectangle of a tensor into a view of that shape."""
        shape = self.manifest.tensors[name].shape
        for piece, part in self._parts(name, box):
            own = piece.offsets, piece.sizes
            source = self._file(piece.file).tensor(key(name, own, shape))
            within(view, box, part).copy_(within(source, own, part))

    def _parts(self, name: str, box: Box) -> Iterator[tuple[Piece, Box]]:
        for piece in self.manifest.tensors[name].pieces:
            part = overlap(box, (piece.offsets, piece.sizes))
            if part is not None:
                yield piece, part


def _headers(manifest: Manifest) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """What the header of every file must say."""
    found: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in manifest.files]
    for name, stored in manifest.tensors.items():
        for piece in stored.pieces:
            called = key(name, (piece.offsets, piece.sizes), stored.shape)
            found[piece.file][called] = (stored.dtype, piece.sizes)
    return found


def opened(world: World, folder: Path, verify: bool,
           reader: Callable[[Path], Manifest] = read) -> Checkpoint:  # fmt: skip
    """A checkpoint whose files were looked through by all ranks together."""
    manifest = by_first(world, Manifest, lambda: reader(folder))
    found = Checkpoint(folder, manifest)
    share = range(world.rank, len(manifest.files), world.size)
    jointly(world, type(None), lambda: found.verify(share, verify))
    return found

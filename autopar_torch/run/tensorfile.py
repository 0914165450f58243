"""One safetensors file: written as it streams, read by rectangles, and never trusted.

The form is a length of 8 bytes, a JSON header that names type, shape and place of every tensor,
and the bytes of the tensors one after the other.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from ..errors import CheckpointError

Size = Annotated[int, Meta(ge=0, le=2**60)]
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Slot(Struct, frozen=True, forbid_unknown_fields=True):
    """Where in the file a tensor lies, and what it is."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


def dtype_name(tensor: Tensor, name: str) -> str:
    """How files call the type of a tensor."""
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.dtype}, {tensor.layout}", where="save",
                              fix="files hold dense tensors of the usual types")
    return NAMES[tensor.dtype]


def damaged(what: str, where: Path | str) -> CheckpointError:
    return CheckpointError(f"damaged: {what}", where=str(where),
                           fix="load another checkpoint, or another copy of this one")


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk when the block ends."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """The size of the file and its sha256."""
    hashed, size = hashlib.sha256(), 0
    with durable(path) as file:
        for chunk in _chunks(tensors):
            hashed.update(chunk)
            file.write(chunk)
            size += len(chunk)
    return size, hashed.hexdigest()


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    slots, at = {}, 0
    for key, tensor in tensors.items():
        end = at + tensor.numel() * tensor.itemsize
        slots[key], at = Slot(dtype_name(tensor, key), tuple(tensor.shape), (at, end)), end
    header = msgspec.json.encode(slots)
    header = header.ljust(-(-len(header) // 8) * 8)  # tensors begin at whole words
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield cast(Any, flat.view(torch.uint8).numpy()).data


def sync(folder: Path) -> None:
    """Names of files are on the disk too."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading --------------------------------------------------------------------------------------


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """A regular file: no link (unless `follow`), folder, pipe or device."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return open(handle, "rb")
        os.close(handle)
        what = "it is no regular file"
    except (OSError, ValueError) as error:
        what = str(error)
    raise CheckpointError(f"cannot read: {what}", where=str(path), fix="take another copy of it")


class TensorFile:
    """An open file whose header has been found to be right."""

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        self.path = path
        with open_regular(path, follow=follow) as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            self.begin, self.slots = self._header(file)
            self._map = mmap.mmap(file.fileno(), self.num_bytes, access=mmap.ACCESS_COPY)

    def _header(self, file: BinaryIO) -> tuple[int, dict[str, Slot]]:
        length = int.from_bytes(file.read(8), "little")
        if self.num_bytes < 8 or length > min(MAX_HEADER_BYTES, self.num_bytes - 8):
            raise damaged(f"{self.num_bytes} bytes, and a header of {length}", self.path)
        try:
            entries = msgspec.json.decode(file.read(length), type=dict[str, Any])
            entries.pop("__metadata__", None)
            slots = msgspec.convert(entries, dict[str, Slot])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise damaged(f"the header: {error}", self.path) from error
        at = 0  # tensors lie one after the other, each as long as its type and shape say
        for name, slot in sorted(slots.items(), key=lambda item: item[1].data_offsets):
            begin, end = slot.data_offsets
            size = DTYPES[slot.dtype].itemsize if slot.dtype in DTYPES else 0
            if not size or begin != at or end - begin != math.prod(slot.shape) * size:
                raise damaged(f"{name[:60]!a} is at {begin} to {end}, and what is before it ends "
                              f"at {at}: {slot.dtype[:60]!a} {slot.shape}", self.path)
            at = end
        if at != self.num_bytes - 8 - length:
            raise damaged(f"{self.num_bytes - 8 - length} bytes of tensors, not {at}", self.path)
        return 8 + length, slots

    def tensor(self, key: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """A view of the file: what is not looked at is not read."""
        slot = self.slots.get(key)
        if slot is None or (slot.dtype, slot.shape) != (kind, shape):
            raise damaged(f"{key!a} is not there as {kind} {shape}", self.path)
        dtype, (begin, end) = DTYPES[slot.dtype], slot.data_offsets
        if begin == end:
            return torch.empty(slot.shape, dtype=dtype, device="cpu")
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin,
                               offset=self.begin + begin)
        raw = raw.clone() if (self.begin + begin) % dtype.itemsize else raw
        return raw.view(dtype).view(slot.shape)


def sha256(path: Path) -> str:
    """The hash of all bytes of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()

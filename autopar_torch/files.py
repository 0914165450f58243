"""The one JSON door: nouns go out atomically and come in checked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from .errors import FileError

T = TypeVar("T")
MAX_BYTES = 64 * 2**20


def encode(value: object) -> bytes:
    """The same bytes for equal values, in any process."""
    return msgspec.json.encode(value, order="deterministic")


def decode(data: bytes, kind: type[T], *, where: str = "bytes") -> T:
    """Bytes to a noun; unknown fields, wrong types and broken limits are refused by path."""
    if len(data) > MAX_BYTES:
        raise FileError(f"{len(data)} bytes of JSON, the limit is {MAX_BYTES}", where=where)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise FileError(
            f"not a valid {kind.__name__}: {error}",
            where=where,
            fix="write it with autopar_torch.files.save, or correct the field named above",
        ) from error


def save(value: object, path: str | os.PathLike[str]) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(encode(value), indent=2)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise FileError(f"cannot write: {error}", where=str(target)) from error


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read a noun from a file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"cannot read: {error}", where=str(path)) from error
    return decode(data, kind, where=str(path))

"""The one JSON door: nouns go out atomically and come in checked."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import FileError

T = TypeVar("T")
MAX_BYTES = 64 * 2**20
SHOWN = 60  # characters of a wrong value
BY_FILE = "write it with autopar_torch.files.save, or correct the field named above"


def encode(value: object) -> bytes:
    """The same bytes for equal values, in any process."""
    return msgspec.json.encode(value, order="deterministic")


def checked(value: object, kind: type[T], where: str) -> T:
    """What was given in Python, let in by the same door as a file."""
    try:
        data = json.dumps(msgspec.to_builtins(value), allow_nan=False).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"{_name(kind)}: {error}", where=where) from error
    names = ", ".join(getattr(kind, "__struct_fields__", ()))
    return decode(data, kind, where=where, fix=f"correct it{names and f'; there are {names}'}")


def decode(data: bytes, kind: type[T], *, where: str = "bytes", fix: str = BY_FILE) -> T:
    """Bytes to a noun; unknown fields, wrong types and broken limits are refused by path."""
    if len(data) > MAX_BYTES:
        raise FileError(f"too much for a {_name(kind)}, the limit is {MAX_BYTES} bytes",
                        where=where, fix="was another file meant?")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(
            f"{_name(kind)}: {error}{_found(data, str(error))}", where=where, fix=fix,
        ) from error


def _name(kind: type[T]) -> str:
    return getattr(kind, "__name__", str(kind))


def _found(data: bytes, message: str) -> str:
    """The value at the path that an error names."""
    try:
        value = msgspec.json.decode(data)
        for key, place in re.findall(r"\.(\w+)|\[(\d+)\]", message.partition("`$")[2]):
            value = value[key] if key else value[int(place)]
    except (LookupError, TypeError, ValueError, RecursionError):
        return ""  # no JSON, or below a key of a dict, whose name errors do not tell
    return "" if isinstance(value, (dict, list)) else f" (it is {json.dumps(value)[:SHOWN]})"


def save(value: object, path: str | os.PathLike[str]) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one."""
    target = Path(path)
    data = msgspec.json.format(encode(value), indent=2)
    decode(data, type(value), where=f"what was to be written to {target}")  # it can be read again
    try:
        if os.path.lexists(target) and not is_regular(target):  # a rename would replace it
            raise ValueError("there is something else than a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as beside:
            with (Path(beside) / "new").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(file.name).replace(target)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write: {error}", where=_shown(path)) from error


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether it is itself a file, no link to one."""
    return stat.S_ISREG(os.lstat(path).st_mode)


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read a noun from a file, in which every field is said once."""
    data = read(path)
    value = decode(data, kind, where=_shown(path))
    try:
        json.loads(data.decode(), object_pairs_hook=_once)
    except ValueError as error:
        raise FileError(f"{_name(kind)}: {error}", where=_shown(path)) from error
    return value


def read(path: str | os.PathLike[str]) -> bytes:
    """A regular file, hardly more of it than the limit; a pipe or a device has no end."""
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is no regular file")
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"cannot read: {error}", where=_shown(path),
                        fix="name a JSON file") from error


def _shown(path: object) -> str:
    return ascii(str(path)[:200]).strip("'")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ."""
    made = dict(pairs)
    names = [name for name, _ in pairs]
    if len(made) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice[:SHOWN]!r} is there twice")
    return made

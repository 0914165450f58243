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
LARGEST = {"Plan": 16 * 2**20, "Cluster": 16 * 2**20, "Hardware": 2**20}  # of some kinds
SHOWN = 60  # characters of a wrong value
# What a terminal obeys instead of showing it, as it is and as JSON escapes it.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    r"|(?<!\\)(?:\\\\)*\\(?:[bfr]|u00(?:0[0-8b-f]|1.|7f|[89].)|u20(?:0[ef]|2[a-e]|6[6-9]))",
    re.IGNORECASE,
)


def encode(value: object) -> bytes:
    """The same bytes for equal values, in any process."""
    return msgspec.json.encode(value, order="deterministic")


def checked(value: object, kind: type[T], where: str) -> T:
    """What was given in Python, let in by the same door as a file."""
    try:
        data = json.dumps(msgspec.to_builtins(value), allow_nan=False).encode()
        return decode(data, kind, where=where)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"not a valid {_name(kind)}: {error}", where=where) from error


def decode(data: bytes, kind: type[T], *, where: str = "bytes") -> T:
    """Bytes to a noun; unknown fields, wrong types and broken limits are refused by path."""
    limit = LARGEST.get(_name(kind), MAX_BYTES)
    if len(data) > limit:
        raise FileError(f"{len(data)} bytes of JSON, the limit is {limit}", where=where,
                        fix=f"no {_name(kind)} is so large; was another meant?")  # fmt: skip
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(
            f"not a valid {_name(kind)}: {error}{_found(data, str(error))}",
            where=where,
            fix="write it with autopar_torch.files.save, or correct the field named above",
        ) from error


def _name(kind: type[T]) -> str:
    return getattr(kind, "__name__", str(kind))


def _found(data: bytes, message: str) -> str:
    """The value at the path that an error names."""
    path = re.search(r"at `\$(\S*)`$", message)
    if path is None:
        return ""
    try:
        value = msgspec.json.decode(data)
        for key, place in re.findall(r"\.(\w+)|\[(\d+)\]", path[1]):
            value = value[key] if key else value[int(place)]
    except (LookupError, TypeError, ValueError, RecursionError):
        return ""  # below a key of a dict, whose name errors do not tell
    return f" (it is {_short(value)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)[: SHOWN + 1]
    return ascii(text[:SHOWN] + "..." if len(text) > SHOWN else text).strip("'")


def save(value: object, path: str | os.PathLike[str]) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one."""
    target = Path(path)
    data = msgspec.json.format(encode(value), indent=2)
    decode(data, type(value), where=f"what was to be written to {target}")  # it can be read again
    temporary = ""
    try:
        _refuse_special(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
        temporary = ""
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write: {error}", where=str(target)) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _refuse_special(target: Path) -> None:
    """A rename replaces whatever is there: only a regular file may be."""
    if os.path.lexists(target) and not is_regular(target):
        raise FileError(
            "cannot write: there is something else than a regular file",
            where=str(target), fix="name a file, not a folder, link or device",
        )  # fmt: skip


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether it is itself a file, no link to one."""
    return stat.S_ISREG(os.lstat(path).st_mode)


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read a noun from a file: text of a limited size, without what JSON leaves open."""
    where, data = _shown(path), read(path, _name(kind))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"not UTF-8: {error}", where=where) from error
    if found := _CONTROL.search(text):
        raise FileError(f"a control character {found[0]!a} at character {found.start()}",
                        where=where, fix="texts in files are plain")  # fmt: skip
    value = decode(data, kind, where=where)
    try:
        json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise FileError(f"not a valid {_name(kind)}: {error}", where=where,
                        fix="keep one of them") from error  # fmt: skip
    return value


def _shown(path: object) -> str:
    return ascii(str(path)[:200]).strip("'")


def read(path: str | os.PathLike[str], kind: str) -> bytes:
    """A regular file and no more of it than the limit; a pipe or a device has no end."""
    limit = LARGEST.get(kind, MAX_BYTES)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError("it is no regular file")
            data = file.read(limit + 1)
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"cannot read: {error}", where=_shown(path),
                        fix=f"name the JSON file of a {kind}") from error  # fmt: skip
    if len(data) > limit:
        raise FileError(f"{about.st_size} bytes, the limit is {limit}",
                        where=_shown(path))  # fmt: skip
    return data


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice[:SHOWN]!r} is there twice")
    return made

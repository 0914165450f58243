"""What commands have in common: options as values, the user's model, results on stdout."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from .. import files
from ..errors import FileError, PlanError
from .shown import clear

MOST_BYTES = 2**50
SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MODEL = "module:function or file.py:function; it is run, and returns (model, inputs)"


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as the Python API takes it."""
    pins: dict[str, Any] = {"memory_bytes": num_bytes(options.memory)} if options.memory else {}
    for pin in options.pin:
        name, _, value = pin.partition("=")
        name = name.replace("-", "_")
        if not value or value == "null" or name in pins:
            raise PlanError(f"--pin {pin}: it says nothing, or {name} is pinned already",
                            where="--pin", fix="write --pin tp=2, each name once (--memory pins "
                            "memory_bytes)")
        pins[name] = _value(value)
    return {"global_batch_size": options.global_batch_size, "precision": options.precision,
            "constraints": pins}


def place(options: argparse.Namespace, cluster: str = "") -> Any:
    """The machines that were named; `cluster`: one of several."""
    from ..find.offline import place_of

    return place_of(cluster or options.cluster, options.network)


def _value(text: str) -> Any:
    """The value of a pin: a number or a text, but nothing that JSON lacks, like NaN."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def refuse_said(options: argparse.Namespace, *names: str) -> None:
    """Refuse what a plan says itself."""
    if any(getattr(options, name) for name in names):
        raise PlanError("a plan says all of that itself", where=", ".join(f"--{n}" for n in names),
                        fix="leave them out, or edit the plan")


def nodes(text: str) -> str:
    """How many nodes, at least and at most."""
    found = re.fullmatch(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text, re.ASCII)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!a} is no number of nodes like 1:4")
    return text


def count(text: str) -> int:
    """For argparse, which names the option."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!a} is no number from 1 to 999999999")
    return int(text)


def seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{0,9})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!a} is no number of seconds from 0 to 999999")
    return float(text)


def num_bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) *([kmg]?i?b?)", text.lower(), re.ASCII)
    size = int(float(match[1]) * SIZES.get(match[2], 0)) if match else 0
    if not 0 < size <= MOST_BYTES:
        raise PlanError(f"{text[:80]!a} is no size up to {MOST_BYTES} bytes", where="--memory",
                        fix="write 70GiB or 70GB")
    return size


def model_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its inputs, from code that is run."""
    return made_by(options.model)


def made_by(text: str) -> tuple[Any, Any]:
    """What a function returns that is named on the command line."""
    place, _, name = text.rpartition(":")
    if not place:
        raise PlanError(f"{text!r} names no function", where="MODEL", fix=MODEL)
    try:
        made = getattr(_module(place), name)()
    except (Exception, SystemExit) as error:  # whatever the code does
        last = traceback.extract_tb(error.__traceback__)[-1]
        missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
        raise FileError(f"{text}: {type(error).__name__}: {error}",
                        where="MODEL" if last.filename[:1] == "<" or last.filename == __file__ else
                        f"{last.filename}:{last.lineno}",
                        fix=f"pip install {missing}, if that is a package" if missing else MODEL,
                        ) from error
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise FileError(f"{text} returned {type(made).__name__}", where="MODEL", fix=MODEL)
    return made[0], made[1]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    sys.path.insert(0, str(Path(place).resolve().parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refuse_out(options: argparse.Namespace) -> None:
    """Refuse, before any work, an output path where something is that may not be replaced."""
    out = getattr(options, "out", None)
    if out and os.path.lexists(out) and not (options.force and files.is_regular(out)):
        fix = "add --force" if files.is_regular(out) else "name a file"
        raise FileError(f"{out} is there already", where="--out", fix=fix)


def save(value: Any, options: argparse.Namespace) -> None:
    if options.out:
        files.save(value, options.out)


def show(value: Any) -> int:
    clear()
    print(json.dumps(value, indent=1), flush=True)
    return 0


def lines(rows: Iterable[str]) -> int:
    text = plain("\n".join(rows))
    clear()
    print(text, flush=True)
    return 0


def plain(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)

"""A folder per step, of which the newest stay."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from . import stored
from .jointly import by_first
from .stored import MANIFEST, Checkpoint, Manifest
from .tensorfile import sync_folder
from .world import World

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def target(folder: Path, step: int | None, keep: int | None) -> Path:
    """Where a checkpoint goes."""
    if step is None and keep is None:
        return folder
    if step is None:
        raise CheckpointError("keep= without a step", where="save",
                              fix="save(folder, opt, step=100, keep=3)")  # fmt: skip
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step < 10**18:
        raise CheckpointError(f"step={step!r} is no step", where="save",
                              fix="step=100 is written to FOLDER/step-100")  # fmt: skip
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep={keep!r} checkpoints cannot be kept", where="save",
                              fix="keep=3 keeps the newest three")  # fmt: skip
    return folder / f"step-{operator.index(step)}"


def room(folder: Path, goal: Path) -> Path:
    """The same folder is not used for checkpoints with steps and without."""
    if goal == folder:
        if steps := committed(folder):
            raise CheckpointError(f"there are checkpoints by step, like step-{steps[0]}",
                                  where=str(folder), fix="save with step=, or into another folder"
                                  )  # fmt: skip
    elif os.path.lexists(folder / MANIFEST):
        raise CheckpointError("there is a checkpoint without a step", where=str(folder),
                              fix="save with step= into another folder")  # fmt: skip
    elif goal.is_symlink():
        raise CheckpointError("it is a symbolic link", where=str(goal),
                              fix="save into another folder")  # fmt: skip
    return goal


def committed(folder: Path) -> list[int]:
    """Steps with a manifest, the newest first."""
    return sorted((n for n in _all(folder) if os.path.lexists(folder / f"step-{n}" / MANIFEST)),
                  reverse=True)  # fmt: skip


def _all(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    found = [(_STEP.fullmatch(entry.name), entry) for entry in os.scandir(folder)]
    return [int(name[1]) for name, entry in found if name and entry.is_dir()]


def prune(folder: Path, newest: Path, keep: int | None) -> None:
    """Keep what was just committed and the newest before it; let go of what never was committed."""
    if keep is None:
        return
    others = [n for n in committed(folder) if folder / f"step-{n}" != newest]
    stay = {newest, *(folder / f"step-{n}" for n in others[: keep - 1])}
    for old in (folder / f"step-{n}" for n in _all(folder)):
        if old not in stay and not old.is_symlink():
            _remove(old)


def _remove(folder: Path) -> None:
    """First it is no checkpoint any more, then it goes; files of others stay."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)
    stored.sweep(folder)
    if not any(os.scandir(folder)):
        folder.rmdir()


def number(manifest: Manifest) -> int | None:
    step = manifest.extra.get("step")
    return step if isinstance(step, int) else None


def opened(world: World, folder: Path, verify: bool = True) -> Checkpoint:
    """The checkpoint of a folder, or its newest step; a damaged one is not passed over."""
    place = Path(by_first(world, str, lambda: str(_newest(folder))))
    reader: Callable[[Path], Manifest] = stored.read if place == folder else _of_its_step
    try:
        return stored.opened(world, place, verify, reader)
    except CheckpointError as error:
        if place == folder:
            raise
        whole = by_first(world, str, lambda: _whole_before(folder, place))
        fix = f"{whole} is whole: load {folder / whole}" if whole else "no older one is whole"
        raise CheckpointError(error.what, where=error.where, fix=fix) from error


def _newest(folder: Path) -> Path:
    steps = committed(folder)
    if not steps:
        return folder
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"a checkpoint without a step lies beside step-{steps[0]}",
                              where=str(folder), fix="load one of the folders step-N, or move "
                              "manifest.json away")  # fmt: skip
    return folder / f"step-{steps[0]}"


def _of_its_step(folder: Path) -> Manifest:
    manifest = stored.read(folder)
    if folder.is_symlink() or f"step-{number(manifest)}" != folder.name:
        raise CheckpointError(f"it is a link, or of step {number(manifest)}", where=str(folder),
                              fix="give the folder of the checkpoint itself")  # fmt: skip
    return manifest


def _whole_before(folder: Path, damaged: Path) -> str:
    """The newest older step that is whole, or nothing."""
    for step in committed(folder):
        place = folder / f"step-{step}"
        if place == damaged:
            continue
        try:
            found = Checkpoint(place, _of_its_step(place))
            found.verify(range(len(found.manifest.files)), True)
        except (CheckpointError, OSError):
            continue
        return place.name
    return ""

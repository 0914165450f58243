"""A folder per step, of which the newest stay."""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path

from ..errors import CheckpointError
from . import stored
from .stored import MANIFEST, Checkpoint, Manifest
from .tensorfile import sync
from .world import World

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def target(folder: Path, step: int | None, keep: int | None) -> Path:
    """Where a checkpoint goes."""
    if step is None and keep is None:
        return folder
    for name, value, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        known = hasattr(value, "__index__") and not isinstance(value, bool)
        if not known or not least <= operator.index(value) < 10**18:  # type: ignore[arg-type]
            raise CheckpointError(f"{name}={value!r} is no number from {least}", where="save",
                                  fix="save(folder, opt, step=100, keep=3) writes FOLDER/step-100 "
                                  "and keeps the newest three")
    return folder / f"step-{step}"


def room(folder: Path, goal: Path) -> Path:
    """The same folder is not used for checkpoints with steps and without."""
    by_step = goal != folder
    for wrong, what in (
        (not by_step and committed(folder), "there are checkpoints by step"),
        (by_step and os.path.lexists(folder / MANIFEST), "there is a checkpoint without a step"),
        (by_step and goal.is_symlink(), "it is a symbolic link"),
    ):
        if wrong:
            raise CheckpointError(what, where=str(goal), fix="save into another folder")
    return goal


def _all(folder: Path) -> list[Path]:
    """Folders of steps, the newest first; no links."""
    entries = list(os.scandir(folder)) if folder.is_dir() else []
    found = [_STEP.fullmatch(e.name) for e in entries if e.is_dir(follow_symlinks=False)]
    return [folder / f"step-{n}" for n in sorted((int(m[1]) for m in found if m), reverse=True)]


def committed(folder: Path) -> list[Path]:
    """The folders of steps that have a manifest."""
    return [place for place in _all(folder) if os.path.lexists(place / MANIFEST)]


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Keep what was just committed and the newest before it; let go of what never was committed."""
    others = [place for place in committed(folder) if place != newest]
    for old in _all(folder):
        if old not in (newest, *others[: keep - 1]):
            _remove(old)


def _remove(folder: Path) -> None:
    """First it is no checkpoint any more, then it goes; files of others stay."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sync(folder)
    stored.sweep(folder)
    if not any(os.scandir(folder)):
        folder.rmdir()


def newest(folder: Path) -> Path | None:
    """Where the checkpoint of a folder is, or that of its newest step, if there is any."""
    return folder if os.path.lexists(folder / MANIFEST) else next(iter(committed(folder)), None)


def opened(world: World, folder: Path) -> Checkpoint:
    """The checkpoint of a folder, or its newest step, looked through by all ranks together; a
    damaged one is not passed over."""
    place = Path(world.by_first(str, lambda: str(newest(folder) or folder)))
    try:
        manifest = world.by_first(Manifest, lambda: stored.read(place))
        share = manifest.files[world.rank :: world.size]
        world.jointly(lambda: stored.verify(place, share))
        return Checkpoint(place, manifest)
    except CheckpointError as error:
        if place == folder:
            raise
        whole = world.by_first(str, lambda: _whole_before(folder))
        fix = f"{whole} is whole: load that" if whole else "no older one is whole"
        raise CheckpointError(error.what, where=error.where, fix=fix) from error


def _whole_before(folder: Path) -> str:
    """The newest older step that is whole, or nothing."""
    for place in committed(folder):
        try:
            stored.verify(place, stored.read(place).files)
        except CheckpointError:
            continue
        return str(place)
    return ""

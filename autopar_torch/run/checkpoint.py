"""Checkpoints that any plan can load: what a model and its optimizer put into one and take out.

A parameter and its optimizer state lie in it under the parameter's first name, as rectangles of the
full tensor; a rank that loads takes those of its own plan. Nothing is changed unless all fits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor
from torch.optim import Optimizer

from ..errors import AutoparError, CheckpointError
from ..shard.holdings import Box
from . import optimizers, plainly, steps, stored
from .background import Writing
from .full_state import same_shape
from .params import Held, ParamStore
from .randomness import OwnNumbers
from .sharded import Sharded, local as local_of, mark
from .spread import views
from .stored import TENSOR, Manifest, SavedState, Stored
from .tensorfile import DTYPES, dtype_name, write
from .world import World

Folder = str | os.PathLike[str]


class Rectangles(NamedTuple):
    """Rectangles of a full tensor, each with the view of this rank's part that is it."""

    name: str
    shape: tuple[int, ...]  # full
    local: Tensor
    pieces: list[tuple[Box, Tensor]]


class Written(Struct, frozen=True):
    """What one rank wrote, and what it knows of its parameters' state."""

    file: stored.StoredFile
    tensors: dict[str, Stored]
    state: SavedState


@contextlib.contextmanager
def _named(verb: str, where: Path, fix: str) -> Iterator[None]:
    """Errors say what could not be done."""
    try:
        yield
    except AutoparError as error:
        raise CheckpointError(f"cannot {verb}: {error.what}", where=error.where or str(where),
                              fix=error.fix or fix) from error


# --- which rank has what --------------------------------------------------------------------------


def _own(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, or of something cut like it, as a plain tensor."""
    return local_of(tensor).detach()


def _part(store: ParamStore, held: Held, name: str, local: Tensor, saving: bool) -> Rectangles:
    """Views of this rank's part by rectangle: all of it, or when saving only the atoms that this
    rank speaks for, so that every element is saved once. Writing to a view writes to the part."""
    boxes = [box for box in held.boxes() if all(box[1])]
    found = store.spoken(held, local) if saving else zip(boxes, views(local, boxes), strict=True)
    return Rectangles(name, held.shape, local, [(box, view) for box, view in found if all(box[1])])


def _whole(name: str, tensor: Tensor, here: bool) -> Rectangles:
    """A tensor that every rank has as it is; not every rank saves it."""
    shape = tuple(tensor.shape)
    box = (0,) * len(shape), shape
    return Rectangles(name, shape, tensor, [(box, tensor.detach())] if here and all(shape) else [])


def _of_model(store: ParamStore, saving: bool) -> Iterator[Rectangles]:
    for held in store.held.values():
        yield _part(store, held, f"model.{held.name}", _own(held.tensor), saving)
    for name, tensor in store.tensors.items():
        if name not in store.holdings and not tensor.is_meta:
            yield _whole(f"model.{name}", tensor, not saving or store.world.rank == 0)


# --- saving ---------------------------------------------------------------------------------------


def save(store: ParamStore, numbers: OwnNumbers, folder: Folder,
         optimizer: Optimizer | None = None, step: int | None = None,
         keep: int | None = None, background: bool = False) -> Writing | None:
    """Every rank writes what it speaks for; rank 0 commits when all is on the disk. What is written
    in the background is a copy, and what is returned is waited for before the next call."""
    world, root = store.world, Path(folder)
    target = steps.target(root, step, keep)
    number = None if step is None else int(step)  # also of numpy
    hint = "make room or choose another folder; what was committed there before still is"
    with _named("save", target, hint):
        generation = world.by_first(str, lambda: stored.begin(steps.room(root, target)))
        path = target / f"{generation}-{world.rank}.safetensors"
        settings = None if optimizer is None else _settings(store, optimizer)
        state = numbers.state()

        def commit(written: Sequence[Written]) -> None:
            manifest = _manifest(type(store.module).__name__, settings, generation, number, written)
            stored.commit(target, replace(manifest, numbers=state))
            if keep is not None:
                steps.prune(root, target, keep)

        own = world.jointly(lambda: _collected(store, optimizer, path, background))
        if background:
            writing = Writing(target, generation, world.rank, world.size,
                              lambda: world.watch.verdict is not None)

            def end(written: Sequence[Written]) -> None:
                commit(written)
                stored.sweep(target, generation)

            writing.begin(own.write, end)
            return writing
        try:
            written = world.everyones(world.jointly(own.write), Written)
        except AutoparError:
            path.unlink(missing_ok=True)
            raise
        world.by_first(type(None), lambda: commit(written))
        world.jointly(lambda: stored.sweep(target, generation, world.rank, world.size))
        return None


class Collected(NamedTuple):
    """What one rank will write."""

    path: Path
    pieces: dict[str, Tensor]
    tensors: dict[str, Stored]
    state: SavedState

    def write(self) -> Written:
        file = stored.StoredFile(self.path.name, *write(self.path, self.pieces))
        return Written(file, self.tensors, self.state)


@torch.no_grad()
def _collected(store: ParamStore, optimizer: Optimizer | None, path: Path,
               copy: bool) -> Collected:
    """Views of all that this rank saves, or copies in the memory of the host."""
    tensors: dict[str, Stored] = {}
    found: dict[str, Tensor] = {}
    cuts, state = [*_of_model(store, True)], _state(store, optimizer)
    for held, values in state:
        for key, value in values.items():
            if isinstance(value, Tensor):
                name, first = f"optim.{held.name}.{key}", store.speaker(held.name)
                cuts.append(_part(store, held, name, _own(value), True)
                            if isinstance(value, Sharded) else
                            _whole(name, value, first == store.world.rank))
    for cut in sorted(cuts, key=lambda cut: (-cut.local.itemsize, cut.name)):  # at whole words
        pieces = [(stored.StoredPart(store.world.rank, *box), view) for box, view in cut.pieces]
        tensors[cut.name] = Stored(dtype_name(cut.local, cut.name), cut.shape,
                                   tuple(piece for piece, _ in pieces))
        found |= {stored.key(cut.name, (p.offsets, p.sizes), cut.shape): v for p, v in pieces}
    if len(found) < sum(len(cut.pieces) for cut in cuts):
        raise CheckpointError("two parts of it would have one name", where=str(path),
                              fix="leave @ out of names of parameters")
    if copy:
        found = {key: view.to("cpu", copy=True) for key, view in found.items()}
    return Collected(path, found, tensors,
                     {held.name: _said(held, values) for held, values in state})


def _state(store: ParamStore, optimizer: Optimizer | None) -> list[tuple[Held, dict[str, Any]]]:
    """What the optimizer keeps of the parameters that this rank has a part of."""
    known = {id(held.tensor): held for held in store.held.values()}
    state = {} if optimizer is None else optimizer.state
    return [(known[id(param)], values) for param, values in state.items() if id(param) in known]


def _said(held: Held, values: dict[str, Any]) -> dict[str, Any]:
    where = f"the optimizer's state of {held.name}"
    return {key: TENSOR if isinstance(value, Tensor) else plainly.plain(value, f"{where}: {key}")
            for key, value in values.items()}


def _manifest(kind: str, settings: stored.OptimizerState | None, generation: str,
              step: int | None, written: Sequence[Written]) -> Manifest:
    """What all ranks wrote, as one."""
    tensors: dict[str, Stored] = {}
    state: SavedState = {}
    for own in written:
        for name, found in own.tensors.items():
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = Stored(found.dtype, found.shape, (*before, *found.pieces))
        state |= {name: {**values, **state.get(name, {})} for name, values in own.state.items()}
    return Manifest(stored.FORM, generation, kind, step, tuple(own.file for own in written),
                    tensors, settings and replace(settings, state=state))


def _settings(store: ParamStore, optimizer: Optimizer) -> stored.OptimizerState:
    """Of the optimizer, but for the state of each parameter."""
    groups = tuple({k: plainly.plain(v, f"group {i} of the optimizer: {k}")
                    for k, v in group.items() if k != "params"}
                   for i, group in enumerate(optimizer.param_groups))
    names = _members(store, optimizer)
    return stored.OptimizerState(type(optimizer).__name__, groups, names, {})


def _members(store: ParamStore, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    names = {id(tensor): name for name, tensor in store.tensors.items()}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise CheckpointError("the optimizer has parameters that are not the model's",
                              fix="make it of model.parameters()")
    return tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)


# --- loading --------------------------------------------------------------------------------------


class Fitting(NamedTuple):
    """All that loading will do, once it is known that everything fits."""

    copies: list[tuple[Tensor, Tensor]]  # to, from
    state: dict[Tensor, dict[str, Any]]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]


def load(store: ParamStore, numbers: OwnNumbers, folder: Folder,
         optimizer: Optimizer | None = None) -> int | None:
    """Every rank reads the rectangles of its own plan; the number of the step, if it has one. With
    an optimizer training goes on, and so do the numbers that it draws."""
    world = store.world
    with _named("load", Path(folder), "give another checkpoint, or another copy of this one"):
        found = steps.opened(world, Path(folder))
        fitting = world.jointly(lambda: _fitting(store, optimizer, found))
        world.jointly(lambda: _take(optimizer, fitting))
    if optimizer is not None and found.manifest.numbers:
        numbers.load(found.manifest.numbers)
    return found.manifest.step


@torch.no_grad()
def _take(optimizer: Optimizer | None, fitting: Fitting) -> None:
    for target, source in fitting.copies:
        target.copy_(source)
    if optimizer is not None:
        for group, saved in fitting.groups:
            for param in group["params"]:
                optimizer.state.pop(param, None)
            group |= {key: plainly.like(value, group.get(key)) for key, value in saved.items()}
        optimizer.state.update(fitting.state)
        optimizers.learn(optimizer)


def known(world: World, folder: Folder) -> int | None:
    """The step of a checkpoint that is whole, if it has one."""
    with _named("load", Path(folder), "give another checkpoint, or another copy of this one"):
        return steps.opened(world, Path(folder)).manifest.step


def _fitting(store: ParamStore, optimizer: Optimizer | None, found: stored.Checkpoint) -> Fitting:
    manifest, cuts = found.manifest, [*_of_model(store, False)]
    _same_names(store, {cut.name for cut in cuts}, manifest)
    fitting, saved = Fitting([], {}, []), manifest.optimizer
    if optimizer is not None:
        if saved is None:
            raise CheckpointError("it was saved without an optimizer",
                                  fix="load(folder) loads the model alone")
        groups = _same_groups(store, optimizer, saved)
        fitting.groups.extend(zip(optimizer.param_groups, groups, strict=True))
        cuts += _fit_state(store, optimizer, found, saved.state, fitting)
    for cut in cuts:
        there, here = manifest.tensors[cut.name], dtype_name(cut.local, cut.name)
        same_shape(cut.name, there.shape, cut.shape, str(found.folder))
        if here != there.dtype:
            raise CheckpointError(f"{cut.name} is {there.dtype} there, {here} here",
                                  fix="build the model in that type, or give the folder as "
                                  "weights= to parallelize, which converts")
        fitting.copies.extend(copy for box, view in cut.pieces
                              for copy in found.copies(cut.name, box, view))
    return fitting


def _same_names(store: ParamStore, own: set[str], manifest: Manifest) -> None:
    here = own | {f"model.{name}" for name in store.holdings}
    there = {name for name in manifest.tensors if name.startswith("model.")}
    if here != there:
        shown = ", ".join(name.removeprefix("model.") for name in sorted(here ^ there)[:3])
        raise CheckpointError(
            f"{len(here - there)} tensors of the model are not in it, {len(there - here)} in it "
            f"are not in the model, first {shown} (it is of a {manifest.model!a})",
            fix="load it into the model that it was saved from",
        )


def _same_groups(store: ParamStore, optimizer: Optimizer,
                 saved: stored.OptimizerState) -> list[dict[str, Any]]:
    """What was saved of each group, if the optimizer is the same."""
    kind, here, there = type(optimizer).__name__, _members(store, optimizer), saved.names
    missing = sorted(k for k in optimizer.defaults if any(k not in own for own in saved.groups))
    sizes = [", ".join(str(len(own)) for own in side) for side in (there, here)]
    if saved.kind != kind:
        what = f"state of {saved.kind!a}, the optimizer is {kind}"
    elif [set(own) for own in here] != [set(own) for own in there]:
        what = f"groups of {sizes[0]} parameters there, of {sizes[1]} here, or of others"
    elif missing:
        what = f"its groups have other settings there than here: {', '.join(missing[:3])}"
    else:
        return [{key: plainly.parsed(v) for key, v in own.items()} for own in saved.groups]
    raise CheckpointError(what, fix="build the optimizer with the same class and groups, or "
                          "load(folder) without it")


def _fit_state(store: ParamStore, optimizer: Optimizer, found: stored.Checkpoint, saved: SavedState,
               fitting: Fitting) -> Iterator[Rectangles]:
    """Room for what was saved of each parameter: this rank's part, or all."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param, name in zip(params, sum(_members(store, optimizer), ()), strict=True):
        held = store.held.get(name)
        if name not in saved:
            continue
        own = fitting.state[param] = {}
        for key, value in saved[name].items():
            if value != TENSOR:
                own[key] = plainly.parsed(value)
                continue
            called = f"optim.{name}.{key}"
            there, local = found.manifest.tensors[called], _own(param)
            like = there.shape == tuple(param.shape) != ()
            cpu = key == "step" and not any(optimizer.defaults.get(k)
                                            for k in ("capturable", "fused"))
            room = torch.empty(
                local.shape if like else there.shape,
                dtype=DTYPES[there.dtype],
                device="cpu" if cpu else local.device,
            )  # as torch does
            if not like:
                yield _whole(called, room, True)
            elif held is not None:
                yield _part(store, held, called, room.detach(), False)
            own[key] = mark(room, param.spread) if like and isinstance(param, Sharded) else room

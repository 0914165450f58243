"""Checkpoints that any plan can load: what a model and its optimizer put into one and take out.

A parameter and its optimizer state lie in it under the parameter's first name, as rectangles of the
full tensor; whoever loads takes the rectangles of its own plan. Nothing is changed unless all fits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from ..errors import CheckpointError
from ..shard.holdings import Box
from . import optimizers, plainly, steps, stored
from .jointly import by_first, jointly
from .params import Held
from .sharded import Sharded, local as local_of, mark
from .spread import views
from .state import same_shape, spoken
from .stored import Checkpoint, Manifest, OptimizerState, Piece, Stored, StoredFile
from .tensorfile import DTYPES, Spec, dtype_name, write

if TYPE_CHECKING:
    from .model import ParallelModel

Folder = str | os.PathLike[str]


class Part(NamedTuple):
    """A rectangle of a full tensor, and a view of what this rank has of it."""

    name: str
    box: Box
    view: Tensor
    full: tuple[int, ...]


class Written(Struct, frozen=True):
    """What one rank wrote, and what it knows of its parameters' state."""

    file: StoredFile
    tensors: dict[str, Stored]
    keys: dict[str, tuple[str, ...]]
    values: dict[str, dict[str, Any]]


# --- which rank has what --------------------------------------------------------------------------


def _own(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, or of something cut like it, as a plain tensor."""
    return local_of(tensor).detach()


def _parts(name: str, held: Held, local: Tensor) -> list[Part]:
    """All that this rank has, by rectangles (views, so loading writes into the part)."""
    boxes = [box for box in held.boxes() if all(box[1])] if all(held.shape) else [_all(held.shape)]
    pairs = zip(boxes, views(local, boxes), strict=True)
    return [Part(name, box, view, held.shape) for box, view in pairs]


def _spoken(model: ParallelModel, held: Held, name: str, local: Tensor) -> list[Part]:
    """Of what this rank has, what it writes: over all ranks every element once."""
    if not all(held.shape):
        return _parts(name, held, local)
    return [Part(name, box, view, held.shape) for box, view in spoken(model, held, local)
            if all(box[1])]  # fmt: skip


def _whole(name: str, tensor: Tensor) -> list[Part]:
    """A tensor that every rank has as it is."""
    box = _all(tuple(tensor.shape))
    return [Part(name, box, tensor.detach(), box[1])]


def _all(shape: tuple[int, ...]) -> Box:
    return (0,) * len(shape), shape


def _unsplit(model: ParallelModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.store.tensors.items()
            if name not in model.store.holdings and not tensor.is_meta}  # fmt: skip


def _names(model: ParallelModel) -> dict[int, str]:
    return {id(t): n for n, t in model.store.tensors.items()}


def _state(
    model: ParallelModel, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[Held, dict[str, Any]]]:
    """What the optimizer keeps of the parameters that this rank has a part of."""
    names = _names(model)
    for param, values in ({} if optimizer is None else optimizer.state).items():
        held = model.store.held.get(names.get(id(param), ""))
        if held is not None:
            yield held, values


# --- saving ---------------------------------------------------------------------------------------


def save(model: ParallelModel, folder: Folder, optimizer: torch.optim.Optimizer | None = None,
         step: int | None = None, keep: int | None = None,
         extra: Mapping[str, Any] | None = None) -> None:  # fmt: skip
    """Every rank writes what it speaks for; rank 0 commits when all is on the disk."""
    world, target = model.store.world, steps.target(Path(folder), step, keep)
    marks = {**(extra or {}), **({} if step is None else {"step": step})}
    try:
        generation = by_first(world, str, lambda: stored.begin(steps.room(Path(folder), target)))
        written = _written(model, optimizer, target, generation)

        def commit() -> None:
            stored.commit(target, _manifest(model, optimizer, generation, written, marks))

        def let_go() -> None:
            stored.sweep(target, generation, world.rank, world.size)
            if world.rank == 0:
                steps.prune(Path(folder), target, keep)

        by_first(world, type(None), commit)
        jointly(world, type(None), let_go)
    except CheckpointError as error:
        fix = error.fix or "make room or choose another folder"
        raise CheckpointError(
            f"cannot save: {error.what}", where=error.where or str(target),
            fix=f"{fix}; what was committed there before still is",
        ) from error  # fmt: skip


def _written(model: ParallelModel, optimizer: torch.optim.Optimizer | None, folder: Path,
             generation: str) -> list[Written]:  # fmt: skip
    """What every rank wrote, or an error on every rank and no file of any."""
    path = folder / f"{generation}-{model.world.rank}.safetensors"
    try:
        with torch.no_grad():
            return jointly(model.world, Written, lambda: _write(model, optimizer, path))
    except CheckpointError:
        path.unlink(missing_ok=True)
        raise


def _write(model: ParallelModel, optimizer: torch.optim.Optimizer | None, path: Path) -> Written:
    keys, values = _keys(model, optimizer)
    parts = sorted(_all_parts(model, optimizer), key=lambda part: (part.name, part.box))
    specs: dict[str, Spec] = {}
    tensors: dict[str, Stored] = {}
    for part in parts:
        dtype = dtype_name(part.view, part.name)
        pieces = tensors[part.name].pieces if part.name in tensors else ()
        if all(part.full):  # of nothing there is no piece
            pieces = (*pieces, Piece(model.world.rank, *part.box))
            specs[stored.key(part.name, part.box, part.full)] = dtype, part.box[1]
        tensors[part.name] = Stored(dtype, part.full, pieces)
    if len(specs) < sum(len(found.pieces) for found in tensors.values()):
        raise CheckpointError("two parts of it would have one name", where=str(path),
                              fix="leave @ out of names of parameters")  # fmt: skip
    size, digest = write(path, specs, (part.view for part in parts if all(part.full)))
    return Written(StoredFile(path.name, size, digest), tensors, keys, values)


def _all_parts(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> Iterator[Part]:
    for held in model.store.held.values():
        yield from _spoken(model, held, f"model.{held.name}", _own(held.tensor))
    if model.world.rank == 0:
        for name, tensor in _unsplit(model).items():
            yield from _whole(f"model.{name}", tensor)
    for held, values in _state(model, optimizer):
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield from _state_parts(model, held, f"optim.{held.name}.{key}", _own(value))


def _state_parts(model: ParallelModel, held: Held, name: str, value: Tensor) -> list[Part]:
    local = _own(held.tensor)
    if value.dim() and value.shape == local.shape:
        return _spoken(model, held, name, value)
    if value.numel() > 1 and tuple(local.shape) != held.shape:
        raise CheckpointError(
            f"{name} is {tuple(value.shape)}, the part of the parameter {tuple(local.shape)}: "
            "it cannot be put together", where="save",
            fix="save without this optimizer, or train under a plan that leaves it whole (tp=1, "
            "zero=0)",
        )  # fmt: skip
    first = model.store.holdings[held.name][0].rank == model.world.rank
    return _whole(name, value) if first else []


def _keys(model: ParallelModel, optimizer: torch.optim.Optimizer | None
          ) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, Any]]]:  # fmt: skip
    """Of each parameter with state: keys of the tensors in it, and what is no tensor."""
    keys, plain = {}, {}
    for held, values in _state(model, optimizer):
        where = f"the optimizer's state of {held.name}"
        keys[held.name] = tuple(k for k, v in values.items() if isinstance(v, Tensor))
        plain[held.name] = {k: plainly.plain(v, f"{where}: {k}") for k, v in values.items()
                            if not isinstance(v, Tensor)}  # fmt: skip
    return keys, plain


def _manifest(model: ParallelModel, optimizer: torch.optim.Optimizer | None, generation: str,
              written: list[Written], extra: dict[str, Any]) -> Manifest:  # fmt: skip
    """What all ranks wrote, as one."""
    tensors: dict[str, Stored] = {}
    keys: dict[str, tuple[str, ...]] = {}
    values: dict[str, dict[str, Any]] = {}
    for own in written:
        for name, found in own.tensors.items():
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = Stored(found.dtype, found.shape, (*before, *found.pieces))
        keys, values = {**own.keys, **keys}, {**own.values, **values}
    state = None if optimizer is None else _settings(model, optimizer, keys, values)
    marks = {k: plainly.plain(v, f"extra: {k}") for k, v in extra.items()}
    return Manifest(stored.FORM, generation, type(model.module).__name__,
                    tuple(own.file for own in written), tensors, state, marks)  # fmt: skip


def _settings(model: ParallelModel, optimizer: torch.optim.Optimizer,
              keys: dict[str, tuple[str, ...]], values: dict[str, dict[str, Any]]
              ) -> OptimizerState:  # fmt: skip
    groups = tuple({k: plainly.plain(v, f"group {i} of the optimizer: {k}")
                    for k, v in group.items() if k != "params"}
                   for i, group in enumerate(optimizer.param_groups))  # fmt: skip
    return OptimizerState(type(optimizer).__name__, groups, _members(model, optimizer), keys,
                          values)  # fmt: skip


def _members(model: ParallelModel, optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], ...]:
    names = _names(model)
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise CheckpointError("the optimizer has parameters that are not the model's",
                              fix="make it of model.parameters()")  # fmt: skip
    return tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)


# --- loading --------------------------------------------------------------------------------------


class Fitting(NamedTuple):
    """All that loading will do, once it is known that everything fits."""

    parts: list[Part]
    state: dict[Tensor, dict[str, Any]]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]


def load(model: ParallelModel, folder: Folder, optimizer: torch.optim.Optimizer | None = None,
         strict: bool = True, verify: bool = True) -> int | None:  # fmt: skip
    """Every rank reads the rectangles of its own plan; the number of the step, if it has one."""
    found = steps.opened(model.world, Path(folder), verify)
    fitting: list[Fitting] = []

    def fit() -> None:
        fitting.append(_fitting(model, optimizer, found, strict))
        for part in fitting[0].parts:
            found.open(part.name, part.box)

    jointly(model.world, type(None), fit)
    with torch.no_grad():
        jointly(model.world, type(None), lambda: _take(found, optimizer, fitting[0]))
    return steps.number(found.manifest)


def _take(found: Checkpoint, optimizer: torch.optim.Optimizer | None, fitting: Fitting) -> None:
    for part in fitting.parts:
        found.fill(part.name, part.box, part.view)
    if optimizer is not None:
        for param in [p for group in optimizer.param_groups for p in group["params"]]:
            optimizer.state.pop(param, None)
        for param, own in fitting.state.items():
            optimizer.state[param] = {key: _whole_again(param, v) for key, v in own.items()}
        optimizers.learn(optimizer)
        for group, saved in fitting.groups:
            group |= {k: plainly.revived(v, group.get(k)) for k, v in saved.items()}


def _whole_again(param: Tensor, value: Any) -> Any:
    """State that is cut like its parameter stands for the whole, as the parameter does."""
    if not (isinstance(param, Sharded) and isinstance(value, Tensor) and value.dim()):
        return value
    return mark(value, param.spread) if value.shape == local_of(param).shape else value


def _fitting(model: ParallelModel, optimizer: torch.optim.Optimizer | None, found: Checkpoint,
             strict: bool) -> Fitting:  # fmt: skip
    there, where = found.manifest.tensors, str(found.folder)
    if strict:
        _same_names(model, found.manifest, where)
    parts = [part for part in _model_parts(model) if part.name in there]
    for part in parts:
        same_shape(part.name, there[part.name].shape, part.full, where)
        _same_type(part, there[part.name], where)
    fitting = Fitting(parts, {}, [])
    saved = found.manifest.optimizer
    if optimizer is not None:
        if saved is None:
            raise CheckpointError("it was saved without an optimizer", where=where,
                                  fix="load(folder) loads the model alone")  # fmt: skip
        fitting.groups.extend(_same_groups(model, optimizer, saved, where, strict))
        _fit_state(model, optimizer, found, fitting)
    return fitting


def _model_parts(model: ParallelModel) -> Iterator[Part]:
    for held in model.store.held.values():
        yield from _parts(f"model.{held.name}", held, _own(held.tensor))
    for name, tensor in _unsplit(model).items():
        yield from _whole(f"model.{name}", tensor)


def _same_names(model: ParallelModel, manifest: Manifest, where: str) -> None:
    here = {f"model.{name}" for name in (*model.store.holdings, *_unsplit(model))}
    there = {name for name in manifest.tensors if name.startswith("model.")}
    for names, what in ((here - there, "of the model are not in it"),
                        (there - here, "in it are not in the model")):  # fmt: skip
        if names:
            shown = ", ".join(name.removeprefix("model.") for name in sorted(names)[:3])
            raise CheckpointError(
                f"{len(names)} tensors {what}, first {shown} (it is of a {manifest.model!a})",
                where=where,
                fix="load it into the model that it was saved from, or with strict=False what both "
                "have",
            )  # fmt: skip


def _same_type(part: Part, there: Stored, where: str) -> None:
    here = dtype_name(part.view, part.name)
    if here != there.dtype:
        raise CheckpointError(f"{part.name} is {there.dtype} there, {here} here", where=where,
                              fix="build the model in the type that it was saved in, or give the "
                              "folder as weights= to parallelize, which converts")  # fmt: skip


def _same_groups(model: ParallelModel, optimizer: torch.optim.Optimizer, saved: OptimizerState,
                 where: str, strict: bool
                 ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:  # fmt: skip
    """Groups of the optimizer, each with what was saved of it."""
    fix = "build the optimizer with the same class and groups, or load(folder) without it"
    if saved.kind not in ("", type(optimizer).__name__):
        raise CheckpointError(f"state of {saved.kind!a}, the optimizer is "
                              f"{type(optimizer).__name__}", where=where, fix=fix)  # fmt: skip
    here, there = _members(model, optimizer), saved.names
    if not strict:
        both = {n for own in here for n in own} & {n for own in there for n in own}
        here, there = (tuple(tuple(n for n in own if n in both) for own in side)
                       for side in (here, there))  # fmt: skip
    if [set(own) for own in here] != [set(own) for own in there] or len(there) != len(saved.groups):
        raise CheckpointError(
            f"groups of {', '.join(str(len(own)) for own in there)} parameters there, of "
            f"{', '.join(str(len(own)) for own in here)} here, or of others",
            where=where, fix=fix,
        )  # fmt: skip
    for index, (group, values) in enumerate(zip(optimizer.param_groups, saved.groups, strict=True)):
        if strange := _strange(optimizer, group, values, bool(saved.kind)):
            raise CheckpointError(f"group {index} has other settings there than here: "
                                  f"{', '.join(strange[:3])}", where=where, fix=fix)  # fmt: skip
        yield group, values


def _strange(optimizer: torch.optim.Optimizer, group: dict[str, Any], saved: dict[str, Any],
             known: bool) -> list[str]:  # fmt: skip
    """Settings that tell of another optimizer; what schedulers add may be there or not."""
    if known:
        return sorted(optimizer.defaults.keys() - saved.keys())
    needed = {k for k in optimizer.defaults if group[k] is not None}  # None was left out
    return sorted((needed - saved.keys()) | (saved.keys() - group.keys() - {"initial_lr"}))


def _fit_state(model: ParallelModel, optimizer: torch.optim.Optimizer, found: Checkpoint,
               fitting: Fitting) -> None:  # fmt: skip
    """Room for this rank's part of what was saved of its parameters."""
    saved = found.manifest.optimizer
    if saved is None:
        return
    known = {name for own in saved.names for name in own}
    if stray := sorted({*saved.tensors, *saved.values} - known):
        raise CheckpointError(f"state of {stray[0]!a}, which is in no group",
                              where=str(found.folder), fix="load(folder) loads the model alone"
                              )  # fmt: skip
    names = _names(model)
    for group in optimizer.param_groups:
        for param in group["params"]:
            held = model.store.held.get(names.get(id(param), ""))
            if held is None or held.name not in {*saved.tensors, *saved.values}:
                continue
            own = {k: plainly.revived(v, None) for k, v in saved.values.get(held.name, {}).items()}
            for key in saved.tensors.get(held.name, ()):
                parts, own[key] = _room(held, group, key, found)
                fitting.parts.extend(parts)
            fitting.state[param] = own


def _room(held: Held, group: dict[str, Any], key: str, found: Checkpoint
          ) -> tuple[list[Part], Tensor]:  # fmt: skip
    """Room for one tensor of the state: cut like the parameter, or whole."""
    name = f"optim.{held.name}.{key}"
    there, local = found.manifest.tensors[name], _own(held.tensor)
    dtype = DTYPES[there.dtype]
    if there.shape and there.shape == held.shape:
        value = torch.empty(local.shape, dtype=dtype, device=local.device)
        return _parts(name, held, value), value
    if math.prod(there.shape) > 1 and tuple(local.shape) != held.shape:
        raise CheckpointError(
            f"{name} is {there.shape}, the parameter {held.shape}: it cannot be cut",
            where=str(found.folder), fix="load without the optimizer, or under a plan that leaves "
            "parameters whole (tp=1, zero=0)",
        )  # fmt: skip
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))  # as torch does
    value = torch.empty(there.shape, dtype=dtype, device="cpu" if on_cpu else local.device)
    return _whole(name, value), value

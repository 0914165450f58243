"""Model and call -> one flat fx graph, for a batch of `ROWS` rows of tensors without data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, compiler, fx, nn
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram, _trace as exporting
from torch.export.graph_signature import InputKind

from ..errors import AutoparError, PlanError, TraceError
from ..model import ROWS, ParamInfo
from . import opaque, picks, settled
from .burnt import LIBRARIES, Read, tensors_of
from .caches import without
from .call import Call
from .casts import Casts
from .checks import passed
from .decisions import Decisions, LearntError
from .each_op import TooLongError, each_op
from .effects import Effects, attributes_set, refuse_large, refuse_sparse
from .encoders import as_without_a_trace
from .form import Form, LossFn, Named, outputs_of
from .functions import refuse_unseen, watched
from .row_branches import Answers, asking, min_max

log = logging.getLogger("autopar_torch")
_PREFIX = "model."
Told = tuple[tuple[str, ...], Form]  # names and form of the outputs
Exported = tuple[ExportedProgram, Told]


@dataclass(frozen=True)
class InputSource:
    """What a placeholder stands for."""

    kind: str  # "input", "param", "buffer", "const"
    name: str


@dataclass(frozen=True)
class Captured:
    """The flat graph, what its placeholders are, and the names of its outputs."""

    graph: fx.Graph
    module: nn.Module  # holds submodules of the graph, if any
    sources: dict[str, InputSource]
    outputs: tuple[str, ...]
    form: Form  # the structure of what the model returns
    reads: frozenset[Read]  # attributes of modules that forward has read
    consts: dict[str, Tensor]
    autocast: torch.dtype | None  # what was computed with, where it was traced under autocast
    answers: Answers  # what forward asked of the number of rows
    decided: tuple[bool, ...]  # the answers to what it asked of values, which are outputs, too
    least_rows: int  # that have to be tried, as there are numbers that hold for so many


class _Exporting:
    """Whether torch exports: torch and transformers mean whether there are values. Other code may
    compute something else then, so it runs as it does without a trace."""

    def __bool__(self, depth: int = 1) -> bool:
        asking = sys._getframe(depth).f_globals.get("__name__")
        return f"{asking}.".startswith(LIBRARIES)

    def __or__(self, other: Any) -> Any:
        return self.__bool__(2) | other

    def __eq__(self, other: object) -> bool:
        return self.__bool__(2) == other

    __hash__ = None  # type: ignore[assignment]


class _Flat(nn.Module):
    """Takes tensors only, returns a tuple of tensors only: what export can digest."""

    def __init__(self, effects: Effects, call: Call, loss_fn: LossFn | None,
                 wanted: tuple[str, ...] | None,
                 tell: Callable[[tuple[tuple[str, ...], Form]], None],
                 dtype: torch.dtype | None, rows: int, answers: Answers,
                 decisions: Decisions) -> None:
        super().__init__()
        self.dtype, self.rows, self.answers = dtype, rows, answers
        self.decisions = decisions
        self.model, self.call, self.wanted = effects.model, call, wanted
        self.outputs = functools.partial(outputs_of, effects.model, loss_fn)  # which has no names
        self.effects, self.grads = effects, torch.is_grad_enabled()
        self.tell = tell  # export undoes changes of attributes, so names leave by a callback

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        casts = Casts(self.dtype) if self.dtype else contextlib.nullcontext()
        self.decisions.begin()
        flags = dict.fromkeys(("_is_compiling_flag", "_is_exporting_flag"), _Exporting())
        with (casts, self.effects.none(), _grads(self.grads), attributes_set(compiler, **flags),
              asking(self.call.num_rows, self.rows, self.answers)):
            form, named = self.outputs(*self.call.rebuild(tensors))
        names = tuple(named) if self.wanted is None else _choose(named, self.wanted)
        self.tell(((*names, *self.decisions.names), form))
        whole = (x.clone() if isinstance(x := named[n], nn.Parameter) else x for n in names)
        outputs = (*whole, *self.effects.kept)  # a parameter is an output of no block
        refuse_unseen(outputs)
        return (*outputs[:len(names)], *self.decisions.asked, *self.effects.kept)


@contextlib.contextmanager
def _grads(enabled: bool) -> Iterator[None]:
    """As around the call: export enables gradients, and would record that they are not."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


def _choose(named: dict[str, Tensor], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """What is wanted; all that there is, where it is to be a loss and that is made outside."""
    if not named:
        raise PlanError("no tensor is found in what the model returns", where="forward",
                        fix="return tensors in a tuple, list, dict or dataclass")
    missing = [name for name in wanted if name not in named]
    if any(name != "loss" for name in missing):
        raise PlanError(f"the model returns no {', '.join(missing)}, only {', '.join(named)}",
                        where="outputs=")
    return tuple(named) if missing else wanted


def first_names(model: nn.Module) -> dict[int, str]:
    """Identity of every parameter and buffer -> its first name."""
    return {id(tensor): name for name, tensor in reversed(tensors_of(model).items())}


def describe_params(model: nn.Module) -> dict[str, ParamInfo]:
    """Every parameter and buffer once, with its further names."""
    tensors, names = tensors_of(model), dict[int, list[str]]()
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {
        name: ParamInfo(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad,
                        not isinstance(t, nn.Parameter), tuple(others))
        for name, *others in names.values() for t in (tensors[name],)
    }


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """torch warns of attributes that forward sets, which are looked after here, and logs pages of
    ops that do not run, which the error names."""
    fakes = logging.getLogger("torch._subclasses.fake_tensor")
    with warnings.catch_warnings(), attributes_set(fakes, disabled=True):
        warnings.filterwarnings("ignore", "The tensor attribute")
        yield


@contextlib.contextmanager
def _fake_state(model: nn.Module, mode: FakeTensorMode, device: torch.device,
                shapes: dict[str, ParamInfo],
                dtype: torch.dtype | None) -> Iterator[None]:
    """Put tensors without data in the place of parameters and buffers while tracing."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    fakes: dict[int, Tensor] = {}
    names = first_names(model)
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in list(store.items()):
                if tensor is None:
                    continue
                saved.append((store, key, tensor))
                if id(tensor) not in fakes:
                    info = shapes.get(names[id(tensor)])
                    fakes[id(tensor)] = _fake(tensor, mode, device, info, dtype)
                store[key] = fakes[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for store, key, tensor in saved:
            store[key] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device, info: ParamInfo | None,
          dtype: torch.dtype | None) -> Tensor:
    shape = tensor.shape if info is None else info.shape
    is_param = isinstance(tensor, nn.Parameter)
    cast = dtype if dtype and is_param and tensor.is_floating_point() else tensor.dtype
    with mode:
        fake = torch.empty(shape, dtype=cast, device=device)
    if not is_param and shape == tensor.shape and not tensor.is_meta:
        fake.held = tensor  # type: ignore[attr-defined]
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_param else fake


def capture(model: nn.Module, call: Call, *, device: torch.device, loss_fn: LossFn | None,
            wanted: tuple[str, ...] | None, shapes: dict[str, ParamInfo],
            dtype: torch.dtype | None = None, most_opaque: int = 0, rows: int = ROWS) -> Captured:
    """Export without running, `dtype` for parameters if given. Modules that stop it become opaque,
    unless they would have to be cast."""
    paths: list[str] = []
    why: dict[str, str] = {}
    for tries_left in reversed(range(most_opaque + 1)):
        try:
            with opaque.stood_in(model, paths, rows):
                captured = _exported(model, call, rows, device, loss_fn, wanted, shapes, dtype)
        except TraceError as error:
            cause = error.__cause__
            path = (module_path(cause.node) if isinstance(cause, picks.UnknownSizeError)
                    else cause.path if isinstance(cause, LearntError)
                    else opaque.culprit(model, cause))
            path = path or (error.where if error.where in why else "")
            while any(f"{path}.".startswith(f"{own}.") for own in why):  # that was no help
                path = opaque.above(model, path)
            if (not path or not tries_left or dtype or call.autocast
                    or isinstance(cause, TooLongError)):
                raise
            found = opaque.alike(model, path)
            why |= dict.fromkeys(found, error.where)
            paths = [own for own in paths
                     if not own.startswith(tuple(f"{new}." for new in found))] + found
            continue
        for path in paths:
            log.warning("%s cannot be traced (%s), so it is computed whole", path, why[path])
        return captured
    raise AssertionError("the last try raises")


def _exported(model: nn.Module, call: Call, rows: int, device: torch.device,
              *how: Any) -> Captured:
    mode, effects = FakeTensorMode(allow_non_fake_inputs=True), Effects(model, how[0])
    answers: Answers = {}
    decisions = Decisions(model, call.decided)
    first, tensors = first_names(model), tensors_of(model)
    refuse_sparse(tensors.values(), "")
    names = {name: first[id(tensor)] for name, tensor in tensors.items()}

    def export(seen: Effects) -> Exported:
        return _program(seen, call, rows, device, mode, answers, decisions, *how)

    with effects.undone():
        program, told = export(effects)
        if effects.changed:
            program, told = _settled(effects, program, told, export, wanted=how[1])
    refuse_large(model, effects.reads)
    sources, consts = {}, {}
    places = program.graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, places, strict=True):
        source = _source(spec, names)
        sources[spec.arg.name] = source
        if source.kind == "const":
            consts[source.name] = program.constants[spec.target]
            effects.refuse_lost(node, consts[source.name], rows)
    return Captured(program.graph, program.graph_module, sources, *told, effects.reads, consts,
                    dict(call.autocast).get(device.type), answers, tuple(decisions.answers),
                    0 if all(isinstance(own, bool) for own in answers.values()) else call.num_rows)


def _settled(effects: Effects, first: ExportedProgram, told: Told,
             export: Callable[[Effects], Exported], wanted: tuple[str, ...] | None) -> Exported:
    """What forward changes must be the same after every forward, or something that it only leaves
    behind: that goes with the outputs."""
    given = first.graph.output_node().args[0]
    try:
        return _same_again(effects, first, told, export)
    except TraceError:
        if not (effects.left and effects.left_only):
            raise
    names, form = told
    numbers = {id(x): k for k, x in enumerate(effects.kept, len(names))}
    places = {path: numbers[id(x)] for path, x in effects.left.items() if isinstance(x, Tensor)
              and (wanted is None or x.dim() == 0)}  # training brings numbers together, no more
    first.graph.output_node().args = ((*given[:len(names)], *(given[k] for k in places.values())),)
    left = tuple((path, Named(path) if isinstance(x, Tensor) else x)
                 for path, x in effects.left.items())
    return first, ((*names, *places), dataclasses.replace(form, left=left))


def _same_again(effects: Effects, first: ExportedProgram, told: Told,
                export: Callable[[Effects], Exported]) -> Exported:
    """Each forward computes what the first does, as a second trace has to show. What it keeps
    depends on buffers, not on an input; in evaluation it may depend on parameters, and is made anew
    by each."""
    refusal = cast(TraceError, effects.changed)
    made = _take_kept(first.graph, len(effects.kept))
    state = [spec.arg.name for spec in first.graph_signature.input_specs
             if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    known = {node.name: value for node, value in _constants(first)}
    buffers = dict(effects.model.named_buffers(remove_duplicate=False))
    known |= {spec.arg.name: value for spec in first.graph_signature.input_specs
              if spec.kind is InputKind.BUFFER and type(  # no part of one
                  value := buffers[cast(str, spec.target).removeprefix(_PREFIX)]
              ) is Tensor and not value.is_meta}
    fixed = settled.constant(first.graph_module, list(made), known)
    values = fixed if fixed is not None or effects.model.training else settled.constant(
        first.graph_module, list(made), known, state)
    if values is None or any(size % ROWS == 0 for x in values for size in x.shape if size):
        raise refusal
    effects.settled(values)
    after = Effects(effects.model, effects.loss_fn)
    try:
        program, told_after = export(after)
    except TraceError as error:
        raise refusal from error
    read = {n: k for n, x in _constants(program) for k, y in enumerate(values) if x is y}
    if after.changed or not settled.same(first.graph, program.graph, made, read):
        raise refusal
    return (first, told) if fixed is None else (program, told_after)


def _take_kept(graph: fx.Graph, num: int) -> dict[fx.Node, int]:
    """The last outputs of a graph, which are what forward keeps; they are outputs no more."""
    output = graph.output_node()
    outputs = list(cast(tuple[fx.Node, ...], output.args[0]))
    output.args = (tuple(outputs[:len(outputs) - num]),)
    return {node: k for k, node in enumerate(outputs[len(outputs) - num:])}


def _constants(program: ExportedProgram) -> Iterator[tuple[fx.Node, Tensor]]:
    for node, spec in zip(program.graph.find_nodes(op="placeholder"),
                          program.graph_signature.input_specs, strict=True):
        if spec.target in program.constants:
            yield node, program.constants[spec.target]


def _program(effects: Effects, call: Call, rows: int, device: torch.device, mode: FakeTensorMode,
             answers: Answers, decisions: Decisions, loss_fn: LossFn | None,
             wanted: tuple[str, ...] | None, shapes: dict[str, ParamInfo],
             dtype: torch.dtype | None) -> Exported:
    """What export makes of one forward, and the names and form of its outputs."""
    told: list[tuple[tuple[str, ...], Form]] = []
    flat = _Flat(effects, call, loss_fn, wanted, told.append, dtype, rows, answers, decisions)
    flat.training = effects.model.training
    with (_fake_state(effects.model, mode, device, shapes, dtype), without(effects.model, call),
          call.surroundings(device), effects.seen(), each_op(), as_without_a_trace(), watched(),
          passed(decisions.of_tensor), decisions.of_numbers(), _unsaid(),
          attributes_set(exporting, print=lambda *_, **__: None),
          attributes_set(non_strict_utils, _tensor_min_max=min_max)):
        try:
            program = torch.export.export(flat, _inputs(call, rows, mode, device), strict=False)
            decisions.refuse_learnt(program, told[-1][0])
            picks.fold(program, bool(call.autocast))
        except AutoparError:
            raise
        except Exception as error:  # whatever it is: the model cannot be traced
            line = (str(error).strip().splitlines() or ["no message"])[0]
            long = isinstance(error, (TooLongError, LearntError))
            unknown = isinstance(error, picks.UnknownSizeError)
            in_front = not long and f"[{ROWS}," not in line  # else a size does not fit the rows
            free = "DataDependent" in type(error).__name__ or "data-dependent" in line
            fix = ("keep the size and mask: (x * mask).sum() / mask.sum() is x[mask].mean()"
                   if unknown else "compute it outside of the model: loss = loss_fn(model(x), y)"
                   if "DynamicOutput" in type(error).__name__ else
                   "avoid data-dependent Python control flow in forward" if free else
                   "see that forward runs as it is, and look for sizes written as numbers"
                   if in_front else
                   "where the sequence comes first, and the batch second, say batch_dim=1")
            stopped = "" if long or unknown else f"torch.export stopped: {type(error).__name__}: "
            told_of = TraceError(
                f"{stopped}{line}",
                where=(line_of(error.node) if isinstance(error, picks.UnknownSizeError)
                       else error.line if isinstance(error, LearntError) else "")
                or user_line(error), fix=fix)
            told_of.decided = tuple(decisions.answers)
            raise told_of from error
    return program, told[-1]


def line_of(node: fx.Node) -> str:
    """The user's line, as far as export tells it."""
    lines = (node.meta.get("stack_trace") or "").rstrip().split("\n")
    return " ".join(line.strip() for line in lines[-2:])


def module_path(node: fx.Node) -> str:
    """The module that a node of an exported graph was traced in."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("L['self'].").removeprefix("model").removeprefix(".")


def _inputs(call: Call, num_rows: int, mode: FakeTensorMode,
            device: torch.device) -> tuple[Tensor, ...]:
    with mode:
        return tuple(
            torch.empty((num_rows, *shape[1:]) if rows else shape, dtype=kind, device=device,
                        requires_grad=learns)
            for shape, kind, rows, learns in zip(call.shapes, call.dtypes, call.rows,
                                                 call.requires_grad, strict=True)
        )


def _source(spec: Any, names: dict[str, str]) -> InputSource:
    if spec.kind == InputKind.USER_INPUT:
        return InputSource("input", spec.arg.name)
    name = spec.target.removeprefix(_PREFIX)
    if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
        return InputSource("param" if spec.kind == InputKind.PARAMETER else "buffer", names[name])
    return InputSource("const", spec.target.replace(".", "_"))


def user_line(error: BaseException) -> str:
    """The innermost line that is not torch's own."""
    home = torch.__file__.rsplit("/", 1)[0]
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((home, "<")) and "autopar_torch/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "the model's forward"

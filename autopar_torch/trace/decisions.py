"""What Python decides by values of the batch: `if mask.any():`, `if n > 0:`, `if not self.ready:`.

A trace goes one way at each such question. What was asked goes with its outputs: it is computed
from each batch, and from buffers, before that runs. Where an answer is another, the call has
another trace. What depends on parameters or on chance is not known before, so it stops the trace.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from ..shard.rules import is_mutable, is_random, op_name, written_by
from .checks import passing
from .effects import attributes_set
from .picks import memory_of

DECIDED = "decided."  # names of such outputs begin so
_MOST = 8  # times that a question of one place is taken to be true, as of `while`
_TORCH = torch.__file__.rsplit("/", 1)[0]
_plain = torch.SymBool.__bool__


class LearntError(RuntimeError):
    """What is asked depends on what the model has learnt, or on chance."""

    def __init__(self, path: str, line: str) -> None:
        super().__init__("data-dependent control flow: a branch depends on what is computed with "
                         "parameters, or drawn")
        self.path, self.line = path, line


class Decisions:
    """Of one forward. `given`: the answers to its first questions; None: it may not ask."""

    def __init__(self, model: nn.Module, given: Sequence[bool] | None) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.given, self.allowed = tuple(given or ()), given is not None
        self.begin()

    def begin(self) -> None:
        self.asked: list[Any] = []
        self.answers: list[bool] = []
        self.places: list[tuple[str, str]] = []  # module and line that asked
        self._times = Counter[tuple[Any, int]]()

    @property
    def names(self) -> tuple[str, ...]:
        """Of what was asked, as outputs."""
        return tuple(f"{DECIDED}{k}" for k in range(len(self.asked)))

    def answer(self, question: Any, frame: FrameType) -> bool:
        """What is taken to be true, or was found to be."""
        place, number = (frame.f_code, frame.f_lasti), len(self.asked)
        self._times[place] += 1
        found = self.given[number] if number < len(self.given) else self._times[place] <= _MOST
        self.asked.append(question)
        self.answers.append(found)
        file, line = frame.f_code.co_filename, frame.f_lineno
        self.places.append((self._module(frame),
                            f"{file}:{line}: {linecache.getline(file, line).strip()}"))
        return found

    def _module(self, frame: FrameType | None) -> str:
        """The innermost module that runs."""
        while frame is not None:
            if path := self.paths.get(id(frame.f_locals.get("self")), ""):
                return path
            frame = frame.f_back
        return ""

    def of_tensor(self, value: Tensor, frame: FrameType, plain: Callable[[Tensor], Any]) -> Any:
        """Of `if tensor:`."""
        asks = self.allowed and not frame.f_code.co_filename.startswith(_TORCH)
        return self.answer(value.detach(), frame) if asks else plain(value)

    def of_numbers(self) -> AbstractContextManager[None]:
        """While it is entered: of `if x.item() > 0:`."""
        def decided(value: torch.SymBool) -> bool:
            frame = sys._getframe(1)
            while frame.f_back and frame.f_code.co_filename == torch.__file__:
                frame = frame.f_back
            if frame.f_code.co_filename == functional.__file__ and isinstance(
                    value.node.expr, sympy.Eq):
                return True  # it warns where sizes of a loss are not alike
            known = statically_known_true(value) or statically_known_true(torch.sym_not(value))
            if known or frame.f_code.co_filename.startswith(_TORCH):
                return _plain(value)
            if (good := passing(frame)) is not None:
                return good
            return self.answer(value, frame) if self.allowed else _plain(value)

        return attributes_set(torch.SymBool, __bool__=decided)

    def refuse_learnt(self, program: ExportedProgram, names: Sequence[str]) -> None:
        """What is known before the batch runs depends on inputs and buffers alone."""
        if not self.asked:
            return
        learnt = {spec.arg.name for spec in program.graph_signature.input_specs
                  if spec.kind is InputKind.PARAMETER}
        ends = dict(zip(names, program.graph.output_node().args[0], strict=False))  # type: ignore[arg-type]
        order = {node: k for k, node in enumerate(program.graph.nodes)}
        writes = [node for node in order if node.op == "call_function" and is_mutable(node)]
        for name, place in zip(self.names, self.places, strict=True):
            for node in above(ends[name]):
                read = frozenset[int]().union(*map(memory_of, node.all_input_nodes))
                written = any(read & memory_of(own) for write in writes
                              if order[write] < order[node] for own in written_by(write))
                if node.name in learnt or written or _is_unknown(node):
                    raise LearntError(*place)


def above(node: Any) -> Iterator[fx.Node]:
    """What a value is made of, and it itself."""
    stack, seen = [node], set[fx.Node]()
    while stack:
        node = stack.pop()
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            yield node
            stack += node.all_input_nodes


def _is_unknown(node: fx.Node) -> bool:
    """Whether it is drawn, asked for gradients, or made by a module that is one op."""
    value = node.meta.get("val")
    learns = node.op == "placeholder" and isinstance(value, Tensor) and value.requires_grad
    return learns or (node.op == "call_function" and (
        is_random(node) or is_mutable(node) or op_name(node) == "opaque"))

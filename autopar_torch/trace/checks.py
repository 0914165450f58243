"""Checks of values in forward (`if (x < 0).any(): raise ...`, or that warn): a trace has no
values, so they pass."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import linecache
import logging
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .effects import attributes_set

log = logging.getLogger("autopar_torch")
_TORCH = torch.__file__.rsplit("/", 1)[0]
_HOME = "autopar_torch/trace/"
_ITEM = Tensor.item
_SAYS = ("warnings", "warn", "logger", "logging", "log", "print")
Decide = Callable[[Tensor, FrameType, Callable[[Tensor], Any]], Any]
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RERAISE")


def passed(decide: Decide) -> contextlib.AbstractContextManager[None]:
    """While it is entered: where a value that is not known decides whether to raise or warn,
    forward goes on. It says once which checks are not made. Others have to `decide`."""
    return attributes_set(Tensor, __bool__=_known(Tensor.__bool__, decide),
                          item=_known(Tensor.item, decide))


def _known(plain: Callable[[Tensor], Any], decide: Decide) -> Callable[[Tensor], Any]:
    def known(value: Tensor) -> Any:
        frame = sys._getframe(1)
        if not isinstance(value, FakeTensor) or value.constant is not None or (
                plain is _ITEM and value.dtype != torch.bool) or _caught(frame):
            return plain(value)
        if (good := passing(frame)) is not None:
            return good
        return plain(value) if plain is _ITEM else decide(value, frame, plain)

    return known


def passing(frame: FrameType) -> bool | None:
    """The answer that a check which only raises or warns asks for; None where it is none."""
    good = None if _caught(frame) else _good(frame.f_code, frame.f_lasti)
    if good is not None:
        _say(frame.f_code.co_filename, frame.f_lineno)
    return good


def _caught(frame: FrameType | None) -> bool:
    """Whether forward itself would catch what is raised here, and go on in another way."""
    while frame and _HOME not in frame.f_code.co_filename:
        inside = not frame.f_code.co_filename.startswith(_TORCH)
        if inside and _in_try(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def _in_try(code: CodeType, at: int) -> bool:
    """`with` has a handler, too, which asks the manager first."""
    body: Any = dis.Bytecode(code)
    steps = list(body)
    handlers = {entry.target for entry in body.exception_entries if entry.start <= at < entry.end}
    return any(after.opname != "WITH_EXCEPT_START" for step, after in itertools.pairwise(steps)
               if step.offset in handlers)


@functools.cache
def _say(file: str, number: int) -> None:
    if not file.startswith(_TORCH):
        log.warning("not checked in a traced model: %s:%d: %s", file, number,
                    linecache.getline(file, number).strip())


def _good(code: CodeType, at: int) -> bool | None:
    """What the value asked for at this instruction has to be, so that it does not lead to a raise;
    None where it does something else."""
    steps = list(dis.get_instructions(code))
    here = max(k for k, step in enumerate(steps) if step.offset <= at)
    here += steps[here].opname == "CALL"  # of `item`
    here += steps[here].opname == "TO_BOOL"
    jump = steps[here].opname
    if not (jump.startswith("POP_JUMP") and jump.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    target = next(k for k, step in enumerate(steps) if step.offset == steps[here].argval)
    jumps_if = jump.endswith("IF_TRUE")
    if _raises(steps[here + 1:]) or _only_says(steps[here + 1:target]):
        return jumps_if
    return not jumps_if if _raises(steps[target:]) else None


def _only_says(steps: list[dis.Instruction]) -> bool:
    """Whether all that follows is warnings or lines in a log, one statement after another."""
    starts = steps[:1] + [after for step, after in itertools.pairwise(steps)
                          if step.opname == "POP_TOP"]
    speaks = [step.opname == "LOAD_GLOBAL" and step.argval in _SAYS for step in starts]
    return bool(speaks) and all(speaks) and not any(
        step.opname in _ENDS or "JUMP" in step.opname or step.opname.startswith("STORE")
        or step.opname == "RAISE_VARARGS" for step in steps)


def _raises(steps: list[dis.Instruction]) -> bool:
    """Whether a raise follows, and nothing else."""
    for step in steps:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname in _ENDS or "JUMP" in step.opname or step.opname.startswith("STORE"):
            return False
    return False

"""What is refused at the door: models that something else has split, and what would split ours."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import PlanError, RunError
from ..plan import Plan
from ..progress import warn
from .world import World

log = logging.getLogger("autopar_torch")

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule",
             "OptimizedModule", "ParallelModel")
_TAKEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_split(model: Any) -> None:
    """Refuse a model that something else already splits, compiles or trains."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"{type(model).__name__} is no torch.nn.Module", where="parallelize: model")
    for name, module in model.named_modules():
        found = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if found:
            raise PlanError(
                f"the model is already in {found}", where=_where(name),
                fix="pass the plain module: parallelize takes the place of DDP, FSDP and "
                "accelerate, and is called once, before torch.compile")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise PlanError(
                "a parameter is a DTensor: something else has split it", where=name,
                fix="pass the module before fully_shard or parallelize_module",
            )
    refuse_taken(model)


def take(model: nn.Module) -> None:
    """Note that the parameters of a model are parts from now on. What has none, as an activation,
    may be in several models."""
    _TAKEN.update(m for m in model.modules() if m is model or any(True for _ in m.parameters()))


def refuse_taken(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module in _TAKEN:
            raise PlanError("this module is already parallelized: its parameters are parts now",
                            where=_where(name), fix="use the model that the first call of "
                            "parallelize returned, or build the module again")


class Waiting(Protocol):
    """A model that makes its plan when it is called."""

    module: nn.Module
    _plan: Plan | None


_waiting: weakref.WeakSet[Any] = weakref.WeakSet()


def expect_call(model: Waiting) -> None:
    """Warn at the first step for a model that was never called: its gradients came otherwise."""
    _waiting.add(model)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for model in list(_waiting):
            if model._plan is None:
                mine = {id(p) for p in model.module.parameters() if p.grad is not None}
                if mine.isdisjoint(id(p) for own in optimizer.param_groups for p in own["params"]):
                    continue
                warn(log, "an optimizer steps, and the model was never called, so nothing is "
                          "split: methods other than forward run the module whole on every rank. "
                          "Give parallelize() a module whose forward calls the method")
            _waiting.discard(model)

    register_optimizer_step_pre_hook(before)


def _where(name: str) -> str:
    return f"parallelize: model{'.' if name else ''}{name}"


class Turns:
    """Calls of one model, of which no forward may be inside of another call."""

    def __init__(self, world: World) -> None:
        self.world, self.busy = world, False

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        before = self.busy
        if before and name != "backward":
            raise RunError("forward is called inside of another forward or backward of this model",
                           where="model(...)", fix="take torch.utils.checkpoint away from around "
                           "the model: to recompute is a part of its plan, "
                           "constraints={'recompute': True}")
        self.busy = True
        try:
            with self.world.doing(name):
                yield
        finally:
            self.busy = before


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse fully_shard, which gives a module another class, DDP around a module that has the
    model in it, which is in its own forward, and what writes down the ops of one rank."""
    if any(c.__name__ == "FSDPModule" for c in type(model).__mro__):
        raise no_wrapper("fully_shard")
    if torch._C._is_tracing() or torch.compiler.is_exporting():
        raise RunError("torch.jit.trace and torch.export see nothing of a parallelized model",
                       where="model(...)", fix="build the plain model again for them, with "
                       "load_state_dict(model.state_dict())")
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None and any(own is model for own in around.modules()):
        raise no_wrapper("DistributedDataParallel")


def asked_for() -> Exception:
    """Of what DDP asks for, which goes no further. Who looks at all attributes finds none."""
    is_ddp = sys._getframe(2).f_code.co_filename == inspect.getfile(DistributedDataParallel)
    return no_wrapper("DistributedDataParallel") if is_ddp else AttributeError("only DDP asks")


def no_wrapper(name: str) -> RunError:
    return RunError(f"{name} around a parallelized model would sum its gradients twice",
                    where=name, fix="use the model that parallelize returned as it is; with "
                    "accelerate, do not pass it to prepare()")


def no_copy() -> RunError:
    return RunError("a parallelized model cannot be copied or pickled: it is one part of many",
                    where="copy, pickle or torch.save of the model",
                    fix="torch.save(model.state_dict(), ...) on all ranks, or model.save(folder); "
                    "or copy.deepcopy(model)")


def refuse_replaced(names: Sequence[str]) -> None:
    if names:
        raise RunError(
            f"{_few(names)}: added, removed or replaced after the plan was made",
            where="parameters and buffers",
            fix="change them in place (with torch.no_grad(): p.copy_(...)), or build the module "
            "as it shall be before parallelize; functional_call takes model.module, which every "
            "rank runs whole")


@functools.cache
def tell_thawed(names: tuple[str, ...]) -> None:
    """ZeRO cuts what is trained when the plan is made."""
    if names:
        warn(log, "%s: trained now, and frozen when the plan was made, so ZeRO does not cut it: "
             "each rank keeps all of it, of its gradient and of the optimizer's state. To have it "
             "cut, make the first call, or pass example_inputs=, while it is trained", _few(names))


def refuse_other_numbers(now: Plan, then: Plan) -> None:
    """A move changes where numbers are computed, not how exactly."""
    for name in ("precision", "grad_dtype", "keeps_bfloat16"):
        here, there = getattr(now, name), getattr(then, name)
        if here != there:
            raise PlanError(f"{name} is {there}, and training goes on in {here}",
                            where="model.move", fix=f"give a plan with {name}={here}, or start "
                            "again with this one and load a checkpoint")


def refuse_moved(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
    """Refuse `.to()` and the like if they change type or device; tried on empty tensors."""
    for kind, device in dict.fromkeys((t.dtype, t.device) for t in tensors):
        with torch.no_grad():
            made = fn(torch.empty(0, dtype=kind, device=device))
        if (made.dtype, made.device) != (kind, device):
            raise RunError(
                f"the model was planned for {kind} on {device}, and is asked to become "
                f"{made.dtype} on {made.device}", where="model.to(), .half(), .cuda(), ...",
                fix="convert the module before parallelize, or ask for "
                "constraints={'precision': 'bfloat16'}; the device is that of the rank",
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

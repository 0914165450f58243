"""Gradients that have gradients: of a penalty on gradients, of an equation with derivatives.

The blocks of a plan give gradients as numbers. Those that are to be differentiated again are made
by the module as it is: every rank runs it once more on the whole batch, with parameters that are
brought together, so this takes the time and the memory of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import RunError
from ..plan import Plan
from ..progress import warn
from ..trace.burnt import Burnt, tensors_of
from ..trace.call import Call
from ..trace.form import LossFn
from .copies import copied
from .doors import Turns
from .first_step import as_it_is, far
from .handover import Upstream, check_alike
from .sharded import Sharded, plainly
from .world import World

log = logging.getLogger("autopar_torch")


class Asked(Protocol):
    """What is needed of a model whose gradients get gradients."""

    module: nn.Module
    world: World
    device: torch.device
    loss_fn: LossFn | None
    turns: Turns
    burnt: Burnt

    @property
    def plan(self) -> Plan: ...
    def fingerprint_hash(self) -> int: ...


class OnceMore:
    """A call, to be run again by the module as it was then, with what it gave."""

    def __init__(self, model: Asked, call: Call, tensors: Sequence[Tensor],
                 ends: Mapping[str, Tensor]) -> None:
        self.model, self.call, self.tensors = model, call, tensors
        self.ends = {name: end.detach() for name, end in ends.items()}
        self.digest, self.versions = model.burnt.digest, self._versions()

    def grads(self, upstream: Upstream, wanted: Sequence[Tensor]) -> list[Tensor | None]:
        """Of what is wanted, from those of the outputs; all ranks ask together."""
        model = self.model
        _tell_costs()
        with model.turns.doing("backward"):
            check_alike(model.world, upstream)
            ends = model.world.jointly(self._run)
            return list(torch.autograd.grad(
                [ends[name] for name in upstream], wanted, list(upstream.values()),
                create_graph=True, allow_unused=True))

    def _run(self) -> dict[str, Tensor]:
        model, wholes = self.model, self._wholes()
        module = copied(model.module, {})  # forward may keep something
        buffers = {name: wholes[name].clone() for name, buffer in module.named_buffers()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            return functional_call(module, wholes, args, kwargs)

        ends, drew = as_it_is(cast(nn.Module, forward), self.call, self.tensors, model.loss_fn,
                              model.device, "loss" in self.ends)
        if drew:
            _refuse("forward draws random numbers (dropout?), other ones than the first time",
                    "turn dropout off (p=0, or eval mode) where gradients get gradients")
        for name, before in buffers.items():
            owner = module.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, _BatchNorm) and not torch.equal(wholes[name], before):
                _refuse(f"forward reads {name} and changes it", "make such a change outside")
        if found := ", ".join(self.ends.keys() - ends) or far(ends, self.ends):
            _refuse(f"the module gives other outputs the second time: {found}",
                    "let forward depend on its inputs and parameters only")
        return ends

    def _versions(self) -> list[int]:
        with plainly():
            return [param._version for param in self.model.module.parameters()]

    def _wholes(self) -> dict[str, Tensor]:
        """Every parameter as a whole, from which gradients find back to the parts; buffers as
        copies. What is tied stays so."""
        model, made = self.model, dict[int, Tensor]()
        if model.plan.precision != "float32":
            _refuse(f"the plan computes in {model.plan.precision}", "train in float32")
        if (model.fingerprint_hash(), self._versions()) != (self.digest, self.versions):
            _refuse("the module was changed since forward (a parameter, a mode, an attribute)",
                    "change it after the backward")
        named = tensors_of(model.module)
        with plainly():
            for tensor in named.values():
                whole = tensor.spread.whole(tensor) if isinstance(tensor, Sharded) else tensor
                made.setdefault(id(tensor), whole if tensor.requires_grad else whole.clone())
        return {name: made[id(tensor)] for name, tensor in named.items()}


def _refuse(what: str, fix: str) -> None:
    raise RunError(f"gradients of these gradients cannot be taken: {what}",
                   where="backward or torch.autograd.grad with create_graph=True",
                   fix=f"{fix}, or train in one process without parallelize()")


@cache
def _tell_costs() -> None:
    warn(log, "gradients that are to have gradients (create_graph=True) are made by the module as "
              "it is, whole on every rank: in the time and memory of one process")

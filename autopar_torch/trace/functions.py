"""What forward tells autograd and generators is not in a trace: hooks on tensors, seeds, and the
backward that somebody has written for an `autograd.Function`.

If that gives the gradients of what its forward does, as it does on made-up values, nothing is lost.
If not, the module that calls it is left as it is, and so is its backward (see opaque.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import TraceError
from ..model import at_rows
from .burnt import kind_of
from .effects import attributes_set

NUM_ROWS, LARGE = 2, 64
NEAR = 1e-6
SCALES = (1.0, 100.0, 0.01)  # values may have bounds, gradients may be clipped
CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, torch.abs, torch.relu)
DATA: Any = vars(torch._C.TensorBase)["data"]
_known: dict[tuple[type, str], bool] = {}  # (function, its arguments) -> is its backward plain?


class OwnBackwardError(RuntimeError):
    """A trace would lose a backward."""

    def __init__(self, own: type) -> None:
        super().__init__(f"{own.__qualname__} is an autograd.Function with a backward of its own, "
                         "which a trace does not keep")


class LostError(RuntimeError):
    """A trace would lose a hook, or a seed."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Around a trace: stop where it would lose what backward does, or which numbers are drawn."""
    saved: Any = saved_tensors_hooks.__enter__

    def entered(hooks: saved_tensors_hooks) -> Any:
        if type(hooks) is saved_tensors_hooks:  # others keep what was saved as it is
            raise LostError("forward sets hooks on what is saved for backward, which a trace does "
                            "not keep")
        return saved(hooks)

    names = "register_hook", "register_post_accumulate_grad_hook", "retain_grad"
    with (attributes_set(Tensor, **{name: _stopping(name) for name in names},
                         data=property(_data_of, DATA.__set__)),
          attributes_set(saved_tensors_hooks, __enter__=entered), _own_backwards(),
          attributes_set(torch, manual_seed=_seeded), attributes_set(torch.random,
                                                                     manual_seed=_seeded)):
        yield


def _seeded(seed: int) -> torch.Generator:
    raise LostError("forward seeds the generator, which a trace does not keep")


def _stopping(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def call(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, FakeTensor | FunctionalTensor):
            raise LostError(f"forward calls {name} of a tensor, which a trace does not keep")
        return plain(value, *args, **kwargs)

    return call


def _data_of(value: Tensor) -> Tensor:
    fake = isinstance(value, FakeTensor | FunctionalTensor)
    return value.detach() if fake else cast(Tensor, DATA.__get__(value))


def _own_backwards() -> contextlib.AbstractContextManager[None]:
    kept: Any = vars(Function)["apply"]  # of Python, since torch 2.14 of C++

    def plain(own: type[Function], *args: Any, **kwargs: Any) -> Any:
        return kept.__get__(None, own)(*args, **kwargs)

    def apply(own: type[Function], *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        traced = torch.is_grad_enabled() and any(
            isinstance(x, FakeTensor | FunctionalTensor) and x.requires_grad for x in leaves)
        if traced and not _is_torch(own) and not _is_known_plain(own, args, plain):
            raise OwnBackwardError(own)
        return plain(own, *args, **kwargs)

    return attributes_set(Function, apply=classmethod(apply))


def refuse_unseen(outputs: Iterable[Tensor]) -> None:
    """Functions that were called by an `apply` which was kept from before."""
    seen, stack = set(), [output.grad_fn for output in outputs]
    tried = {own for own, _ in _known} - {own for (own, _), plain in _known.items() if not plain}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [before for before, _ in node.next_functions]
        own = getattr(type(node), "_forward_cls", None)
        if own is not None and not _is_torch(own) and own not in tried:
            raise TraceError(
                str(OwnBackwardError(own)), where=kind_of(own),
                fix="call it as its class's apply inside of a submodule, or write it with torch "
                "operations; or data parallelism (tp=1, pp=1) may take it untraced",
            )


def _is_torch(own: type) -> bool:
    return own.__module__.startswith("torch.") and "distributions" not in own.__module__


def _is_known_plain(own: type[Function], args: tuple[Any, ...],
                    apply: Callable[..., Any]) -> bool:
    infos = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in args]
    key = own, str(infos)
    if key not in _known:
        with (_disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad(),
              torch.random.fork_rng(devices=[])):
            _known[key] = _is_plain(own, args, apply)
    return _known[key]


def _is_plain(own: type[Function], args: tuple[Any, ...], apply: Callable[..., Any]) -> bool:
    torch.default_generator.manual_seed(0)
    forward = own.forward if own.setup_context is not Function.setup_context else (
        lambda *given: own.forward(_Context(), *given))  # type: ignore[misc]
    finite = False
    for change, scale in itertools.product(CHANGES, SCALES):
        given = _made_up(args, change, scale)
        try:
            made = list(_gradients(lambda *x: apply(own, *x), given, scale))
            want = list(_gradients(forward, given, scale))
            if not all(map(_same, made, want)) or len(made) != len(want):
                return False
        except Exception:  # whatever it has against made-up values
            return False
        finite |= all(bool(x.isfinite().all()) for x in made)
    return finite


def _same(a: Tensor, b: Tensor) -> bool:
    size = float(b.double().nan_to_num(0.0, 0.0, 0.0).abs().max())
    return a.shape == b.shape and torch.allclose(a, b, NEAR, NEAR * size, equal_nan=True)


def _made_up(args: tuple[Any, ...], change: Callable[[Tensor], Tensor],
             scale: float) -> list[Any]:
    sizes = dict.fromkeys(size for x in args if isinstance(x, Tensor) for size in x.shape)
    image = {size: size if at_rows(size, NUM_ROWS) <= LARGE else LARGE + 1 + k
             for k, size in enumerate(sizes)}

    def made(x: Tensor) -> Tensor:
        shape = [at_rows(image[size], NUM_ROWS) for size in x.shape]
        if x.is_floating_point():
            return scale * change(torch.randn(shape, dtype=torch.float64, device="cpu"))
        return torch.randint(0, 2, shape, device="cpu").to(x.dtype)

    return [made(x) if isinstance(x, Tensor) else x for x in args]


def _gradients(run: Callable[..., Any], given: list[Any], scale: float) -> Iterator[Tensor]:
    """Results, and the gradients of what has any."""
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
              for x in given]
    outs = [x for x in pytree.tree_leaves(run(*leaves)) if isinstance(x, Tensor)]
    yield from (x.detach() for x in outs)
    torch.default_generator.manual_seed(1)
    ends = [x for x in outs if x.requires_grad]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    found = torch.autograd.grad(ends, wanted, [scale * torch.randn_like(x) for x in ends],
                                allow_unused=True)
    yield from (torch.zeros_like(x) if grad is None else grad
                for x, grad in zip(wanted, found, strict=True))


class _Context:
    """What a forward is given to keep things in; here nothing is kept."""

    needs_input_grad = (True,) * 64

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None

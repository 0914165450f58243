"""What forward reads outside of the modules is followed, wherever a script keeps it."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar_torch as ap
import claims
from autopar_torch.run.model import ParallelModel
from autopar_torch.trace.call import take_apart
from autopar_torch.trace.settings import settings_in, shown
from nets import DP2, PP2, TP2, Net, batch, counted, near, net, parallel, refused, step

SCALE = 1.0
CONFIG = {"model": {"scale": 1.0}}
args = argparse.Namespace(scale=1.0)


class Cooled(Net):
    """Logits are divided by a number that lies elsewhere."""

    base = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.options = SimpleNamespace(head=SimpleNamespace(scale=1.0))
        self.nested = {"head": {"scale": 1.0}}

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(x / self.number(), y)

    def number(self) -> float:
        return self.options.head.scale  # type: ignore[no-any-return]


class InDict(Cooled):
    def number(self) -> float:
        return self.nested["head"]["scale"]


class InClass(Cooled):
    def number(self) -> float:
        return self.base


class Global(Cooled):
    def number(self) -> float:
        return _scale()


class GlobalDict(Cooled):
    def number(self) -> float:
        return CONFIG["model"]["scale"]


class GlobalObject(Cooled):
    def number(self) -> float:
        return args.scale  # type: ignore[no-any-return]


class Namespace:
    scale = 1.0


class InNamespace(Cooled):
    def number(self) -> float:
        return Namespace.scale


class Private(Cooled):
    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0

    def number(self) -> float:
        return self._scale


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return call


class Decorated(Cooled):
    @decorated
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(x / SCALE, y)


def _scale() -> float:
    return SCALE


def _in_function() -> tuple[type[nn.Module], Callable[[Any], None]]:
    scale = 1.0

    class Inner(Cooled):
        def number(self) -> float:
            return scale

    def change(_: Any) -> None:
        nonlocal scale
        scale = 2.0

    return Inner, change


KINDS: list[tuple[type[nn.Module], Callable[[Any], None]]] = [
    (Cooled, lambda m: setattr(m.options.head, "scale", 2.0)),
    (InDict, lambda m: m.nested["head"].update(scale=2.0)),
    (InClass, lambda _: setattr(InClass, "base", 2.0)),
    (Global, lambda _: globals().update(SCALE=2.0)),
    (GlobalDict, lambda _: CONFIG["model"].update(scale=2.0)),
    (GlobalObject, lambda _: setattr(args, "scale", 2.0)),
    (InNamespace, lambda _: setattr(Namespace, "scale", 2.0)),
    (Decorated, lambda _: globals().update(SCALE=4.0)),
    _in_function(),
]


def claim_numbers_that_change_outside_of_modules_are_followed() -> None:
    for kind, change in KINDS:
        model, plain = parallel(DP2, kind), net(kind)
        assert step(model, plain), kind
        for own in (model.module, plain):
            change(own)
        assert step(model, plain, 1), kind


class Backend:
    def scaled(self, x: Tensor) -> Tensor:
        return x * 2


BACKENDS: dict[str, Backend] = {}


def backend() -> Backend:
    """As einops finds what belongs to a kind of tensor."""
    if "torch" not in BACKENDS:
        BACKENDS["torch"] = Backend()
    return BACKENDS["torch"]


class Registered(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(backend().scaled(x), y)


def claim_what_is_registered_on_one_rank_alone_is_no_change() -> None:
    for degrees in (DP2, TP2, PP2):
        BACKENDS.clear()
        model, plain = parallel(degrees, Registered), net(Registered)
        got = model(*batch())[1].item()
        if dist.get_rank():
            backend()
        assert all(step(model, plain, seed) for seed in range(2)), degrees
        BACKENDS.clear()
        assert near(got, net(Registered)(*batch())[1]), degrees


class Tempered(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(x * getattr(self, "more", 1.0), y)


def claim_attributes_that_are_set_on_the_model_are_those_of_the_module() -> None:
    model, plain = parallel(DP2, Tempered), net(Tempered)
    assert step(model, plain)
    private, other = parallel(DP2, Private), net(Private)
    private.__class__ = type("Trained", (ParallelModel,), {})  # as transformers' Trainer has it
    assert step(private, other)
    private._scale = other._scale = 2.0
    assert step(private, other, 1) and private.module._scale == 2.0
    assert "graph" not in vars(private.module)
    for name in ("scale", "more"):
        for own in (model, plain):
            setattr(own, name, 0.25)
        assert step(model, plain, 1) and vars(model.module)[name] == 0.25, name
    for own in (model, plain):
        del own.more
    assert step(model, plain, 2) and not hasattr(model.module, "more")
    model.register_buffer("more", torch.tensor(0.5))
    assert "more: added" in refused(lambda: model(*batch()))
    del model.more
    model.add_module("head", nn.Linear(8, 4))
    assert "head.weight" in refused(lambda: model(*batch()))


def test_attributes_that_the_wrapper_hides_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    model.outputs, model.device = [], torch.device("cpu")  # type: ignore[assignment]
    ap.parallelize(model)
    assert "only: outputs" in caplog.text


@dataclass
class Options:
    scale: float
    weights: Any = None


class Argued(Net):
    def forward(self, x: Tensor, y: Tensor,  # type: ignore[override]
                options: Options) -> tuple[Tensor, Tensor | None]:
        x = x * options.scale
        if options.weights is not None:
            x = x * torch.as_tensor(options.weights)
        return super().forward(x, y)


def claim_objects_and_arrays_as_arguments_are_told_by_what_they_hold() -> None:
    for degrees in (DP2, PP2):
        model, plain = parallel(degrees, Argued), net(Argued)
        for scale in (1.0, 2.0, 1.0):
            weights = np.linspace(scale, 2 * scale, 8, dtype=np.float32)
            for options in (Options(scale), Options(1.0, weights)):
                got, want = (m(*batch(), options)[1] for m in (model, plain))
                assert near(got, want), (degrees, scale)


def claim_a_tensor_hidden_in_an_argument_is_refused() -> None:
    model = parallel(DP2, Argued)
    said = refused(lambda: model(*batch(), Options(1.0, [torch.ones(8, 8)])))
    assert "Options.weights" in said and "register_dataclass(Options)" in said


class Counting(Global):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        CONFIG["model"]["calls"] = CONFIG["model"].get("calls", 0.0) + 1.0
        return super().forward(x, y)


class Counter:
    calls = 0


class CountingInObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.counter.calls += 1
        return super().forward(x, y)


def claim_what_forward_changes_outside_of_modules_is_refused_where_it_is_split() -> None:
    for kind, word in ((Counting, "CONFIG"), (CountingInObject, "counter.calls")):
        said = refused(lambda k=kind: parallel(PP2, k)(*batch()))
        assert f"forward changes {word}" in said.replace("test_settings.", ""), said
    assert "calls" not in CONFIG["model"]


NAN = float("nan")
loss: Any = None


class Calm(Net):
    """Reads a number that is no number, and has attributes with names of globals."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(x.masked_fill(x > 1e9, NAN), y)

    def other(self) -> Any:
        return SCALE, self.loss, loss


def claim_what_forward_does_not_read_traces_nothing() -> None:
    model, plain = parallel(DP2, Calm), net(Calm)
    with counted(model) as times:
        for seed in range(3):
            globals().update(SCALE=float(seed), loss=torch.ones(1) * seed)
            assert step(model, plain, seed) and not model.fallback_reason
    assert times == [1], times


def claim_a_number_that_changes_on_one_rank_is_named() -> None:
    model, plain = parallel(DP2, GlobalDict), net(GlobalDict)
    assert step(model, plain)
    CONFIG["model"]["scale"] = 2.0 if dist.get_rank() == 0 else 1.0
    said = refused(lambda: model(*batch()))
    CONFIG["model"]["scale"] = 1.0
    assert "state of the module" in said, said


class Late(Calm):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        Calm.calls += 1
        return super().forward(x, y)


def claim_what_is_undone_is_undone_where_it_was() -> None:
    assert "Calm.calls" in refused(lambda: parallel(PP2, Late)(*batch()))
    assert Calm.calls == 0 and "calls" not in vars(Late)


class Taught(Net):
    def forward(self, x: Tensor, y: Tensor,  # type: ignore[override]
                other: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(x + other(x), y)


def claim_functions_are_told_by_what_they_close_over_and_modules_are_refused() -> None:
    model, plain = parallel(PP2, Taught), net(Taught)
    for scale in (1.0, 2.0):
        got, want = (m(*batch(), lambda x: x * scale)[1] for m in (model, plain))  # noqa: B023
        assert near(got, want), scale
    assert "Linear" in refused(lambda: model(*batch(), nn.Linear(8, 8)))


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def test_equal_ends_of_long_arrays_are_not_taken_for_equal_arrays() -> None:
    one, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1.0
    assert repr(one) == repr(other) and shown(one) != shown(other)
    keys = [take_apart((torch.zeros(2, 3), own), {})[0].key for own in (one, other)]
    assert keys[0] != keys[1]


def test_objects_in_circles_and_of_libraries_end_the_search() -> None:
    a, b = SimpleNamespace(log=logging.getLogger("x")), SimpleNamespace()
    a.other, b.other, b.optimizer = b, a, torch.optim.SGD([torch.zeros(1)])
    assert [path for path, _ in settings_in([("a", a)])] == ["a", "a.other"]
    assert shown(a) == shown(a)

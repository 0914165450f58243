"""What a trace has burnt in and what it would lose: followed or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import autopar_torch as ap
import claims
from autopar_torch.errors import TraceError
from autopar_torch.run import tracing
from autopar_torch.run.sharded import local
from autopar_torch.trace.burnt import Burnt, kind_of
from autopar_torch.trace.call import take_apart
from nets import (
    ALL,
    DP2,
    PP2,
    TP2,
    ZERO3,
    Net,
    batch,
    counted,
    near,
    net,
    parallel,
    refused,
    step,
    step_losses,
)

CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": lambda m: setattr(m, "scale", 0.25),
    "a flag": lambda m: setattr(m, "flip", True),
    "a mode": lambda m: setattr(m, "norm", m.norm) or setattr(m.drop, "p", 1.0),
    "a mode of one submodule": lambda m: m.drop.eval(),
    "a list": lambda m: setattr(m.norm, "eps", 10.0),
}


def claim_attributes_that_change_are_followed() -> None:
    _follow_changes((TP2,))


def slow_claim_attributes_that_change_are_followed_by_other_plans() -> None:
    _follow_changes((PP2, DP2, ZERO3))


def _follow_changes(plans: tuple[dict[str, Any], ...]) -> None:
    for degrees in plans:
        for name, change in CHANGES.items():
            model, plain = parallel(degrees), net()
            assert step(model, plain), (degrees, name, "before")
            for m in (model.module, plain):
                change(m)
            assert step(model, plain, 1) and step(model, plain, 2), (degrees, name)


def claim_programs_are_kept_and_what_forward_does_not_read_traces_nothing() -> None:
    model, plain = parallel(DP2), net()
    step(model, plain)
    with counted(model) as times:
        for flip in (True, False, True, False):
            model.module.flip = plain.flip = flip
            model.module.unread += 1
            assert step(model, plain), flip
        model.eval()
        with torch.no_grad():
            model(*batch())
        model.train()
        assert step(model, plain)
    assert times == [2], times  # the other flag, and eval


def claim_what_is_trained_may_change() -> None:
    for degrees in (TP2, PP2, DP2, ZERO3, {"dp": 2, "zero": 2, "num_micro_batches": 2}):
        model, plain = parallel(degrees), net()
        for seed, frozen in enumerate(([], ["layers.0", "head"], ["layers.3"], [])):
            for m in (model.module, plain):
                for name, p in m.named_parameters():
                    p.requires_grad_(not name.startswith(tuple(frozen) or "-"))
            assert step(model, plain, seed), (degrees, frozen)
        want = plain.state_dict()
        assert all(near(v, want[k]) for k, v in model.state_dict().items()), degrees


def slow_claim_what_is_trained_before_the_first_batch_counts() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        for m in (model.module, plain):
            m.layers[1].requires_grad_(False)
        assert step(model, plain) and step(model, plain, 1), degrees
        assert all(p.grad is None for p in model.module.layers[1].parameters())


def claim_what_zero_has_not_cut_is_trained_whole() -> None:
    for degrees in ({"dp": 2, "zero": 1}, {"dp": 2, "zero": 2, "num_micro_batches": 2}, ZERO3):
        model, plain = parallel(degrees), net()
        for seed, frozen in enumerate((True, False, True, False)):
            for m in (model.module, plain):
                m.head.requires_grad_(not frozen)
                m.layers[1].requires_grad_(frozen)
            assert step(model, plain, seed), (degrees, seed)
        assert tuple(local(model.module.head.weight).shape) == (4, 8)
        assert local(model.module.layers[1].weight).numel() == 32
        want = plain.state_dict()
        assert all(near(v, want[k]) for k, v in model.state_dict().items()), degrees
        model.move(ap.Plan.uniform(**TP2))
        assert step(model, plain, 5) and step(model, plain, 6), degrees
        assert all(near(v, plain.state_dict()[k]) for k, v in model.state_dict().items())


def _changed(kind: str, degrees: dict[str, Any]) -> None:
    """A copy and a move go on with the module as it is then, not as it was first traced."""
    for way in ("copy", "move", "move and thaw"):
        pair = model, plain = parallel(degrees), net()
        for m in (model.module, plain):
            m.layers[:2].requires_grad_(kind != "thawed")
        assert step(*pair), (degrees, kind)
        for m in (model.module, plain):
            m.layers[:2].requires_grad_(True)
            m.flip = kind == "flipped"
            m.head.requires_grad_(kind != "frozen")
        if way == "copy":
            pair = copy.deepcopy(model), copy.deepcopy(plain)
        else:
            model.move(ap.Plan.uniform(**degrees))
        assert way == "move and thaw" or step(*pair, 1), (degrees, kind, way)
        for m in (pair[0].module, pair[1]):
            m.head.requires_grad_(True)
        assert step(*pair, 2) and step(*pair, 3), (degrees, kind, way)
        found, want = (m.state_dict() for m in pair)
        assert all(near(v, want[k]) for k, v in found.items()), (degrees, kind, way)


def claim_copies_and_moves_see_what_has_changed() -> None:
    _changed("thawed", PP2)
    _changed("frozen", ZERO3)


def slow_claim_copies_and_moves_see_what_has_changed_under_each_plan() -> None:
    for kind in ("thawed", "frozen", "flipped"):
        for degrees in (*ALL, {"dp": 2, "zero": 1}, {**PP2, "schedule": "zero_bubble"}):
            _changed(kind, degrees)


def claim_replaced_parameters_are_refused() -> None:
    def new(m: Any) -> None:
        m.head.bias = nn.Parameter(torch.zeros(4))

    def more(m: Any) -> None:
        m.extra = nn.Linear(2, 2)

    def tie(m: Any) -> None:
        m.layers[1].weight = m.layers[0].weight

    for change, name in ((new, "head.bias"), (more, "extra.weight"), (tie, "layers.1.weight")):
        model, plain = parallel(TP2), net()
        step(model, plain)
        change(model.module)
        said = refused(lambda m=model: m(*batch()))
        assert name in said and "replaced" in said, said


def claim_a_hook_is_refused_once_there_is_a_plan_and_never_called_with_what_has_no_data() -> None:
    for degrees in (TP2, DP2):
        model, plain, seen = parallel(degrees), net(), []
        step(model, plain)
        handle = model.module.layers[1].register_forward_hook(lambda *io, s=seen: s.append(io))
        said = refused(lambda m=model: m(*batch()))
        assert "hook" in said and "layers.1" in said and not seen, said
        handle.remove()
        assert step(model, plain, 1), degrees


class Spectral(Net):
    """Its norm writes into buffers, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.layers[1])
        nn.utils.parametrizations.weight_norm(self.head)
        nn.utils.weight_norm(self.layers[2])
        prune.random_unstructured(self.layers[3], "weight", 0.5)


def slow_claim_norms_of_weights_are_traced_or_refused_where_they_would_run_too_often() -> None:
    want = step_losses(net(Spectral))
    for degrees in (TP2, DP2, {"dp": 2, "zero": 3}, {"pp": 2}):
        model = parallel(degrees, Spectral)
        assert near(step_losses(model), want) and not model.fallback_reason, degrees
    for degrees in (PP2, TP2 | {"num_micro_batches": 2}):
        said = refused(lambda d=degrees: parallel(d, Spectral)(*batch()))
        assert "changes a buffer" in said and "num_micro_batches=1" in said, said


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


reverse = Reversal.apply


class Reversed(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(reverse(torch.tanh(self.layers[0](x))), y)


class Counting(Net):
    calls = 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        return super().forward(x * self.calls, y)


class Starting(Net):
    started = False

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x, self.started = x if self.started else 2 * x, True
        return super().forward(x, y)


class Noting(Net):
    """After the first forward nothing changes, and what it made and dropped counts for nothing."""

    noted: tuple[int, ...] = ()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if not self.noted:
            nn.Linear(2, 2)
            self.child = nn.ReLU()
        self.noted = tuple(x.shape[1:])
        return super().forward(x, y)


class Collecting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.seen.append(len(self.seen))
        return super().forward(x + len(self.seen), y)


class Chancy(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(x * (1 + random.random()), y)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = checkpoint(self.layers[0], x, use_reentrant=self.reentrant)  # needs no gradient yet
        x = self.norm(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return super().forward(x, y)


class Reentrant(Checkpointed):
    reentrant = True


LOST = {
    Reversed: ("Reversal", "test_burnt.Reversal"),
    Counting: ("calls", "self.calls += 1"),
    Starting: ("started", "self.started = "),
    Collecting: ("seen", "forward"),
    Chancy: ("random", "forward"),
}


def slow_claim_what_is_the_same_after_every_forward_is_traced() -> None:
    want = step_losses(net(Noting))
    for degrees in (TP2, DP2):
        model = parallel(degrees, Noting)
        assert near(step_losses(model), want) and not model.fallback_reason, degrees
        assert not model.module.noted and not hasattr(model.module, "child")


def slow_claim_what_a_trace_would_lose_is_trained_untraced_and_refused_where_split() -> None:
    for kind, words in LOST.items():
        said = refused(lambda k=kind: parallel(TP2, k)(*batch()))
        assert all(word in said for word in words), (kind, said)
        random.seed(0)
        model = parallel(DP2, kind)
        first = step_losses(model)
        random.seed(0)
        assert near(first, step_losses(net(kind))), kind
        assert words[0] in model.fallback_reason, kind


def slow_claim_gradient_checkpointing_is_traced() -> None:
    for kind in (Checkpointed, Reentrant):
        for degrees in (TP2, PP2):
            model = parallel(degrees, kind)
            assert near(step_losses(model), step_losses(net(kind))), (kind, degrees)
            assert not model.fallback_reason


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.parametrize("kind", list(LOST))
def test_what_a_trace_would_lose_is_right_in_one_process(kind: type[nn.Module]) -> None:
    random.seed(0)
    got = step_losses(ap.parallelize(net(kind)))
    random.seed(0)
    assert near(got, step_losses(net(kind)))


def test_backward_hooks_are_called() -> None:
    model, calls = net(), []
    model.layers[0].register_full_backward_hook(lambda *_: calls.append(1))  # type: ignore[index, union-attr]
    ap.parallelize(model)(*batch())[1].backward()
    assert calls


def test_equal_sets_are_alike_in_whatever_order_they_come() -> None:
    states = []
    for names in ({0, 8}, {8, 0}):
        model = nn.Linear(1, 1)
        model.names = names
        states.append(Burnt(model).described(frozenset({(kind_of(nn.Linear), "names")})))
    assert states[0] == states[1]


def test_a_look_is_quicker_than_listing_the_modules() -> None:
    import timeit

    from autopar_torch.trace.burnt import Burnt

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    burnt = Burnt(model)
    compare, listing = (min(timeit.repeat(run, number=20, repeat=20))
                     for run in (burnt.compare, lambda: list(model.named_parameters())))
    assert compare < listing


def test_whatever_stops_a_trace_is_one_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any, **__: Any) -> Any:
        raise KeyError("x")

    model = ap.parallelize(net())
    monkeypatch.setattr(tracing, "trace", stops)
    with pytest.raises(TraceError, match="tracing stopped: KeyError"):
        model.retrace(take_apart(batch(), {})[0], True, ("loss",))

"""What a trace has burnt in, what it would lose, and what a call returns: followed or refused.

Claims about several ranks run on 2 of them, started once.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import autopar_torch as ap
import zoo
from autopar_torch.errors import AutoparError, PlanError, RunError, TraceError
from autopar_torch.run import tracing, world
from autopar_torch.trace.call import take_apart
from ranks import run_ranks

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
DP2 = {"dp": 2}
ZERO3 = {"dp": 2, "zero": 3}
ALL = (TP2, PP2, DP2, ZERO3)


@pytest.fixture(scope="module")
def claims() -> dict[str, str]:
    """All quick claims of this file, checked in one start of 2 ranks: name -> what was wrong."""
    return run_ranks(2, "test_burnt:check_all", "claim_")[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def slow_claims() -> dict[str, str]:
    """All others, in another start."""
    return run_ranks(2, "test_burnt:check_all", "slow_claim_")[0]  # type: ignore[no-any-return]


def _names(prefix: str) -> list[str]:
    return sorted(name for name in globals() if name.startswith(prefix))


def check_all(prefix: str) -> dict[str, str]:
    world.start()
    torch.set_num_threads(1)
    found = {}
    for name in _names(prefix):
        try:
            globals()[name]()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Net(nn.Module):
    """Two hidden layers with a flag, a number and dropout; returns logits and, given y, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.scale, self.flip, self.unread = 1.0, False, 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        logits = self.head(self.drop(self.norm(-x if self.flip else x)))
        return logits, None if y is None else F.cross_entropy(logits, y)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=gen), torch.randint(0, 4, (rows,), generator=gen)


def parallel(degrees: dict[str, Any], kind: type[nn.Module] = Net, **options: Any) -> Any:
    return ap.parallelize(net(kind), plan=ap.Plan.uniform(**degrees), **options)


def near(a: Any, b: Any, limit: float = 1e-5) -> bool:
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    return a.shape == b.shape and float((a - b).abs().max()) <= limit * float(b.abs().max() + 1e-9)


def refused(run: Callable[[], Any]) -> str:
    """What an error of ours said, or nothing."""
    try:
        run()
    except AutoparError as error:
        return str(error)
    return ""


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How often the model is traced meanwhile."""
    times, before = [0], model.retrace

    def retrace(*args: Any) -> Any:
        times[0] += 1
        return before(*args)

    model.retrace = retrace
    try:
        yield times
    finally:
        model.retrace = before


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": lambda m: setattr(m, "scale", 0.25),
    "a flag": lambda m: setattr(m, "flip", True),
    "a mode": lambda m: setattr(m, "norm", m.norm) or setattr(m.drop, "p", 1.0),
    "a mode of one submodule": lambda m: m.drop.eval(),
    "a list": lambda m: setattr(m.norm, "eps", 10.0),
}


def step(model: Any, plain: Any, seed: int = 0) -> bool:
    """One step of SGD on both; whether losses agree."""
    x, y = batch(seed=seed)
    got, want = model(x, y)[1], plain(x, y)[1]
    for loss, params in ((got, model.parameters()), (want, plain.parameters())):
        loss.backward()
        with torch.no_grad():
            for p in params:
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
    return near(got, want)


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
    for degrees in (TP2, PP2, DP2):
        model, plain = parallel(degrees), net()
        for seed, frozen in enumerate(([], ["layers.0", "head"], ["layers.3"], [])):
            for m in (model.module, plain):
                for name, p in m.named_parameters():
                    p.requires_grad_(not name.startswith(tuple(frozen) or "-"))
            assert step(model, plain, seed), (degrees, frozen)
        want = plain.state_dict()
        assert all(near(v, want[k]) for k, v in model.state_dict().items()), degrees


def claim_what_is_trained_before_the_first_batch_counts() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        for m in (model.module, plain):
            m.layers[1].requires_grad_(False)
        assert step(model, plain) and step(model, plain, 1), degrees
        assert all(p.grad is None for p in model.module.layers[1].parameters())


def claim_freezing_under_zero_is_refused() -> None:
    model, plain = parallel(ZERO3), net()
    step(model, plain)
    model.module.head.requires_grad_(False)
    said = refused(lambda: model(*batch()))
    assert "head" in said and "requires_grad" in said and "zero" in said, said


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


def claim_norms_of_weights_are_traced_or_refused_where_they_would_run_too_often() -> None:
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
    Collecting: ("seen", "forward"),
    Chancy: ("random", "forward"),
}


def claim_what_a_trace_would_lose_is_trained_untraced_and_refused_where_split() -> None:
    for kind, words in LOST.items():
        said = refused(lambda k=kind: parallel(TP2, k)(*batch()))
        assert all(word in said for word in words), (kind, said)
        random.seed(0)
        model = parallel(DP2, kind)
        first = step_losses(model)
        random.seed(0)
        assert near(first, step_losses(net(kind))), kind
        assert words[0] in model.fallback_reason, kind


def step_losses(model: Any) -> Tensor:
    """Losses of three steps of SGD."""
    losses = []
    for seed in range(3):
        loss = model(*batch(seed=seed))[1]
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
        losses.append(loss.detach())
    return torch.stack(losses)


def slow_claim_gradient_checkpointing_is_traced() -> None:
    for kind in (Checkpointed, Reentrant):
        for degrees in (TP2, PP2):
            model = parallel(degrees, kind)
            assert near(step_losses(model), step_losses(net(kind))), (kind, degrees)
            assert not model.fallback_reason


def claim_logits_and_loss_unpack_in_training_and_eval() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        x, y = batch(6)
        logits, loss = model(x, y)
        assert near(loss, plain(x, y)[1]) and near(model(x, y), loss)
        said = refused(lambda z=logits: z.argmax(-1))
        assert "not gathered" in said and "outputs=('0',)" in said, said
        model.eval()
        plain.eval()
        with torch.no_grad():
            got, want = model(x, y), plain(x, y)
            assert type(got) is tuple and near(got[0], want[0]) and near(got[1], want[1]), degrees
            got, want = model(x), plain(x)
            assert near(got[0], want[0]) and got[1] is None, degrees


def claim_outputs_asked_for_come_in_the_models_own_form() -> None:
    model, plain = parallel(PP2, outputs=("0",)), net()
    x, y = batch(6)
    logits, loss = model(x, y)
    want = plain(x, y)
    assert near(logits, want[0]) and near(loss, want[1])


def slow_claim_hugging_face_outputs_are_what_they_are() -> None:
    model, plain = ap.parallelize(zoo.build("gpt2"), plan=ap.Plan.uniform(**PP2)), zoo.build("gpt2")
    data = zoo.batch("gpt2", 4)
    out, want = model(**data), plain(**data)
    for loss in (out.loss, out["loss"], out[0], out):
        assert near(loss, want.loss)
    assert "not gathered" in refused(lambda: out.logits + 1)
    model.eval()
    plain.eval()
    with torch.no_grad():
        del data["labels"]
        got, want = model(**data), plain(**data)
        assert type(got) is type(want) and near(got.logits, want.logits) and got.loss is None
        got = model(**data, output_hidden_states=True)
        want = plain(**data, output_hidden_states=True)
        assert len(got.hidden_states) == len(want.hidden_states)
        assert all(near(a, b) for a, b in zip(got.hidden_states, want.hidden_states, strict=True))


def slow_claim_the_first_call_may_be_an_evaluation() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        model.eval()
        plain.eval()
        with torch.no_grad():
            assert near(model(*batch())[1], plain(*batch())[1])
        model.train()
        plain.train()
        assert near(step_losses(model), step_losses(plain)), degrees
    model = parallel(TP2)
    model.eval()
    with torch.inference_mode():
        assert near(model(*batch())[1], net()(*batch())[1])
    model.train()
    assert near(step_losses(model), step_losses(net()))


def claim_autocast_around_forward_is_as_in_one_process() -> None:
    for degrees in ALL:
        model, plain, exact = parallel(degrees), net(), net()
        x, y = batch()
        losses = []
        for m in (model, plain, exact):
            with torch.autocast("cpu", torch.bfloat16, enabled=m is not exact):
                losses.append(m(x, y)[1])
            losses[-1].backward()
        assert near(losses[0], losses[1], 1e-4) and not near(losses[0], losses[2], 1e-6), degrees
        without = model(x, y)[1]
        assert near(without, losses[2]), degrees


def claim_wrappers_around_it_are_refused() -> None:
    model = parallel(DP2)
    model(*batch())
    said = refused(lambda: nn.parallel.DistributedDataParallel(model))
    assert "DistributedDataParallel" in said, said
    from torch.distributed.fsdp import fully_shard

    def shard() -> None:
        other = parallel(DP2)
        other(*batch())
        fully_shard(other)(*batch())

    assert "fully_shard" in refused(shard)


def claim_models_that_something_else_splits_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.compile, fully_shard):
        said = refused(lambda w=wrap: ap.parallelize(w(net())))
        assert "parallelize: model" in said and "fix" in said, (wrap, said)


def claim_a_change_on_one_rank_is_seen_in_the_fingerprint() -> None:
    model = parallel(DP2)
    model(*batch())
    hashes: list[Any] = [None, None]
    dist.all_gather_object(hashes, model.fingerprint_hash())
    assert hashes[0] == hashes[1]
    if dist.get_rank():
        model.module.flip = True
    dist.all_gather_object(hashes, model.fingerprint_hash())
    assert hashes[0] != hashes[1]


class Mixing(nn.Module):
    """A batch input that meets the rest of the batch before it meets a parameter."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.head = mix, nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mix(x)), y)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention over rows": lambda x: (x @ x.T).softmax(0) @ x,
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "row number": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None],
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "minus the mean": lambda x: x - x.mean(0),
    "sort within": lambda x: x.sort(1).values,
    "roll within": lambda x: x.roll(1, 1),
    "pick": lambda x: x[torch.arange(x.shape[0]), x.argmax(1)][:, None].expand(-1, 8),
    "one hot": lambda x: F.one_hot(x.argmax(1), 8).float(),
}


def claim_a_batch_that_is_mixed_before_any_parameter_is_not_shared_out() -> None:
    _refuse_mixes(list(MIXES)[:2])


def slow_claim_any_way_of_mixing_is_found() -> None:
    _refuse_mixes(list(MIXES)[2:])


def _refuse_mixes(names: list[str]) -> None:
    for name, mix in ((name, MIXES[name]) for name in names):
        for degrees in (DP2, TP2 | {"num_micro_batches": 2}):
            plan = ap.Plan.uniform(**degrees)
            said = refused(lambda m=mix, p=plan: ap.parallelize(Mixing(m), plan=p)(*batch()))
            assert "whole batch" in said, (name, said)


def claim_a_batch_that_is_not_mixed_is_shared_out_exactly() -> None:
    for name, mix in APART.items():
        for degrees in (DP2, TP2 | {"num_micro_batches": 4}):
            torch.manual_seed(0)
            plain = Mixing(mix)
            model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**degrees))
            assert near(model(*batch()), plain(*batch())), (name, degrees)


@pytest.mark.parametrize("name", _names("claim_"))
def test_on_two_ranks(claims: dict[str, str], name: str) -> None:
    assert not claims[name], claims[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", _names("slow_claim_"))
def test_on_two_ranks_slowly(slow_claims: dict[str, str], name: str) -> None:
    assert not slow_claims[name], slow_claims[name]


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


class Out(NamedTuple):
    logits: Tensor
    loss: Tensor
    extra: Any
    rows: int


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits, loss = self.net(x, y)
        return Out(logits, loss, {"deep": [logits.sum(), None]}, x.shape[0])


def test_any_structure_comes_back_from_eval() -> None:
    model, plain = ap.parallelize(net(Odd)), net(Odd)
    assert near(model(*batch())[1], plain(*batch())[1])
    model.eval()
    with torch.no_grad():
        got = model(*batch(5))
    assert type(got) is Out and got.rows == 5 and got.extra["deep"][1] is None
    assert near(got.extra["deep"][0], plain(*batch(5))[2]["deep"][0])


def test_backward_in_eval_says_what_to_do() -> None:
    model = ap.parallelize(net())
    model.eval()
    with pytest.raises(RunError, match=r"model.train\(\)"):
        model(*batch())[1].backward()


def test_a_first_evaluation_without_labels_says_what_to_do() -> None:
    model = ap.parallelize(net())
    model.eval()
    with pytest.raises(PlanError, match="no loss"):
        model(batch()[0])
    model.train()
    assert near(model(*batch())[1], net()(*batch())[1]) and not model.fallback_reason


def test_a_model_is_parallelized_once() -> None:
    module = net()
    model = ap.parallelize(module)
    with pytest.raises(PlanError, match="already in ParallelModel"):
        ap.parallelize(model)
    with pytest.raises(PlanError, match="already in ParallelModel"):
        ap.parallelize(nn.Sequential(model))
    model(*batch())
    with pytest.raises(PlanError, match="already parallelized"):
        ap.parallelize(module)


def test_copies_and_pickles_say_what_to_do() -> None:
    model = ap.parallelize(net())
    for attempt in (copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO()),
                    torch.optim.swa_utils.AveragedModel):
        with pytest.raises(RunError, match="state_dict"):
            attempt(model)  # type: ignore[operator]


def test_moving_a_planned_model_is_refused_where_it_would_change_it() -> None:
    model = ap.parallelize(net())
    model(*batch())
    model.to("cpu").float().to(torch.float32)
    for move in (lambda: model.half(), lambda: model.bfloat16(), lambda: model.double(),
                 lambda: model.to("meta"), lambda: model.to(torch.float64)):
        with pytest.raises(RunError, match="before parallelize"):
            move()
    assert next(model.parameters()).dtype == torch.float32


def test_a_look_is_quicker_than_listing_the_modules() -> None:
    import timeit

    from autopar_torch.trace.burnt import Burnt

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    burnt = Burnt(model)
    look, listing = (min(timeit.repeat(run, number=20, repeat=20))
                     for run in (burnt.look, lambda: list(model.named_parameters())))
    assert look < listing


def test_whatever_stops_a_trace_is_one_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any, **__: Any) -> Any:
        raise KeyError("x")

    model = ap.parallelize(net())
    monkeypatch.setattr(tracing, "trace", stops)
    with pytest.raises(TraceError, match="tracing stopped: KeyError"):
        model.retrace(take_apart(batch(), {})[0], True, ("loss",))

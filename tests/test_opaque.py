"""Claims about modules that cannot be traced: each is one op, and the rest is split around it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopar_torch as ap
import claims
from autopar_torch.errors import PlanError, TraceError

WIDTH, NUM_ROWS = 8, 6


class Experts(nn.Module):
    """Each row goes through the expert that its gate asks for, in a loop over who has any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scale)
        return out, chosen


class Branch(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.detach().numpy().max() > 0 else self.inner(-x)


class Counts(Branch):
    """Returns a number beside its tensor."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), float(x.detach().numpy().mean())


class Ranges(Branch):
    """Keeps the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if x.detach().numpy().max() > 0:
            self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return self.inner(x) / self.largest


class Doubled(torch.autograd.Function):
    """Its backward is that of what it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs() * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 4 * ctx.saved_tensors[0].abs() * grad, None


class Rounded(torch.autograd.Function):
    """Straight through: its backward is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Doubles(Branch):
    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(self.inner(x), 2.0)


class Rounds(Branch):
    def forward(self, x: Tensor) -> Any:
        return Rounded.apply(self.inner(x))


class Rolls(nn.Module):
    """As Autoformer does: by as much as the mean over the batch says."""

    def forward(self, x: Tensor) -> Any:
        weights, lags = x.abs().mean(0).topk(2)
        return sum(x.roll(-int(lags[k]), 1) * weights[k] for k in range(2))


class Talks(Branch):
    """Sends for itself, and looks at its data."""

    def forward(self, x: Tensor) -> Any:
        if float(x.detach().max()) > -1e9:
            found = [torch.empty(1) for _ in range(dist.get_world_size())]
            dist.all_gather(found, torch.ones(1))
        return super().forward(x)


class Skips(Branch):
    """Most rows pass a part of it by; in some batches, or some replicas, all do."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        rows = (x.amax(1) > 2).nonzero()[:, 0]
        return out.index_add(0, rows, self.other(x[rows])) if len(rows) else out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), Skips()

    def forward(self, x: Tensor) -> Any:
        return self.shared(torch.tanh(self.first(self.shared(x))))


class Moves(Branch):
    """Writes to a parameter, past autograd, as codebooks do."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        self.inner.bias.data.mul_(0.5)
        return out


class Packs(nn.Module):
    """Reads each sequence to its end; no length is 0, as made-up numbers may be."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False)
        read, (state, _) = self.rnn(packed)
        return pad_packed_sequence(read, True, total_length=x.shape[1])[0], state[-1]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.packs, self.head = Packs(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        read, state = self.packs(x, lengths)
        return self.head(read.sum(1) + state).square().mean()


class Particular(Branch):
    """Takes probabilities, and weights that are not below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e6 or self.weights.numpy().min() < 0:
            raise ValueError("weights are below 0")
        shares = self.inner(x).softmax(-1)
        return super().forward(torch.distributions.Categorical(shares).probs * self.weights.sum())


class Net(nn.Module):
    def __init__(self, last: type[nn.Module] = Branch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH), last()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, experts, b, last = self.layers
        x = b(x + experts(a(x), scale=0.5)[0]).relu()
        out = last(x)
        return ((out if isinstance(out, Tensor) else out[0])[:, 0] - y).square().mean()


def _batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(NUM_ROWS, WIDTH, generator=draw), torch.randn(NUM_ROWS, generator=draw)


def _trains(last: type[nn.Module] = Branch, **plan: Any) -> None:
    plain, (x, y) = Net(last), _batch()
    model = ap.parallelize(Net(last), plan=ap.Plan.uniform(**plan))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        loss, want = model(x, y), plain(x, y)
        for one in (loss, want):
            one.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), want.detach())
    assert not model.fallback_reason
    torch.testing.assert_close(dict(model.state_dict()), plain.state_dict())


def claim_what_is_around_an_opaque_module_is_split_in_a_tensor_group() -> None:
    _trains(tp=2)


def claim_it_may_be_particular_about_its_values() -> None:
    _trains(Particular, tp=2)


def claim_a_backward_of_its_own_is_kept() -> None:
    for last in (Rounds, Doubles):
        _trains(last, tp=2)


def claim_replicas_do_together_what_looks_at_all_rows() -> None:
    for plan in {"dp": 2}, {"tp": 2}:
        _trains(Rolls, **plan)


def claim_a_module_that_communicates_is_refused_before_it_waits() -> None:
    with pytest.raises(PlanError, match="communicates by itself"):
        ap.parallelize(Net(Talks), _batch(), plan=ap.Plan.uniform(dp=2))


def _skipped(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for step in range(5):
        x = torch.randn(NUM_ROWS, WIDTH, generator=draw).clamp(-1, 1)
        x[NUM_ROWS // 2] += 4 * (step in (0, 3))  # for one replica
        loss = model(x).square().mean()
        loss.backward()
        grads = [p.grad for name, p in model.named_parameters() if "other" in name]
        found += [loss.detach(), torch.tensor([g is None for g in grads])]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model.state_dict().values()]


def claim_what_a_batch_passes_by_has_no_gradient() -> None:
    """A layer that is used twice, with momentum and decay, which would move it."""
    plain = Twice()
    args: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    want = _skipped(other := copy.deepcopy(plain), torch.optim.SGD(other.parameters(), **args))
    for plan in {"tp": 2}, {"dp": 2}, {"dp": 2, "zero": 3}:
        model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**plan))
        got = _skipped(model, torch.optim.SGD(model.parameters(), **args))
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, msg=f"{plan}")


def claim_a_module_that_writes_to_a_parameter_is_refused() -> None:
    before = Net(Moves)
    with pytest.raises(TraceError, match=r"changes its tensor inner.bias"):
        ap.parallelize(before, _batch(), plan=ap.Plan.uniform(tp=2))
    torch.testing.assert_close(dict(before.state_dict()), dict(Net(Moves).state_dict()))


def claim_recurrent_nets_read_packed_sequences() -> None:
    x, lengths = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH), torch.tensor([2, 8, 1, 4, 4])
    for plan in {"tp": 2}, {"pp": 2}, {"dp": 2}:
        plain, model = Reader(), ap.parallelize(Reader(), plan=ap.Plan.uniform(**plan))
        for _ in range(2):
            for own in (model, plain):
                own.zero_grad()
                own(x, lengths).backward()
                torch.optim.SGD(own.parameters(), lr=0.1).step()
        torch.testing.assert_close(dict(model.state_dict()), plain.state_dict())
    with pytest.raises(TraceError, match="sizes that depend on the data"):
        ap.parallelize(Packs(), plan=ap.Plan.uniform(tp=2))(x, lengths)


def claim_opaque_modules_run_on_their_stages() -> None:
    _trains(pp=2)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def test_the_log_names_the_module_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ap.parallelize(Net(), _batch())
    assert "layers.1 cannot be traced" in caplog.text and "if len(rows)" in caplog.text
    assert "layers.3 cannot be traced" in caplog.text and "numpy().max() > 0" in caplog.text


def test_a_function_is_traced_if_its_backward_is_that_of_its_forward(
        caplog: pytest.LogCaptureFixture) -> None:
    for last in (Doubles, Rounds):
        with caplog.at_level(logging.WARNING):
            ap.parallelize(Net(last), _batch())
        assert ("layers.3 cannot be traced" in caplog.text) == (last is Rounds)
    assert "Rounded.apply(self.inner(x))" in caplog.text


@pytest.mark.parametrize(("last", "why"), [
    (Counts, "returns more than tensors"), (Ranges, "changes its buffer largest")])
def test_a_model_trains_untraced_if_a_module_does_more_than_to_make_tensors(
        last: type[nn.Module], why: str) -> None:
    model, (x, y) = ap.parallelize(Net(last)), _batch()
    plain = copy.deepcopy(model.module)
    torch.testing.assert_close(model(x, y).detach(), plain(x, y).detach())
    torch.testing.assert_close(dict(model.state_dict()), plain.state_dict())
    assert f"layers.3 cannot be traced, and {why}" in model.fallback_reason

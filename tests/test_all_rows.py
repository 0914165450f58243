"""Losses and layers that look at all rows of a batch, and numbers made of its size, are right under
replicas and pipelines: losses and parameters of several steps, in float64, against one process."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import PlanError, TraceError
from autopar_torch.model import ROWS as ROWS_OF_A_TRACE
from autopar_torch.plan import Plan, Replica, Stage
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from autopar_torch.trace.row_branches import asking, holds
from autopar_torch.trace.row_numbers import is_of_rows, may_be_of_rows
from ranks import run_ranks

ROWS = 8, 7, 5  # of each step
OPERATORS: list[Callable[[Any, Any], Any]] = [
    operator.add, operator.sub, operator.mul, lambda a, b: a / max(b, 1), min, max,
    lambda a, b: a // max(b, 1), lambda a, b: a % max(b, 1), lambda a, b: divmod(a, 2)[0],
    lambda a, b: round(a / 3), lambda a, b: int(a * 0.3) + b, lambda a, b: math.ceil(a / 4),
    lambda a, b: abs(a - b)]
BOUNDS = -3, 0, 2, 17, 100.5
Loss = Callable[[Tensor, Tensor, int], Tensor]


def _contrast(a: Tensor, b: Tensor, n: int) -> Tensor:
    """As CLIP does."""
    logits, own = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t() / 0.5, torch.arange(n)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def _two_views(a: Tensor, b: Tensor, n: int) -> Tensor:
    """As SimCLR does: rows lie behind each other, and the own one is masked."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    alike = (z @ z.t()).masked_fill(torch.eye(2 * n, dtype=torch.bool), -math.inf)
    return F.cross_entropy(alike, (torch.arange(2 * n) + n) % (2 * n))


def _decorrelated(a: Tensor, b: Tensor, n: int) -> Tensor:
    """As Barlow Twins and VICReg do."""
    a, b = ((x - x.mean(0)) / x.std(0) for x in (a, b))
    products = a.t() @ b / (n - 1)
    return (products - torch.eye(len(products))).square().sum() + F.relu(1 - a.var(0)).mean()


def _ranked(a: Tensor, b: Tensor, n: int) -> Tensor:
    """As sentence encoders do: queries are picked by numbers, as are their documents."""
    own = torch.arange(n)
    alike = a[own] @ b.t()
    return (alike.logsumexp(1) - alike[own, own]).mean()


def _hardest(a: Tensor, b: Tensor, n: int) -> Tensor:
    apart = torch.cdist(a, b)
    far, near = apart.diagonal(), (apart + 1e3 * torch.eye(n)).amin(1)
    return F.relu(far - near + 1).mean()


def _nearest(a: Tensor, b: Tensor, n: int) -> Tensor:
    """KoLeo: an index into the rows of the batch."""
    found = (a @ a.t() - 9 * torch.eye(n)).argmax(1)
    return -torch.log((a - a[found]).norm(dim=1) + 1e-4).mean() + b.square().mean()


def _ratio(a: Tensor, b: Tensor, n: int) -> Tensor:
    weights = b.detach().abs().sum(1)
    return ((a - b).square().mean(1) * weights).sum() / weights.sum()


LOSSES: dict[str, Loss] = {
    "contrast": _contrast, "two views": _two_views, "decorrelated": _decorrelated,
    "hardest": _hardest, "nearest": _nearest, "ratio": _ratio,
    "product of means": lambda a, b, n: (a.mean(0) * b.mean(0)).sum(),
    "order": lambda a, b, n: (a.sort(0)[0] - b.flip(0)).square().mean() + a[0].sum() + a.max(),
    "attention over rows": lambda a, b, n: ((a @ b.t()).softmax(1) @ a - b).square().mean(),
}
NUMBERS: dict[str, Loss] = {
    "2 / n": lambda a, b, n: (a - b).square().sum() * (2 / n),
    "n / 2": lambda a, b, n: (a - b).square().sum() / (n / 2),
    "n - 1": lambda a, b, n: (a - b).square().sum() / max(n - 1, 1),
    "n (n - 1)": lambda a, b, n: 2.0 * (a - b).square().sum() / (n * (n - 1)),
    "sqrt(n)": lambda a, b, n: (a - b).square().sum() / math.sqrt(n),
    "log(n)": lambda a, b, n: (a - b).sum(1).logsumexp(0) - math.log(n),
    "c / (n - 1)": lambda a, b, n: (a - b).square().sum() * (2 / (n - 1)) * ((n - 1) * 0.01),
    "sqrt(c / (n - 1))": lambda a, b, n: (a - b).square().sum() * math.sqrt(2 / (n - 1)),
    "(n - 1) / n": lambda a, b, n: (a - b).square().mean() * ((n - 1) / n) + n / 50000,
    "tensor(n)": lambda a, b, n: (a - b).square().sum() / torch.tensor(n),
    "each row": lambda a, b, n: ((n - a) * b + n).clamp(max=float(n)).mean(),
    "whole numbers": lambda a, b, n: (a * (b.argmax(1, keepdim=True) * n + n)).mean() + b.mean(),
    "places": lambda a, b, n: ((a - b).sum(1) * (torch.arange(n) / (n - 1))).mean(),
}
def _first(n: int, ones: int) -> Tensor:
    mask = torch.zeros(n, 1)
    mask[:ones] = 1
    return mask


WRITTEN: dict[str, Loss] = {  # numbers of rows that were written as such
    "[4:]": lambda a, b, n: a[4:].mean() + b[4:].sum(),
    "[:6]": lambda a, b, n: a[:6].square().mean() + (b[-1] * b[::5].sum(0)).sum(),
    "the first 4": lambda a, b, n: (((a - b).sum(1)) * (torch.arange(n) < 4)).sum(),
    "groups of 4": lambda a, b, n: ((a - b).sum(1) * (torch.arange(n) // 4)).square().mean(),
    "rolled by 4": lambda a, b, n: (a.roll(4, 0) * b).mean(),
    "a band": lambda a, b, n: ((a @ b.t()) * torch.ones(n, n).triu(4)).square().mean(),
    "far apart": lambda a, b, n: (a @ b.t()).triu(4).square().mean(),
    "a diagonal": lambda a, b, n: (a @ b.t()).diagonal(4).square().mean(),
    "put off by 4": lambda a, b, n: (F.pad(a, (0, 0, 4, 0))[:n] * b).mean(),
    "written over": lambda a, b, n: (a * _first(n, 4)).mean() + b.mean(),
    "a constant": lambda a, b, n: torch.where(torch.arange(n)[:, None] < torch.tensor(4), a, b
                                              ).sum(),
}
BRANCHES: dict[str, Loss] = {  # the numbers of rows of a step take different ones
    "n > 7": lambda a, b, n: (a - b).square().mean() if n > 7 else (a * b).mean(),
    "n % 2": lambda a, b, n: (a - b).square().mean() * (1 + n % 2),
    "min(n, 6)": lambda a, b, n: (a - b).square().sum() / min(n, 6) + (a * b)[:min(n, 6)].mean(),
    "n // 3": lambda a, b, n: (a - b).square().sum() / (n // 3) + (b * n).mean() / (n >> 1),
    "ceil(n / 4)": lambda a, b, n: (a - b).square().mean() * math.ceil(n / 4) * round(n / 3),
    "int(n / 4)": lambda a, b, n: (a - b).square().mean() * int(n * 0.25) + a[int(n / 2):].mean(),
    "a.shape == (8, 4)": lambda a, b, n: a.sin().mean() * b.mean() if a.shape == (8, 4) else (
        a * b).mean(),
    "2 * n // n": lambda a, b, n: (a - b).square().mean() * (len(torch.cat([a, b])) // n),
    "n in (5, 8)": lambda a, b, n: (a - b).square().mean() * (3 if b.size(0) in (5, 8) else 5),
}
def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Two rows of each, one after the other, as tokens are packed."""
    return torch.stack([a, b], 1).flatten(0, 1)


PICKED: dict[str, Loss] = {  # rows by numbers that are made of those of rows
    "a flat index": lambda a, b, n: (a.reshape(-1)[
        torch.arange(n)[:, None] * 4 + b.topk(2, 1)[1]] * b[:, :2]).mean(),
    "groups by number": lambda a, b, n: torch.zeros(n, 4).index_add(
        0, torch.arange(n).repeat_interleave(2), _pairs(a, b)).square().mean(),
    "the ends": lambda a, b, n: (_pairs(a, b)[torch.full((n,), 2).cumsum(0) - 1] * a).mean(),
    "bags": lambda a, b, n: (F.embedding_bag(
        (b > 0).long().flatten(), a[0].repeat(2, 1).clone() * 0 + torch.arange(4.0),
        torch.arange(n) * 4, mode="sum") * a).mean(),
    "of a table": lambda a, b, n: (torch.linspace(0, 1, 64)[torch.arange(n)] * (a - b).sum(1)
                                   ).square().mean(),
    "a column by number": lambda a, b, n: (a.gather(1, (torch.arange(n) % 3)[:, None]) * b).mean(),
    "the next row": lambda a, b, n: (a[(torch.arange(n) + 1) % n] * b).mean(),
    "labels too": lambda a, b, n: F.cross_entropy(a @ b.t(), own := torch.arange(n)) - a[
        own, b.argmax(1)].mean(),
    "all of them": _ranked,
    "in other orders": lambda a, b, n: (_pairs(a, b) * b.repeat(2, 1)).mean(),
}
OFTEN = ("contrast", "decorrelated", "nearest", "ratio", "2 / n", "log(n)", "each row", "[4:]",
         "the first 4", "put off by 4", "n // 3", "n > 7", "min(n, 6)", "a flat index",
         "groups by number", "bags", "all of them", "in other orders")
DP2 = {"dp2": Plan.uniform(dp=2)}
PLANS = {**DP2, "pp2": Plan.uniform(pp=2), "zero3": Plan.uniform(dp=2, zero=3)}


class Twins(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(),
                                        nn.Linear(16, 4)).double() for _ in range(2))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.a(x), self.b(y), len(x))


def _trained(loss: Loss, plan: Plan | None) -> list[Tensor]:
    model: Any = Twins(loss)
    if plan is not None:
        model = ap.parallelize(model, plan=plan)
    opt, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step, rows in enumerate(ROWS):
        x, y = torch.randn(2, rows, 6, dtype=torch.float64,
                           generator=torch.Generator().manual_seed(step))
        losses.append(model(x, y))
        losses[-1].backward()
        opt.step()
        opt.zero_grad()
    return [torch.stack(losses).detach(), *(p.detach() for p in model.state_dict().values())]


def _hold(loss: Loss, plans: dict[str, Plan]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        want = _trained(loss, None)
        for name, plan in plans.items():
            for got, value in zip(_trained(loss, plan), want, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-12,
                                           msg=lambda text, name=name: f"{name}: {text}")
    finally:
        torch.set_default_dtype(torch.float32)


def _claims() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, loss in {**LOSSES, **NUMBERS, **WRITTEN, **BRANCHES, **PICKED}.items():
        if name in OFTEN:
            yield f"claim_{name}", lambda loss=loss: _hold(loss, DP2)  # type: ignore[misc]
        yield f"slow_claim_{name}", lambda loss=loss: _hold(loss, PLANS)  # type: ignore[misc]


globals().update(_claims())


class Outside(Twins):
    """Returns what a loss that is made outside compares, with the batch in two dims."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a = F.normalize(self.a(x), dim=1)
        return a @ F.normalize(self.b(y), dim=1).t(), a


def claim_a_value_with_the_batch_in_two_dims_is_returned_whole() -> None:
    for plan in DP2.values():
        plain, model = Outside(_contrast), ap.parallelize(Outside(_contrast), plan=plan)
        x, y = torch.randn(2, 5, 6, dtype=torch.float64)
        dist.broadcast(x, 0)
        dist.broadcast(y, 0)
        for net in plain, model:
            alike, a = net(x, y)
            (F.cross_entropy(alike, torch.arange(5)) + a.square().mean()).backward()
        for name, own in model.module.named_parameters():
            torch.testing.assert_close(own.grad, plain.get_parameter(name).grad)


def claim_forward_may_not_communicate_by_itself() -> None:
    def talks(a: Tensor, b: Tensor, n: int) -> Tensor:
        alike = a.t() @ b / n
        dist.all_reduce(alike)
        return alike.square().sum()

    def sees(a: Tensor, b: Tensor, n: int) -> Tensor:  # and cannot be traced
        return talks(a[a.sum(1) > 0], b[a.sum(1) > 0], n)

    x = torch.ones(4, 6, dtype=torch.float64)
    for loss in talks, sees:
        with pytest.raises(PlanError, match="communicates by itself"):
            ap.parallelize(Twins(loss), plan=DP2["dp2"])(x, x)


def claim_numbers_of_rows_that_are_labels_too_pick_no_rows_of_a_part() -> None:
    def both(a: Tensor, b: Tensor, n: int) -> Tensor:
        own = torch.arange(n) * 1  # a bare range is counted for each reader
        return F.cross_entropy(a @ b.t(), own) - a[own, b.argmax(1)].mean()

    x = torch.ones(4, 6, dtype=torch.float64)
    with pytest.raises(PlanError, match="arange"):
        ap.parallelize(Twins(both), plan=DP2["dp2"])(x, x)


class Bfloat(Twins):
    """Of that type itself, not as a plan computes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.bfloat16(), y.bfloat16())


def claim_a_loss_in_bfloat16_is_counted_once() -> None:
    x, y = torch.linspace(-1, 1, 48).view(2, 4, 6).double()
    plain, model = Bfloat(_contrast).bfloat16(), Bfloat(_contrast).bfloat16()
    got, want = ap.parallelize(model, plan=DP2["dp2"])(x, y), plain(x, y)
    torch.testing.assert_close(got.double(), want.double(), rtol=0.05, atol=0.0)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def uneven() -> None:
    def chain(*groups: tuple[int, ...], rows: int) -> Replica:
        return Replica(tuple(Stage(group) for group in groups), 1, rows)

    for loss in LOSSES.values():
        _hold(loss, {"2 : 1": Plan((chain((0,), rows=2), chain((2,), rows=1))),
                     "tensor degrees": Plan((chain((0, 1), rows=1), chain((2,), rows=2))),
                     "turned around": Plan((chain((2,), rows=1), chain((0,), (1,), rows=1)))})


@pytest.mark.slow
def test_replicas_of_other_shapes_look_at_all_rows_in_their_order() -> None:
    run_ranks(3, "test_all_rows:uneven")


class Flips(nn.Module):
    """Two values that mix rows; one is made of labels, whose made-up ones may be alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x + x.flip(0)), labels.flip(0))


@pytest.mark.parametrize("width", [7, 8, 17, 26, 28, 30])
def test_all_that_mixes_rows_is_found_whatever_is_drawn(width: int) -> None:
    given = torch.randn(4, width), torch.tensor([0, 1, 2, 3])
    assert len(trace(Flips(width), take_apart(given, {})[0]).mixed) == 2


class Carries(Twins):
    """A value with the batch in two dims goes from block to block."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a[1](self.a(x) @ self.b(y).t()).mean()


def test_the_batch_in_two_dims_stays_within_a_block() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    graph = trace(Carries(_contrast), take_apart((x, x), {})[0]).graph
    assert any(op.startswith("the batch in two dims of what") for op in graph.unjoined)


def test_micro_batches_cannot_look_at_all_rows() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    model = ap.parallelize(Twins(_contrast), plan=Plan.uniform(num_micro_batches=2))
    with pytest.raises(PlanError, match="cross_entropy") as caught:
        model(x, x)
    assert "use num_micro_batches=1; or" in caught.value.fix


@pytest.mark.parametrize("loss", [
    lambda a, b, n: a.sum() / torch.tensor([n, 3.0]).prod(),
    lambda a, b, n: (a.sum() / n**0.3), lambda a, b, n: a.new_full((4,), n - 1) @ a.sum(0)])
def test_a_number_of_rows_that_cannot_be_followed_is_refused(loss: Loss) -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    with pytest.raises(TraceError, match="depends on the number of rows"):
        trace(Twins(loss), take_apart((x, x), {})[0])


@pytest.mark.parametrize("loss", [
    lambda a, b, n: torch.stack([a[i] * b[i] for i in range(n)]).mean(),
    lambda a, b, n: torch.cat([x.square() for x in a.split(4)]).mean() + b.mean(),
    lambda a, b, n: sum(a[i: i + 2].square().mean() for i in range(0, n, 2)) + b.mean()])
def test_a_loop_over_rows_is_refused_at_once(loss: Loss) -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    with pytest.raises(TraceError, match="row by row, or by few rows"):
        trace(Twins(loss), take_apart((x, x), {})[0])


def test_numbers_that_people_write_are_not_traced_twice() -> None:
    written = (0.044715, 1e-5, 1e-12, 32**-0.5, 100**-0.25, math.sqrt(2 / math.pi), 1.702, 1 / 3,
               math.log(10000), 2 * math.pi, 1 / 255, 1e-6, 0.5, 0.1)
    assert not any(map(may_be_of_rows, written))


@pytest.mark.parametrize("seed", range(300, 2300, 100))
def test_python_is_answered_as_for_the_rows_of_the_call(seed: int) -> None:
    for own in range(seed, seed + 100):
        _compare_answers(random.Random(own))


def _compare_answers(draw: random.Random) -> None:
    steps = [(draw.choice(OPERATORS), draw.randint(1, 9), draw.random() < 0.3) for _ in range(4)]

    def made(n: Any) -> Any:
        for step, number, turned in steps:
            n = step(number, n) if turned else step(n, number)
        return n

    num_rows, answers = draw.randint(2, 300), dict[Any, Any]()
    with asking(num_rows, ROWS_OF_A_TRACE, answers):
        count = made(torch.empty(ROWS_OF_A_TRACE, 1, device="meta").shape[0])
        got = [count > bound for bound in BOUNDS], bool(count), math.floor(count) % 7
    want = made(num_rows)
    assert got == ([want > bound for bound in BOUNDS], bool(want), math.floor(want) % 7)
    assert holds(answers, num_rows)


def test_a_single_row_is_no_branch_where_a_size_of_1_is_looked_for() -> None:
    def loss(a: Tensor, b: Tensor, n: int) -> Tensor:
        return (a.expand(n, 4) if n != 1 else a).mean() + b.mean() * (3 if n > 1 else 5)

    one, many = (trace(Twins(loss), take_apart(torch.ones(2, n, 6).double().unbind(), {})[0])
                 for n in (1, 9))
    assert holds(many.answers, 2) and not holds(many.answers, 1) and not holds(one.answers, 2)
    assert any("expand" in str(graph) for graph in one.programs.values())


def test_what_this_package_asks_is_answered_as_for_the_trace() -> None:
    answers = dict[Any, Any]()
    with asking(8, ROWS_OF_A_TRACE, answers):
        size = torch.empty(ROWS_OF_A_TRACE, 1, device="meta").shape[0]
        assert is_of_rows(size) and not answers

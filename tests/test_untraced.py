"""Models that cannot be traced: replicas of the module as it is, and what is said of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import PlanError, RunError
from autopar_torch.run.copies import apart
from autopar_torch.run.returned import NotGatheredError

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
ZERO3 = {"dp": 2, "zero": 3}


ASKED = {"tp": 2, "num_micro_batches": 2, "recompute": True, "precision": "bfloat16"}


def _near(a: Tensor | float, b: Tensor | float, tolerance: float = 1e-5) -> bool:
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    return float((a - b).abs().max()) <= tolerance * max(1e-3, float(b.abs().max()))


class Branching(nn.Module):
    """Looks at data while it runs, so it cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            return self.a(x).sum()
        return (self.a(x)[:, 0] - y).square().mean()


def claim_a_model_that_cannot_be_exported_trains_and_says_why() -> None:
    torch.manual_seed(0)
    plain = Branching()
    model = ap.parallelize(Branching(), plan=ap.Plan.uniform(dp=2))
    model.module.load_state_dict(plain.state_dict())
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(5.0)
    loss, want = model(x, y), plain(x, y)
    loss.backward()
    want.backward()
    assert _near(loss, want) and _near(model.module.a.weight.grad, plain.a.weight.grad)
    assert "float(x.detach().sum()) > 1e9" in model.fallback_reason


class Ranked(nn.Module):
    """As recommenders on a graph are: a sparse matrix times all embeddings, then some rows."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.all = nn.Embedding(14, 8)
        graph = (torch.rand(14, 14) > 0.6).double().to_sparse()
        if registered:
            self.register_buffer("graph", graph)
        else:
            self.graph = graph

    def forward(self, users: Tensor, liked: Tensor) -> Tensor:
        known = self.all.weight + torch.sparse.mm(self.graph, self.all.weight)
        scores = (known[users % 6] * known[6 + liked % 8]).sum(-1)
        return F.binary_cross_entropy_with_logits(scores, (liked % 2).to(scores.dtype))


def claim_sparse_matrices_train_as_they_are() -> None:
    for registered in (True, False):
        torch.manual_seed(0)
        plain = Ranked(registered)
        batches = [tuple(torch.randint(0, 24, (2, rows))) for rows in (8, 8, 7)]
        model = _same_steps(plain, batches, lambda own, *given: own(*given))
        assert "sparse" in model.fallback_reason


class Detecting(nn.Module):
    """Returns a loss and scores; the loss is made of none where nothing is found."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.a(x)
        found = y > 0
        if float(found.sum()) == 0:
            return out.new_zeros(()), out
        return ((out[:, 0] - y).square() * found).mean(), out


def claim_ranks_agree_on_what_the_loss_is_whatever_their_rows_are() -> None:
    batches = []
    for step in range(3):
        gen = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, 4, generator=gen), torch.ones(6)
        y[3:] = -1 if step == 1 else 1
        batches.append((x.double(), y.double()))
    torch.manual_seed(0)
    _same_steps(Detecting(), batches, _loss)


class Recording(Branching):
    """Keeps the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.max())
        return super().forward(x, y)


class Leaving(Branching):
    """Leaves in attributes what it saw, a counter, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.table, self.log = None, None, []
        self.calls, self.most = 0, 0.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(4.0)
        self.seen, self.most = x.square().mean(), x.max().item()
        self.penalty = self.a(x).square().mean()
        return super().forward(x + 0 * self.table, y)


def claim_what_each_rank_leaves_of_its_own_rows_is_not_used() -> None:
    model = ap.parallelize(Leaving(), plan=ap.Plan.uniform(dp=2))
    own, plain = model.module, Leaving()
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6.0)
    for number in range(2):
        model(x, y).backward()
        assert own.calls == number + 1 and own.table.tolist() == [0, 1, 2, 3]
        for use in (lambda: own.seen + 1, lambda: own.most * 2, lambda: own.penalty.backward()):
            with pytest.raises(NotGatheredError, match="its own rows"):
                use()
    model.eval()
    with torch.no_grad():
        model(x, y), plain(x, y)
    assert _near(own.seen, plain.seen) and own.most == plain.most


class Asking(Branching):
    """Asks for a value of all rows, or of each."""

    def __init__(self, each: bool = False) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [self.a(row) for row in x] if self.each else [self.a(x).mean()]
        scale = [2.0 if value > 0 else 1.0 for value in values]
        if self.each:
            return ((self.a(x)[:, 0] - y).square() * torch.tensor(scale)).mean()
        return super().forward(x, y) * scale[0]


def claim_replicas_that_take_other_branches_are_refused() -> None:
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6.0)
    model, plain = (ap.parallelize(Asking(), plan=ap.Plan.uniform(dp=2)), Asking())
    for m in (model.module, plain):
        m.load_state_dict({"a.weight": torch.tensor([[1.0, 0, 0, 0]]), "a.bias": torch.zeros(1)})
    assert _near(model(x.abs(), y), plain(x.abs(), y))
    with pytest.raises(RunError, match="different branches"):
        model(torch.cat([x[:3].abs(), -x[3:].abs()]), y)
    model, plain = ap.parallelize(Asking(True), plan=ap.Plan.uniform(dp=2)), Asking(True)
    plain.load_state_dict(model.state_dict())
    assert _near(model(x, y), plain(x, y))


class Together(Branching):
    """Every row looks at all rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.softmax(0), y)


class Differentiating(Together):
    """torch.func refuses what looks at the tensors that are kept for a backward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        grad = torch.func.grad(lambda t: t.cos().sum())(x)
        return super().forward(x + 0 * grad, y)


class Second(Branching):
    """Has its rows in the second dim, and a place for each of 5 in the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + torch.arange(5.0)[:, None], y)


class Many(Branching):
    """Every row looks at all rows, if there are many."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if len(x) > 4 else x, y)


def claim_rows_that_depend_on_each_other_are_not_shared_out() -> None:
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(5.0)
    for kind, said in ((Together, "the loss of rows"), (Many, "the loss of rows"),
                       (Differentiating, "the loss of rows"),
                       (Recording, "buffer largest"), (Second, "4 of 5 rows alone do not run")):
        model = ap.parallelize(kind(), plan=ap.Plan.uniform(dp=2))
        before = torch.get_rng_state()
        with pytest.raises(PlanError, match=said):
            model(x, y)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(not b.any() for b in model.module.buffers())


class Words(nn.Module):
    """A language model over rows, or over (length, rows), that cannot be exported."""

    def __init__(self, rows_first: bool = True, ignored: int = -100, reduction: str = "mean",
                 weighed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.unused = nn.Embedding(12, 8), nn.Linear(2, 2)
        self.mix, self.along = nn.Linear(8, 8), 1 if rows_first else 0
        self.head, self.heat = nn.Linear(8, 12), nn.Parameter(torch.tensor(0.5))
        self.ignored, self.reduction, self.weighed = ignored, reduction, weighed

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        if float(ids.sum()) > 1e9:
            return self.heat
        logits = self.head(self.mix(self.embed(ids)).tanh().cumsum(self.along))
        if labels is None:
            return {"logits": logits, "flat": logits.view(-1, 12), "heat": self.heat.exp()}
        if mask is not None:
            each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            loss = (each * mask.flatten()).sum() / mask.sum()
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                   ignore_index=self.ignored, reduction=self.reduction)
        return loss + logits.square().mean() if self.weighed else loss, logits


class Shifted(Words):
    """Each position predicts the next one, as causal models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        return super().forward(ids[:, :-1], None if labels is None else labels[:, 1:], mask)


def _words(rows: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(1, 12, (2, rows, 6),
                                generator=torch.Generator().manual_seed(seed))
    return ids, labels


def _cut(labels: Tensor, value: int = -100) -> Tensor:
    """Labels left out in unequal numbers: all of the last two rows, most of the first."""
    labels = labels.clone()
    labels[0, 2:] = labels[-2:] = value
    return labels


def _same_steps(plain: nn.Module, batches: Any, loss_of: Any, **options: Any) -> Any:
    """Losses and gradients of steps on two ranks are those of plain PyTorch."""
    options = {"plan": ap.Plan.uniform(dp=2), **options}
    model = ap.parallelize(copy.deepcopy(plain).double(), **options)
    plain.double()
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for number, given in enumerate(batches):
        loss, want = (loss_of(m, *given) for m in (model, plain))
        loss.backward()
        want.backward()
        assert _near(loss, want, 1e-9), (number, float(loss), float(want))
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or _near(q.grad, p.grad, 1e-8), (number, name)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert model.fallback_reason
    return model


def _loss(model: Any, *given: Tensor) -> Tensor:
    loss: Tensor = model(*given)[0]
    return loss


def claim_labels_left_out_in_unequal_numbers_are_weighed_though_the_first_batch_has_none() -> None:
    for kind in (Words, Shifted):
        (ids, labels), (one, _) = _words(), _words(1)
        batches = [(ids, labels), (ids, _cut(labels)), (one, one), _words(2)]
        _same_steps(kind(), batches, _loss)


def claim_paddings_masks_and_sums_are_weighed() -> None:
    ids, labels = _words()
    _same_steps(Words(ignored=7), [(ids, labels), (ids, _cut(labels, 7))], _loss)
    _same_steps(Words(reduction="sum"), [(ids, labels), (ids, _cut(labels))], _loss)
    mask = torch.ones(5, 6)
    _same_steps(Words(), [(ids, labels, m) for m in (mask, _cut(mask, 0))], _loss)


def claim_two_means_in_one_loss_are_refused() -> None:
    model = ap.parallelize(Words(weighed=True), plan=ap.Plan.uniform(dp=2))
    with pytest.raises(PlanError, match=r"(?s)cannot be shared out.*one mean"):
        model(*_words())


def _outside(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    out = model(ids)
    spread: Tensor = out["flat"].logsumexp(0).max() * out["heat"]
    return F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten()) + spread


def claim_the_loss_may_be_outside_of_a_model_that_cannot_be_exported() -> None:
    (ids, labels), (one, _) = _words(), _words(1)
    _same_steps(Words(), [(ids, labels), (ids, _cut(labels)), (one, one)], _outside)


class Counting(Words):
    """Returns numbers beside tensors, and reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        self.calls += 1
        logits = super().forward(ids)["logits"] * (1 + 0 * self.calls)
        return logits, ids.shape[0], logits.sum().item()


def claim_numbers_are_those_of_all_rows_or_withheld() -> None:
    def loss_of(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        logits, rows, total = model(ids, labels)
        assert type(total) is float or "number 2" in repr(total)
        loss: Tensor = logits.square().sum() / rows
        return loss

    _same_steps(Counting(), [_words(rows) for rows in (4, 5, 1)], loss_of)


def claim_two_forwards_before_one_backward_and_gradients_that_add_up() -> None:
    def loss_of(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        (_loss(model, ids, labels) / 3).backward()
        return _outside(model, ids, labels) + _outside(model, ids[:3], labels[:3])

    _same_steps(Words(), [_words()], loss_of)


def claim_rows_in_another_dim_are_shared_out() -> None:
    ids, labels = (t.t().contiguous() for t in _words())
    for loss_of in (_loss, _outside):
        _same_steps(Words(rows_first=False), [(ids, labels), (ids, _cut(labels.t()).t())], loss_of,
                    batch_dim=1)


def claim_bfloat16_computes_in_it_and_keeps_weights_in_float32() -> None:
    plain = Words()
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(dp=2, precision="bfloat16"))
    ids, labels = _words(4)
    loss = _loss(model, ids, labels)
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        want = _loss(plain, ids, labels)
    want.backward()
    assert _near(loss, want) and not _near(loss, _loss(plain, ids, labels), 1e-6)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert q.grad is None or (p.dtype == p.grad.dtype == torch.float32
                                  and _near(p.grad, q.grad, 0.05))


class _Branches(nn.Linear):
    """Cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.sum() if float(x.detach().sum()) > 1e9 else out.mean()


def test_the_plan_of_an_untraceable_model_says_what_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parallel = ap.parallelize(_Branches(4, 4), constraints=ASKED)
    parallel(torch.ones(4, 4)).backward()
    assert parallel.fallback_reason
    assert parallel.plan.num_micro_batches == 1 and parallel.plan.precision == "bfloat16"
    assert not parallel.plan.replicas[0].stages[0].recompute
    assert "cannot be traced: num_micro_batches, recompute" in caplog.text


def test_a_model_with_the_old_weight_norm_can_be_tried() -> None:
    """Its weight is no leaf, which torch does not copy."""
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError):
        copy.deepcopy(layer)
    made = apart(layer)
    assert torch.equal(made(torch.ones(1, 4)), layer(torch.ones(1, 4)))
    assert not {id(p) for p in made.parameters()} & {id(p) for p in layer.parameters()}


def test_a_models_own_train_is_called() -> None:
    class Layer(nn.Linear):
        def train(self, positive: Any = True, negative: Any = None) -> Any:  # type: ignore[override]
            return super().train(positive) if negative is None else positive + negative

    model = ap.parallelize(Layer(4, 4))
    assert model.train(torch.ones(1), torch.ones(1)) == 2
    assert model.train(False) is model and not model.training and not model.module.training


def test_an_untraceable_model_gets_its_weights(tmp_path: Path) -> None:
    given = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    save_file(given, str(tmp_path / "own.safetensors"))
    parallel = ap.parallelize(_Branches(4, 4), weights=tmp_path)
    parallel(torch.ones(4, 4))
    assert parallel.fallback_reason
    assert all(torch.equal(parallel.state_dict()[n], v) for n, v in given.items())


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

"""The loss of the batch is that of plain PyTorch, whatever the loss: shared out, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
from autopar_torch.errors import PlanError

ROWS = 6
MIXED = "triplet", "cosine", "rolled over rows"  # which may be refused, as is what has no rule
_DRAW = torch.Generator().manual_seed(1)
X, Y = torch.randn(ROWS, 8, generator=_DRAW), torch.randn(ROWS, 4, generator=_DRAW).tanh()
CLASS, SIGN = torch.arange(ROWS) % 4, torch.tensor([1.0, -1, 1, 1, -1, 1])
MEANS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "triplet": (lambda o, y: F.triplet_margin_loss(o, y, y.flip(1)), Y),
    "cosine": (lambda o, s: F.cosine_embedding_loss(o, o.flip(1), s), SIGN),
    "multi margin": (F.multi_margin_loss, CLASS),
    "multilabel margin": (F.multilabel_margin_loss, torch.tensor([[0, 1, -1, -1]] * ROWS)),
    "margin ranking": (lambda o, s: F.margin_ranking_loss(o[:, 0], o[:, 1], s), SIGN),
    "hinge": (F.hinge_embedding_loss, Y.sign()),
    "soft margin": (F.soft_margin_loss, Y.sign()),
    "poisson": (F.poisson_nll_loss, Y.abs()),
    "binary": (lambda o, y: F.binary_cross_entropy(o.sigmoid(), y), Y.abs()),
    "huber": (F.huber_loss, Y),
    "nll with weights": (lambda o, c: F.nll_loss(o.log_softmax(1), c, Y[0].abs()), CLASS),
    "nll": (lambda o, c: F.nll_loss(o.log_softmax(1), c, ignore_index=1), CLASS),
    "soft labels": (lambda o, y: F.cross_entropy(o, y.softmax(1), Y[0].abs()), Y),
    "mean over rows first": (lambda o, y: (o - y).square().mean(0).sum(), Y),
    "weighted": (lambda o, y: ((o - y).square().mean(1) * y[:, 0].abs()).sum()
                 / y[:, 0].abs().sum(), Y),
    "penalties": (lambda o, c: 0.1 * Y.square().sum() + F.cross_entropy(o, c) + Y.abs().sum()
                  - o.square().mean(), CLASS),
    "mean of a kl": (lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1)), Y),
    "kl": (lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"), Y),
    "rolled": (lambda o, y: (o.roll(1, 1) - y.flip(1)).square().mean(), Y),
    "rolled over rows": (lambda o, y: (o.roll(1, 0) - y).square().mean(), Y),
}


class Model(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.loss = nn.Linear(8, 4), loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.body(x), target)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_loss_is_that_of_the_whole_batch(name: str, num_micro_batches: int) -> None:
    loss_of, target = MEANS[name]
    plain = Model(loss_of)
    want = plain(X, target)
    want.backward()
    model = ap.parallelize(
        Model(loss_of), plan=ap.Plan.uniform(num_micro_batches=num_micro_batches)
    )
    try:
        loss = model(X, target)
    except PlanError as error:
        assert name in MIXED and num_micro_batches > 1
        assert "statistics of the whole batch" in error.what
        return
    loss.backward()
    torch.testing.assert_close(loss, want.detach(), check_dtype=False)
    torch.testing.assert_close(model.module.body.weight.grad, plain.body.weight.grad)

"""Every loss of torch.nn.functional, and some that people write: a script of one step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trust.lab import CASES, Case, Net, Wrap, rows, train, weights

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # logits, labels, numbers, signs


def _focal(o: Tensor, y: Tensor, t: Tensor, s: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def _dice(o: Tensor, y: Tensor, t: Tensor, s: Tensor) -> Tensor:
    guess, real = o.sigmoid(), (t > 0).float()
    return 1 - 2 * (guess * real).sum() / (guess.sum() + real.sum())


def _ctc(o: Tensor, y: Tensor, t: Tensor, s: Tensor) -> Tensor:
    said = o.log_softmax(-1).expand(6, -1, -1)
    long = torch.full_like(y, 6)
    return F.ctc_loss(said, torch.stack([y, y], 1).clamp(min=1), long, torch.full_like(y, 2))


LOSSES: dict[str, Loss] = {
    "triplet": lambda o, y, t, s: F.triplet_margin_loss(o, t, t + 1),
    "cosine_embedding": lambda o, y, t, s: F.cosine_embedding_loss(o, t, s),
    "margin_ranking": lambda o, y, t, s: F.margin_ranking_loss(o[:, 0], t[:, 0], s),
    "hinge_embedding": lambda o, y, t, s: F.hinge_embedding_loss(o[:, 0], s),
    "soft_margin": lambda o, y, t, s: F.soft_margin_loss(o[:, 0], s),
    "multi_margin": lambda o, y, t, s: F.multi_margin_loss(o, y),
    "multilabel_soft": lambda o, y, t, s: F.multilabel_soft_margin_loss(o, (t > 0).float()),
    "nll": lambda o, y, t, s: F.nll_loss(o.log_softmax(1), y, ignore_index=3),
    "nll_weighted": lambda o, y, t, s: F.nll_loss(o.log_softmax(1), y, torch.arange(1.0, 9)),
    "gaussian_nll": lambda o, y, t, s: F.gaussian_nll_loss(o, t, t * 0 + 1),
    "poisson_nll": lambda o, y, t, s: F.poisson_nll_loss(o, t.abs()),
    "kl_batchmean": lambda o, y, t, s: F.kl_div(
        o.log_softmax(1), t.softmax(1), reduction="batchmean"
    ),
    "bce": lambda o, y, t, s: F.binary_cross_entropy(o.sigmoid(), (t > 0).float()),
    "bce_logits": lambda o, y, t, s: F.binary_cross_entropy_with_logits(o, (t > 0).float()),
    "mse": lambda o, y, t, s: F.mse_loss(o, t),
    "mse_sum": lambda o, y, t, s: F.mse_loss(o, t, reduction="sum"),
    "l1": lambda o, y, t, s: F.l1_loss(o, t),
    "smooth_l1": lambda o, y, t, s: F.smooth_l1_loss(o, t),
    "huber": lambda o, y, t, s: F.huber_loss(o, t, delta=0.5),
    "soft_labels": lambda o, y, t, s: F.cross_entropy(o, t.softmax(1)),
    "class_weights": lambda o, y, t, s: F.cross_entropy(o, y, torch.arange(1.0, 9)),
    "smoothed": lambda o, y, t, s: F.cross_entropy(o, y, label_smoothing=0.1),
    "ignored": lambda o, y, t, s: F.cross_entropy(o, y, ignore_index=3),
    "ctc": _ctc,
    "focal": _focal,
    "dice": _dice,
    "log_cosh": lambda o, y, t, s: (o - t).cosh().log().mean(),
    "root_mean_square": lambda o, y, t, s: F.mse_loss(o, t).sqrt(),
    "largest": lambda o, y, t, s: (o - t).abs().max(),
    "median": lambda o, y, t, s: (o - t).abs().median(),
    "norm": lambda o, y, t, s: (o - t).norm(),
    "spread": lambda o, y, t, s: o.std() + o.var(0).mean(),
    "hardest": lambda o, y, t, s: F.cross_entropy(o, y, reduction="none").topk(2)[0].mean(),
    "cdist": lambda o, y, t, s: torch.cdist(o, t).mean(),
    "gathered": lambda o, y, t, s: -o.log_softmax(1).gather(1, y[:, None]).mean(),
    "indexed": lambda o, y, t, s: -o.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "twice_over_rows": lambda o, y, t, s: (o - t).square().sum() * (2 / len(y)),
    "rows_less_one": lambda o, y, t, s: (o - t).square().sum() / (len(y) - 1),
    "root_of_rows": lambda o, y, t, s: (o - t).square().sum() / len(y) ** 0.5,
    "half_of_rows": lambda o, y, t, s: (o - t)[: len(y) // 2].square().mean(),
    "pairs": lambda o, y, t, s: torch.cdist(o, o).square().sum() / (len(y) * (len(y) - 1)),
    "contrastive": lambda o, y, t, s: F.cross_entropy(o @ t.T, torch.arange(len(y))),
    "centred": lambda o, y, t, s: (o - o.mean(0) - t).abs().mean(),
    "masked": lambda o, y, t, s: ((o - t) ** 2)[t > 0].mean(),
}


class _Judged(Net):
    def __init__(self, judge: Loss) -> None:
        super().__init__()
        self.judge = judge

    def forward(self, x: Tensor, y: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return self.judge(self.head(self.features(x)), y, t, s)


def _script(judge: Loss) -> Callable[[Wrap], Any]:
    def run(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        model = wrap(_Judged(judge))
        (x, y), t = rows(7), rows(7, 3)[0][:, :8].contiguous()
        return train(model, [(x, y, t, t[:, 0].sign())] * 2), weights(model)

    return run


CASES.update({
    f"loss_{name}": Case(f"loss_{name}", "losses", _script(judge))
    for name, judge in LOSSES.items()
})

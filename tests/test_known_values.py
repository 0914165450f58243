"""Claims about small tensors that forward makes of numbers, whose values Python may ask for, and
about numbers that it takes out of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar_torch as ap
import claims
from autopar_torch.errors import TraceError

WIDTH = 8
PLANS = {"tp2": ap.Plan.uniform(tp=2), "pp2": ap.Plan.uniform(pp=2), "dp2": ap.Plan.uniform(dp=2)}
Tail = Callable[[Tensor], Tensor]


def _crops(h: Tensor) -> Tensor:
    """As DINO groups crops of equal sizes."""
    crops = [h, h + 1, h[:, :4].repeat(1, 2)[:, :6], h[:, 1:7]]
    sizes = torch.tensor([crop.shape[-1] for crop in crops])
    ends = torch.unique_consecutive(sizes, return_counts=True)[1].cumsum(0)
    start, total = 0, h.sum() * 0
    for end in ends:
        total, start = total * 2 + torch.cat(crops[start:end]).square().mean(), end
    return total


def _written(h: Tensor) -> Tensor:
    counts = torch.tensor([1, 2, 3])
    counts[0], tail = 5, counts[1:]
    tail.add_(1)
    return h[:, :int(counts[0])].mean() * 3 + h[:, :counts.tolist()[2]].square().mean()


def _asked(h: Tensor) -> Tensor:
    """Of the rows of each call, as a number or in a list."""
    many = torch.tensor(len(h)) > 5
    return h.square().mean() * (2 if many else 1) * torch.tensor([h.shape[0], 2]).tolist()[0]


def _viewed(h: Tensor) -> Tensor:
    counts = torch.tensor([1, 2, 3])
    tail = counts[1:]
    tail[0] = len(h)
    return h.square().mean() * (2 if counts[1] > 5 else 1)


RIGHT: dict[str, Tail] = {
    "crops": _crops, "written": _written, "asked": _asked,
    "counted": lambda h: h.square().sum() / max(1, (h > 0).sum().item()),
    "a share": lambda h: h.square().sum() * (1 / (h > 0).sum().item() - 1 / len(h.flatten()) ** 2),
    "at least": lambda h: h.sum() / max(h.detach().square().sum().item(), 1.0),
    "of the largest": lambda h: (h / (h.detach().abs().max().item() + 1)).square().mean(),
    "a view": _viewed,
    "picked": lambda h: h[:, (k := torch.arange(4))[k < torch.tensor(len(h) - 2)]].square().mean(),
    "a range": lambda h: h.square().mean(torch.arange(h.dim()).tolist()),
    "a mask": lambda h: h[:, :3].mean() if (torch.tensor([1.0, 3.0]) > 2).any() else h.mean(),
}


class Net(nn.Module):
    def __init__(self, tail: Tail) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(),
                                 nn.Linear(WIDTH, WIDTH)).double()
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.net(x))


def _batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64) for rows in (6, 6, 4)]


def claim_their_values_decide_as_in_one_process() -> None:
    for name, tail in RIGHT.items():
        for plan, own in PLANS.items():
            plain = Net(tail)
            model = ap.parallelize(copy.deepcopy(plain), plan=own)
            for x in _batches():
                got, want = model(x), plain(x)
                torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-14,
                                           msg=f"{name} {plan}")
                for one, loss in (model, got), (plain, want):
                    one.zero_grad()
                    loss.backward()
                    torch.optim.SGD(one.parameters(), lr=0.1).step()
            torch.testing.assert_close(dict(model.state_dict()), plain.state_dict())


def claim_what_data_was_written_into_is_known_no_more() -> None:
    def written(h: Tensor) -> Tensor:
        counts = torch.tensor([1, 2, 3])
        tail = counts[1:]
        tail[0] = (h.detach()[0, 0] > 0).long() + 1
        return h[:, :int(counts[1])].mean()

    with pytest.raises(TraceError, match="data-dependent"):
        ap.parallelize(Net(written), plan=PLANS["tp2"])(_batches()[0])


def claim_an_op_that_returns_nothing_is_not_dropped() -> None:
    def moves(h: Tensor) -> Tensor:
        scales = [torch.ones(WIDTH, dtype=h.dtype), torch.ones(WIDTH, dtype=h.dtype)]
        torch._foreach_mul_(scales, 0.5)
        return (h * scales[0] * scales[1]).square().mean()

    with pytest.raises(TraceError, match="_foreach_mul_ writes to several arguments"):
        ap.parallelize(Net(moves), plan=PLANS["tp2"])(_batches()[0])


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

"""Models whose forward is made at random: linears with ops between them that mix rows, count them,
pick them by number, and a loss. Really trained by 2 ranks, each is right or refused.

python tests/forwards.py --first 1000 --count 500      # what was wrong, and counts
"""

from __future__ import annotations

import argparse
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import oracle
from autopar_torch.errors import AutoparError
from autopar_torch.plan import Plan
from autopar_torch.run import world
from ranks import run_ranks

WIDTH, LIMIT = 8, 1e-7
ROWS = 8, 7, 5  # of each step
PLANS = {
    "dp2": Plan.uniform(dp=2), "pp2": Plan.uniform(pp=2), "tp2": Plan.uniform(tp=2),
    "zero3": Plan.uniform(dp=2, zero=3), "dp2 mb2": Plan.uniform(dp=2, num_micro_batches=2),
    "pp2 mb2": Plan.uniform(pp=2, num_micro_batches=2), "untraced": Plan.uniform(dp=2),
}


class Given(NamedTuple):
    """Beside the inputs: a class of each row, an order of the rows, and targets."""

    label: Tensor
    order: Tensor
    target: Tensor


Op = Callable[[Tensor, Given, int], Tensor]


def _written(x: Tensor, k: int) -> Tensor:
    y = x.clone()
    y[k % len(x)] = 0
    y[:, 1] += 1
    return y


def _numbers(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None]


def _alike(x: Tensor) -> Tensor:
    return x @ x.t() / WIDTH


def _classes(b: Given) -> Tensor:
    return F.one_hot(b.label, 3).double()


APART: dict[str, Op] = {
    "gelu": lambda x, b, k: F.gelu(x),
    "softmax": lambda x, b, k: x.softmax(1),
    "normalize": lambda x, b, k: F.normalize(x, dim=1),
    "layer_norm": lambda x, b, k: F.layer_norm(x, (WIDTH,)),
    "group_norm": lambda x, b, k: F.group_norm(x, 2),
    "instance_norm": lambda x, b, k: F.instance_norm(x.view(-1, 2, 4)).view(-1, WIDTH),
    "flip columns": lambda x, b, k: x.flip(1),
    "roll columns": lambda x, b, k: x.roll(k, 1),
    "sort columns": lambda x, b, k: x.sort(1)[0],
    "view": lambda x, b, k: x.view(len(x), 2, -1).mean(1).repeat(1, 2),
    "repeat": lambda x, b, k: x.repeat(2, 1).view(2, -1, WIDTH).sum(0),
    "repeat_interleave": lambda x, b, k: x.repeat_interleave(2, 0).view(-1, 2, WIDTH).sum(1),
    "diagonal": lambda x, b, k: x * (x @ x.t()).diagonal()[:, None].tanh(),
    "einsum": lambda x, b, k: torch.einsum("ij,ij->i", x, x)[:, None] * x / 10,
    "gather": lambda x, b, k: x.gather(1, b.label[:, None]) + x,
    "one_hot": lambda x, b, k: x + F.one_hot(b.label, WIDTH),
    "masked_fill": lambda x, b, k: x.masked_fill((b.label == 1)[:, None], 0.0),
    "rows in the last dim": lambda x, b, k: (x.t() - x.t().mean(0, keepdim=True)).t(),
}
MIXED: dict[str, Op] = {
    "softmax": lambda x, b, k: x.softmax(0),
    "mean": lambda x, b, k: x - x.mean(0),
    "mean of all": lambda x, b, k: x * x.mean(),
    "std": lambda x, b, k: x / (x.std(0) + 1),
    "var": lambda x, b, k: x * x.var(),
    "max": lambda x, b, k: x - x.max(0)[0],
    "amax": lambda x, b, k: x / (x.abs().amax() + 1),
    "normalize": lambda x, b, k: F.normalize(x, dim=0),
    "cumsum": lambda x, b, k: x.cumsum(0),
    "cummax": lambda x, b, k: x.cummax(0)[0],
    "flip": lambda x, b, k: x.flip(0),
    "sort": lambda x, b, k: x.sort(0)[0],
    "argsort": lambda x, b, k: x[x[:, 0].argsort()],
    "logsumexp": lambda x, b, k: x - x.logsumexp(0),
    "prod": lambda x, b, k: x + x.tanh().prod(0),
    "any": lambda x, b, k: x * (1 + (x > 2).any(0)),
    "count": lambda x, b, k: x * (x > 0).sum(0),
    "median": lambda x, b, k: x - x.median(0)[0],
    "quantile": lambda x, b, k: x - torch.quantile(x, 0.5, dim=0),
    "batch_norm": lambda x, b, k: F.batch_norm(x, None, None, training=True),
    "attention": lambda x, b, k: _alike(x).softmax(1) @ x,
    "but itself": lambda x, b, k: x - _alike(x).masked_fill(
        torch.eye(len(x), dtype=torch.bool), -1e3).softmax(1) @ x,
    "products": lambda x, b, k: x @ (x.t() @ x) / len(x),
    "norm of products": lambda x, b, k: x * (x.t() @ x).norm() / 50,
    "distances": lambda x, b, k: x * torch.cdist(x, x).mean(1, keepdim=True),
    "differences": lambda x, b, k: x + (x[:, None] - x[None]).relu().mean(1),
    "dot of all": lambda x, b, k: x * (x.flatten() @ x.flatten()) / 50,
    "in order": lambda x, b, k: x[b.order] + x,
    "means of classes": lambda x, b, k: x - (_classes(b).t() @ x)[b.label],
    "same class": lambda x, b, k: (b.label[:, None] == b.label[None]).double() @ x / 3,
    "index_add": lambda x, b, k: torch.zeros(3, WIDTH).index_add(0, b.label, x)[b.label],
    "where": lambda x, b, k: torch.where(b.label[:, None] > 1, x, x.mean(0)),
    "mean of some": lambda x, b, k: x - (x * (b.label > 0)[:, None]).sum(0) / (
        b.label > 0).sum().clamp(min=1),
    "flattened": lambda x, b, k: x.t().contiguous().view(-1, WIDTH) + x,
    "chunks": lambda x, b, k: torch.cat([p - p.mean(0) for p in x.chunk(2)]),
    "neighbours": lambda x, b, k: x + F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t(),
    "lower": lambda x, b, k: torch.ones(len(x), len(x)).tril() @ x / len(x),
}
NUMBERED: dict[str, Op] = {
    "roll": lambda x, b, k: x + x.roll(k, 0),
    "roll all": lambda x, b, k: x + x.roll(k),
    "row": lambda x, b, k: x - x[k % 5],
    "from": lambda x, b, k: x + x[k:].sum(0),
    "to": lambda x, b, k: x * x[:k or 1].mean(0),
    "steps": lambda x, b, k: x + x[::abs(k) + 1].mean(0),
    "first": lambda x, b, k: x * (_numbers(x) < k) + x,
    "modulo": lambda x, b, k: x * (_numbers(x) % (abs(k) + 2)),
    "fraction": lambda x, b, k: x * (_numbers(x) / len(x)),
    "linspace": lambda x, b, k: x * torch.linspace(0, 1, len(x))[:, None],
    "n": lambda x, b, k: x / len(x),
    "n - 1": lambda x, b, k: x / (len(x) - 1),
    "sqrt(n)": lambda x, b, k: x / math.sqrt(len(x)) + x * x.size(0) ** -0.5,
    "log(n)": lambda x, b, k: x * math.log(len(x)),
    "n // k": lambda x, b, k: x * (len(x) // (abs(k) + 1)),
    "n % k": lambda x, b, k: x * (1 + len(x) % (abs(k) + 1)),
    "if": lambda x, b, k: x * 2 if len(x) > k else x.sin(),
    "if odd": lambda x, b, k: x - x.mean(0) if x.shape[0] % 2 else x.sin(),
    "min": lambda x, b, k: x + x[:min(len(x), abs(k) + 2)].sum(0),
    "halves": lambda x, b, k: torch.cat([x[len(x) // 2:], x[:len(x) // 2]]),
    "put off": lambda x, b, k: F.pad(x, (0, 0, abs(k), 0))[:len(x)] + x,
    "shift": lambda x, b, k: torch.cat([x[:1] * 0, x[:-1]]) + x,
    "diff": lambda x, b, k: torch.diff(x, dim=0, prepend=x[:1]),
    "windows": lambda x, b, k: F.pad(x, (0, 0, 2, 0)).unfold(0, 3, 1).mean(-1),
    "band": lambda x, b, k: _alike(x).triu(k) @ x + x,
    "topk": lambda x, b, k: x * x.topk(abs(k) % 5 + 1, 0)[0].mean(0),
    "kthvalue": lambda x, b, k: x - x.kthvalue(2, 0)[0],
    "written": lambda x, b, k: _written(x, k),
    "split": lambda x, b, k: torch.cat([p.cumsum(0) for p in x.split([2, len(x) - 2])]),
    "size": lambda x, b, k: x * x.numel() / x.shape[-1] / 7,
    "full": lambda x, b, k: x + torch.full((len(x), 1), 0.5),
    "half of two": lambda x, b, k: torch.cat([x, x.flip(0)])[len(x):],
    "repeated": lambda x, b, k: x.repeat_interleave(2, 0)[:len(x)],
}
DEEP: dict[str, Op] = {  # of rows, places and columns; `k % 3` says along which
    "softmax": lambda x, b, k: x.softmax(k % 3),
    "cumsum": lambda x, b, k: x.cumsum(k % 3),
    "flip": lambda x, b, k: x.flip(k % 3),
    "roll": lambda x, b, k: x.roll(k, k % 3),
    "mean": lambda x, b, k: x - x.mean(k % 3, keepdim=True),
    "var of two": lambda x, b, k: x * x.var((k % 3, (k + 1) % 3), keepdim=True),
    "max": lambda x, b, k: x - x.max(k % 3, keepdim=True)[0],
    "sort": lambda x, b, k: x.sort(k % 3)[0],
    "normalize": lambda x, b, k: F.normalize(x, dim=k % 3),
    "logsumexp": lambda x, b, k: x - x.logsumexp(k % 3, keepdim=True),
    "glu": lambda x, b, k: F.glu(torch.cat([x, x.sin()], k % 3), k % 3),
    "chunks": lambda x, b, k: torch.cat(x.chunk(2, k % 3)[::-1], k % 3),
    "stack": lambda x, b, k: torch.stack([x, x.cos()], k % 3 + 1).mean(k % 3 + 1),
    "unbind": lambda x, b, k: torch.stack([p * (i + 1) for i, p in enumerate(x.unbind(1))], 1),
    "select": lambda x, b, k: x - x.select(1 + k % 2, k % 4).unsqueeze(1 + k % 2),
    "places": lambda x, b, k: x + torch.arange(4.0)[:, None] * torch.linspace(0, 1, WIDTH),
    "attention": lambda x, b, k: F.scaled_dot_product_attention(x, x.sin(), x, is_causal=k > 2),
    "heads": lambda x, b, k: F.scaled_dot_product_attention(*(
        [x.view(len(x), 4, 2, -1).transpose(1, 2)] * 3)).transpose(1, 2).reshape(x.shape),
    "causal": lambda x, b, k: (x @ x.mT / WIDTH + torch.full((4, 4), -9.0).triu(1)).softmax(-1) @ x,
    "to a row": lambda x, b, k: F.layer_norm(x.flatten(1), (4 * WIDTH,)).view(x.shape),
    "to many rows": lambda x, b, k: (x.flatten(0, 1) * 2).sin().unflatten(0, (len(x), 4)),
    "moved": lambda x, b, k: x.permute(2, 0, 1).contiguous().cumsum(0).permute(1, 2, 0),
    "mT": lambda x, b, k: F.layer_norm(x.mT, (4,)).mT,
    "merged": lambda x, b, k: x.reshape(len(x), 2, 2, WIDTH).transpose(1, 2).reshape(x.shape),
    "columns apart": lambda x, b, k: x.view(len(x), 4, 2, -1).flip(2 + k % 2).reshape(x.shape),
    "conv": lambda x, b, k: F.conv1d(x.mT, torch.ones(WIDTH, 1, 3) / 3, padding=1, groups=WIDTH).mT,
    "pool": lambda x, b, k: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "pad": lambda x, b, k: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "windows": lambda x, b, k: F.pad(x, (1, 1)).unfold(2, 3, 1).amax(-1),
    "pairs": lambda x, b, k: (x.unsqueeze(2) * x.unsqueeze(1)).tanh().mean(2),
    "einsum": lambda x, b, k: torch.einsum("btd,bse->btd", x, x.tanh()) / 20,
    "across rows": lambda x, b, k: torch.einsum("btd,ctd->bt", x, x).tanh()[..., None] * x,
    "index_select": lambda x, b, k: x.index_select(
        1 + k % 2, torch.tensor([3, 0, 2, 1, 3, 0, 1, 2]))[:, :4],
    "gather": lambda x, b, k: x.gather(2, (b.label[:, None, None] + torch.arange(WIDTH)).expand(
        x.shape) % WIDTH),
    "of a place": lambda x, b, k: x - x[torch.arange(len(x)), b.label][:, None],
    "scatter": lambda x, b, k: x.scatter(2, b.label[:, None, None].expand(-1, 4, 1), 0.5),
    "where": lambda x, b, k: torch.where(torch.ones(4, WIDTH).tril(k % 4) > 0, x, x.sin()),
    "written": lambda x, b, k: _written(x.clone().contiguous(), k),
    "expand": lambda x, b, k: x + x.mean((1, 2), keepdim=True).expand(-1, 4, WIDTH).sigmoid(),
    "repeat": lambda x, b, k: x.repeat(1, 2, 1)[:, 1::2],
    "interleaved": lambda x, b, k: x.repeat_interleave(2, 2).view(*x.shape, 2).sum(-1),
    "complex": lambda x, b, k: torch.fft.ifft(torch.fft.fft(x, dim=1) * (k + 1), dim=1).real,
    "rotary": lambda x, b, k: torch.cat([-x[..., WIDTH // 2:], x[..., :WIDTH // 2]], -1) + x,
    "outer": lambda x, b, k: (x[..., :2, None] * x[..., None, :4]).flatten(2),
    "bmm": lambda x, b, k: torch.bmm(x, torch.bmm(x.mT, x)) / 20,
    "batch_norm": lambda x, b, k: F.batch_norm(x.mT, None, None, training=True).mT,
    "group_norm": lambda x, b, k: F.group_norm(x.mT, 2).mT,
}
LOSSES: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "mse": lambda h, b: F.mse_loss(h, b.target),
    "cross_entropy": lambda h, b: F.cross_entropy(h, b.label),
    "some labels": lambda h, b: F.cross_entropy(h, b.label, ignore_index=1),
    "sum": lambda h, b: h.square().sum(),
    "weighted": lambda h, b: (F.cross_entropy(h, b.label, reduction="none") * b.target[:, 0].abs()
                              ).sum() / b.target[:, 0].abs().sum(),
    "worst row": lambda h, b: h.square().mean(1).max(),
    "contrast": lambda h, b: F.cross_entropy(h @ h.t(), torch.arange(len(h))),
    "logsumexp": lambda h, b: h.logsumexp((0, 1)),
    "two halves": lambda h, b: (h[::2].mean() - h[1::2].mean()).square() + h.square().mean(),
    "norm": lambda h, b: h.norm(),
    "cosine": lambda h, b: 1 - F.cosine_similarity(h, b.target).mean(),
    "hinge": lambda h, b: F.relu(1 - (h[:, 0] - h[:, 1]) * (b.label - 1)).sum() / len(h),
    "kl": lambda h, b: F.kl_div(h.log_softmax(1), b.target.softmax(1), reduction="batchmean"),
    "std": lambda h, b: h.std(),
    "pairs": lambda h, b: F.relu(h[:, None] - h[None] + 0.1).mean(),
    "first rows": lambda h, b: h[:3].square().mean() + h[-1].sum(),
    "of some": lambda h, b: F.cross_entropy(h, b.label, reduction="sum") / (b.label > 0).sum(),
}
KINDS = {"apart": APART, "mixed": MIXED, "numbered": NUMBERED, "deep": DEEP}
FLAT = "apart", "mixed", "numbered"


class Forward(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.deep = draw.random() < 0.5
        kinds = ["deep" if self.deep else draw.choice(FLAT) for _ in range(draw.randint(1, 3))]
        self.names = [(kind, draw.choice([*KINDS[kind]]), draw.randint(-2, 7)) for kind in kinds]
        self.loss = draw.choice([*LOSSES])
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(len(kinds) + 2))

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        first, *others, last = self.linears
        x = first(x if self.deep else x[:, 0])
        for (kind, name, number), linear in zip(self.names, others, strict=True):
            x = x + linear(KINDS[kind][name](x, Given(*given), number))
        return LOSSES[self.loss](last(x.mean(1) if self.deep else x), Given(*given))


class Untraced(Forward):
    """Looks at its data, so it is left as it is."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) < 1e9 else -x, *given)


def batch(seed: int, rows: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 4, WIDTH, generator=draw), torch.randint(3, (rows,), generator=draw),
            torch.randperm(rows, generator=draw), torch.randn(rows, WIDTH, generator=draw))


def trained(seed: int, plan: str = "") -> list[Tensor]:
    """The losses of some steps, and the parameters then."""
    model: Any = Untraced(seed) if plan == "untraced" else Forward(seed)
    model = ap.parallelize(model, plan=PLANS[plan]) if plan else model
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for step, rows in enumerate(ROWS):
        losses.append(model(*batch(100 * seed + step, rows)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses).detach(), *(x.detach() for x in model.state_dict().values())]


def outcome(seed: int, plan: str, want: list[Tensor]) -> str:
    try:
        got = trained(seed, plan)
    except AutoparError as error:
        return f"refused: {error.what}"
    except Exception as error:  # on all ranks alike
        return f"{type(error).__name__}: {error}"
    worst = max(float((g - w).abs().max() / (w.abs().max() + 1e-12))
                for g, w in zip(got, want, strict=True))
    return "right" if worst <= LIMIT else f"wrong by {worst:.1e}"


def try_forwards(seeds: list[int], plans: list[str]) -> list[tuple[str, str]]:
    """In a rank: what was tried, and what came of it. What plain PyTorch cannot do is left out."""
    world.start()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)
    found = []
    for seed in seeds:
        try:
            want = trained(seed)
        except (RuntimeError, ValueError, IndexError):
            continue
        if not all(x.isfinite().all() for x in want):
            continue
        with oracle.traced_once():
            model = Forward(seed)
            found += [(f"{seed} under {name}: {model.names}, {model.loss}",
                       outcome(seed, name, want)) for name in plans]
    return found


def wrong(seeds: Iterable[int], plans: Iterable[str] = PLANS, timeout_s: float = 800
          ) -> tuple[list[str], Counter[str]]:
    """What was wrong on any of 2 ranks, and how many cases came out how on the first."""
    each = run_ranks(2, "forwards:try_forwards", [*seeds], [*plans], timeout_s=timeout_s)
    bad = [f"{what}: {came}" for found in each for what, came in found
           if not came.startswith(("right", "refused"))]
    return bad, Counter(came.partition(":")[0].split()[0] for _, came in each[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    print(*wrong(range(asked.first, asked.first + asked.count), timeout_s=1e5), sep="\n")

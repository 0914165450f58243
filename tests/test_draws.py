"""Numbers that forward draws without parameters are those of the whole batch, under every plan.

Each model returns what it drew; given that, the same module in one process is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from nets import ALL, DP2, PP2, near, refused
from texts import same, states

Given = Tensor | None
Draw = Callable[[Any, Tensor], Tensor]
Use = Callable[[Any, Tensor, Tensor], Tensor]
ROWS, WIDTH = 8, 12
WAYS: tuple[dict[str, Any], ...] = (*ALL, {"dp": 2, "num_micro_batches": 2, "recompute": True},
                                    {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"})


class Drawing(nn.Module):
    """Two layers, and a draw that `forward` asks for where it is not given."""

    def __init__(self, draw: Draw, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.sigma = nn.Parameter(torch.rand(16, WIDTH))
        self.register_buffer("alphas", torch.linspace(0.9, 0.1, 50))
        self.draw, self.use = draw, use

    def mlp(self, x: Tensor, noise: Given = None) -> Tensor:
        weight = self.first.weight if noise is None else self.first.weight + self.sigma * noise
        return self.last(torch.tanh(F.linear(x, weight, self.first.bias)))

    def forward(self, x: Tensor, drawn: Given = None) -> dict[str, Tensor]:
        drawn = self.draw(self, x) if drawn is None else drawn
        return {"loss": self.use(self, x, drawn), "drawn": drawn}


def _squares(y: Tensor) -> Tensor:
    return y.square().mean()


def _masked(own: Any, x: Tensor, noise: Tensor) -> Tensor:
    """As masked autoencoders do."""
    patches = x.view(len(x), 6, 2)
    order = noise.argsort(1)
    back, keep = order.argsort(1), order[:, :2]
    seen = torch.gather(patches, 1, keep[..., None].expand(-1, -1, 2)).flatten(1)
    mask = torch.ones_like(noise)
    mask[:, :2] = 0
    mask = mask.gather(1, back)
    off = (own.mlp(F.pad(seen, (0, 8))).view(len(x), 6, 2) - patches).square().mean(-1)
    return (off * mask).sum() / mask.sum()


def _diffused(own: Any, x: Tensor, drawn: Tensor) -> Tensor:
    step, noise = drawn[:, 0].long(), drawn[:, 1:]
    a = own.alphas[step][:, None]
    return F.mse_loss(own.mlp(a.sqrt() * x + (1 - a).sqrt() * noise), noise)


def _steps_and_noise(own: Any, x: Tensor) -> Tensor:
    steps = torch.randint(0, 50, (len(x),), device=x.device)
    return torch.cat([steps[:, None].to(x.dtype), torch.randn_like(x)], 1)


def _with_dropped(own: Any, x: Tensor, dropped: Tensor) -> Tensor:
    weight = own.first.weight
    return _squares(own.last(F.linear(x, dropped.detach() / weight.detach() * weight)))


MODELS: dict[str, tuple[Draw, Use]] = {
    "a number": (lambda own, x: torch.rand(()), lambda own, x, u: _squares(own.mlp(x) * u)),
    "noise in weights": (lambda own, x: torch.randn(16, WIDTH),
                         lambda own, x, u: _squares(own.mlp(x, u))),
    "noise like weights": (lambda own, x: torch.randn_like(own.sigma),
                           lambda own, x, u: _squares(own.mlp(x, u))),
    "in place": (lambda own, x: torch.zeros_like(own.sigma).normal_(0, 2),
                 lambda own, x, u: _squares(own.mlp(x, u))),
    "dropped weights": (lambda own, x: F.dropout(own.first.weight, 0.5), _with_dropped),
    "masked autoencoder": (lambda own, x: torch.rand(len(x), 6), _masked),
    "diffusion": (_steps_and_noise, _diffused),
    "mixed rows": (lambda own, x: torch.randperm(len(x)),
                   lambda own, x, p: _squares(own.mlp(0.3 * x + 0.7 * x[p]))),
    "rows dropped": (lambda own, x: torch.empty(len(x), 1).bernoulli_(0.5).div_(0.5),
                     lambda own, x, u: _squares(own.mlp(x) * u)),
    "normalised": (lambda own, x: torch.rand(len(x), 1),
                   lambda own, x, u: _squares(own.mlp(x) * u / u.sum())),
    "gumbel": (lambda own, x: torch.rand_like(x),
               lambda own, x, u: _squares((own.mlp(x) - (-u.log()).log()).softmax(-1))),
    "dropped input": (lambda own, x: F.dropout(x, 0.5), lambda own, x, u: _squares(own.mlp(u))),
    "a subset": (lambda own, x: torch.ones(WIDTH).multinomial(5),
                 lambda own, x, i: _squares(own.mlp(x)[:, i])),
}
FEW = ("noise like weights", "dropped weights", "masked autoencoder", "diffusion", "mixed rows",
       "rows dropped")


def _draw_as_one(name: str, ways: tuple[dict[str, Any], ...], **options: Any) -> None:
    plain = Drawing(*MODELS[name]).double()
    for way in ways:
        plan = ap.Plan.uniform(**way) if way else None
        model = ap.parallelize(Drawing(*MODELS[name]).double(), plan=plan, outputs=["drawn"],
                               **options)
        seen = []
        for rows in (ROWS, ROWS, ROWS - 1):
            torch.manual_seed(rows)
            x = torch.randn(rows, WIDTH, dtype=torch.float64)
            got = model(x)
            want = plain(x, got["drawn"].detach())["loss"]
            got["loss"].backward()
            want.backward()
            seen.append(got["drawn"].tolist())
            assert near(got["loss"], want, 1e-9), (name, way)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if theirs.grad is not None:
                    assert near(ours.grad, theirs.grad, 1e-9), (name, way)
            model.zero_grad()
            plain.zero_grad()
        assert same(seen) and len({str(s) for s in seen}) == 3, (name, way)
        model.eval()
        with torch.no_grad():
            got = model(x)
        assert near(got["loss"], plain(x, got["drawn"])["loss"], 1e-9), (name, way)


def claim_replicas_and_micro_batches_share_what_is_drawn() -> None:
    for name in FEW:
        _draw_as_one(name, (DP2, PP2))


def slow_claim_every_plan_and_model_shares_what_is_drawn() -> None:
    for name in MODELS:
        _draw_as_one(name, WAYS)


def slow_claim_a_found_plan_and_compiled_blocks_share_what_is_drawn() -> None:
    for name in FEW:
        _draw_as_one(name, ({},))
        _draw_as_one(name, (DP2, PP2), compile=True)


def claim_what_a_parameter_decides_is_refused_where_all_rows_share_it() -> None:
    model = ap.parallelize(Drawing(lambda own, x: torch.bernoulli(own.sigma),
                                   lambda own, x, u: _squares(own.mlp(x, u))),
                           plan=ap.Plan.uniform(**DP2))
    assert "bernoulli draws numbers that all rows share" in refused(
        lambda: model(torch.rand(ROWS, WIDTH)))


def claim_a_seed_that_forward_sets_is_refused() -> None:
    def seeded(own: Any, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return torch.rand(len(x), 1)

    model = ap.parallelize(Drawing(seeded, lambda own, x, u: _squares(own.mlp(x) * u)),
                           plan=ap.Plan.uniform(**PP2))
    assert "seeds the generator" in refused(lambda: model(torch.rand(ROWS, WIDTH)))


class Channels(nn.Module):
    """Ops that draw and have no tag that says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.dropout2d(self.first(x).view(len(x), 16, 2, 2)).flatten(1)
        y = F.rrelu(y, training=True)
        return {"loss": self.last(y).square().mean(), "y": y}


def claim_dropped_channels_differ_and_leave_the_users_generator_alone() -> None:
    for way in (DP2, PP2):
        model = ap.parallelize(Channels(), plan=ap.Plan.uniform(**way), outputs=["y"])
        before = states()
        ys = [model(torch.ones(8, 8))["y"] for _ in range(2)]
        assert states() == before, way
        kept = torch.stack(ys).view(4, 4, 16, 4)[..., 0] != 0
        assert all(not torch.equal(kept[i], kept[j]) for i in range(4) for j in range(i)), way


class Deep(nn.Module):
    """Equal layers, each of which drops rows of its own; a table that no block reads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table.cos()
        for layer in self.layers:
            x = x + layer(x) * (torch.rand(len(x), 1) < 0.5)
        return x.square().mean()


def test_equal_layers_draw_numbers_of_their_own() -> None:
    found = trace(Deep(), take_apart((torch.zeros(4, 8),), {})[0])
    drawn = [value for block in found.graph.blocks for value in block.context.values()
             if value.startswith("lt")]
    assert len(set(drawn)) == len(drawn) == 8


def claim_a_rank_that_idles_has_what_is_computed_before_the_blocks() -> None:
    model = ap.parallelize(Deep(), plan=ap.Plan.uniform(dp=1))
    losses = [model(torch.ones(4, 8)).item() for _ in range(2)]
    assert same(losses) and losses[0] != losses[1]


def claim_a_script_that_runs_again_draws_the_same() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        model = ap.parallelize(Deep(), plan=ap.Plan.uniform(**DP2))
        found.append(model(torch.ones(4, 8)).item())
        del model
    assert found[0] == found[1]


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

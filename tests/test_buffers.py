"""Buffers that blocks read and write: whole for all that read them, written once, or refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import autopar_torch as ap
import claims
from autopar_torch.errors import ShardingError
from autopar_torch.run import shardings
from autopar_torch.shard import allowed
from autopar_torch.shard.solve import ways
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from nets import ALL, TP2, near, refused


class Scaled(nn.Module):
    """Blocks read a buffer, and so does what depends on no parameter: always, or in evaluation."""

    def __init__(self, always: bool, moving: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.1, 1.0, 8))
        self.always, self.moving = always, moving

    def forward(self, x: Tensor) -> Tensor:
        if self.moving and self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * self.a.bias.detach().abs())
        whole = self.scale.sum() if self.always or not self.training else 1.0
        return self.c(torch.relu(self.b(torch.relu(self.a(x)) * self.scale)) * whole)


def slow_claim_a_buffer_that_a_plan_cuts_or_puts_elsewhere_is_read_whole() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for degrees, always, moving in itertools.product(ALL, (True, False), (True, False)):
        degrees = degrees | ({"num_micro_batches": 1} if moving else {})
        model, plain = ap.parallelize(Scaled(always, moving),
                                      plan=ap.Plan.uniform(**degrees)), Scaled(always, moving)
        for _ in range(2):
            losses = [m.train()(x).square().mean() for m in (model, plain)]
            for loss in losses:
                loss.backward()
            assert near(*losses), (degrees, always, moving)
            with torch.no_grad():
                assert near(model.eval()(x), plain.eval()(x)), (degrees, always, moving)


class Codes(nn.Module):
    """A codebook that follows the rows that chose each of its codes (VQ-VAE)."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.replaces = nn.Linear(8, 8), nn.Linear(8, 4), replaces
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        chosen = torch.cdist(z, self.codes).argmin(-1)
        nearest = nn.functional.embedding(chosen, self.codes)
        if self.training:
            with torch.no_grad():
                moved = 0.1 * nn.functional.one_hot(chosen, 5).to(z.dtype).T @ z
                if self.replaces:
                    self.codes = self.codes * 0.9 + moved
                else:
                    self.codes.mul_(0.9).add_(moved)
        return self.b(torch.relu(z + (nearest - z).detach()))


def claim_a_buffer_that_is_written_is_written_whole_or_refused() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for degrees in (TP2, {"pp": 2}):
        model, plain = ap.parallelize(Codes(), plan=ap.Plan.uniform(**degrees)), Codes()
        for _ in range(2):
            assert near(model(x), plain(x)), degrees
        assert near(model.state_dict()["codes"], plain.codes), degrees
        other = ap.parallelize(Codes(replaces=True), plan=ap.Plan.uniform(**degrees))
        said = refused(lambda model=other: model(x))
        assert "in the place of the buffer codes" in said, said


class Written(Scaled):
    """The first block writes what the last one reads, or the last one what the first has read."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        if self.always:
            hidden = hidden * self.scale.clone()
        hidden = torch.relu(self.b(hidden))
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return self.c(hidden if self.always else hidden * self.scale)


def claim_stages_that_share_a_written_buffer_are_one() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for always in (True, False):
        model = ap.parallelize(Written(always, True), plan=ap.Plan.uniform(pp=2))
        plain = Written(always, True)
        for _ in range(2):
            assert near(model.train()(x), plain.train()(x)), always
        assert near(model.state_dict()["scale"], plain.scale), always
        with torch.no_grad():
            assert near(model.eval()(x), plain.eval()(x)), always


class Featured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.b = nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.features(x))


def claim_statistics_move_where_a_part_of_the_model_is_called() -> None:
    draw = torch.Generator().manual_seed(1)
    for degrees in ({"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}):
        model, plain = ap.parallelize(Featured(), plan=ap.Plan.uniform(**degrees)), Featured()
        for number in range(4):
            x = torch.randn(6, 8, generator=draw)
            found = [m(x).square().mean() + m.features(x).mean() for m in (model, plain)]
            assert near(*found), degrees
            for loss in found:
                loss.backward()
            if number == 2:
                model.eval(), plain.eval()
        for (name, one), two in zip(model.state_dict().items(), plain.state_dict().values(),
                                    strict=True):
            assert near(one, two), (degrees, name)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def test_a_sharding_that_converts_a_written_buffer_is_refused() -> None:
    model = Codes()
    traced = trace(model, take_apart((torch.randn(6, 8),), {})[0], wanted=None)
    plan = shardings.complete(shardings.fit(ap.Plan.uniform(tp=2), traced.graph), traced, 1)
    (sharding,) = [own for own in plan.shardings if "mul_" in own.ops]
    graph = traced.programs[sharding.kind]
    allowed.check(graph, sharding)
    (node,) = [n for n in graph.nodes if n.name == "mul_"]
    others = {way.text for way in ways(graph, (2,))[node]} - {sharding.ops["mul_"]}
    assert others
    for text in others:
        with pytest.raises(ShardingError, match="cannot become"):
            allowed.check(graph, replace(sharding, ops={**sharding.ops, "mul_": text}))


class Normed(nn.Module):
    """Its first layer normalizes what its last one reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.norm(x)))) + self.norm.weight + x


def test_what_is_read_beside_a_written_buffer_joins_no_blocks() -> None:
    graph = trace(Normed(), take_apart((torch.randn(6, 8),), {})[0], wanted=None).graph
    assert len(graph.blocks) >= 3

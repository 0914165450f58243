"""What scripts do around the model, found in those of strangers: as in one process."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar_torch as ap
import claims
from nets import (
    ALL,
    DP2,
    PP2,
    TP2,
    ZERO3,
    Net,
    batch,
    near,
    net,
    parallel,
    refused,
    step,
    step_losses,
)

Output = namedtuple("Output", ["logits", "loss", "number"])


class Named(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return Output(*super().forward(x, y), 3)


class Counted(Net):
    """Writes to a buffer by `out=`, draws numbers in place, and fills parts of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positive", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.training:
            with torch.no_grad():
                torch.add(self.positive, (x > 0).float().sum(0), out=self.positive)
        waves = torch.fft.rfft(x)
        low = torch.zeros_like(waves)
        low[:, :3] = waves[:, :3] * 2
        low[:, 4] = waves[:, 0]
        noise = 0 * (torch.empty_like(x).normal_() + x.new_zeros(len(x), 1).uniform_())
        noise = noise + 0 * F.gumbel_softmax(x) + 0 * torch.distributions.Normal(x, 1.0).rsample()
        return super().forward(torch.fft.irfft(low, n=8) + noise + 1e-2 * self.positive, y)


class Bags(nn.Module):
    """Texts one after another, and where each begins: no input has a row for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(50, 16), nn.Linear(16, 4)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.words(text, offsets))


def claim_a_plan_that_is_found_for_bags_of_words_is_right() -> None:
    text, offsets = torch.arange(40) % 50, torch.tensor([0, 3, 4, 9, 20, 21, 30, 35])
    module, plain = Bags(), Bags()
    plain.load_state_dict(module.state_dict())
    plan = ap.plan(module, (text, offsets), "2xL4", global_batch_size=40, constraints={"tp": 2})
    model = ap.parallelize(module, plan=plan.plan)
    got, want = model(text, offsets), plain(text, offsets)
    got.square().mean().backward()
    want.square().mean().backward()
    assert near(got, want)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert near(own.grad, other.grad)


class Reverse(torch.autograd.Function):
    """Runs a layer again in its backward, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), dy)
        return x.grad, None


class Reversible(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return super().forward(Reverse.apply(self.norm(x), self.layers[0]), y)  # type: ignore[no-untyped-call]


def claim_out_draws_and_complex_parts_are_as_in_one_process() -> None:
    for degrees in (DP2, TP2, {"pp": 2}):
        model, plain = parallel(degrees, Counted), net(Counted)
        assert all(step(model, plain, seed) for seed in range(3)), degrees
        assert near(model.state_dict()["positive"], plain.positive) and not model.fallback_reason


def claim_gradients_of_a_backward_inside_of_a_backward_count() -> None:
    model, plain = parallel(DP2, Reversible), net(Reversible)
    assert all(step(model, plain, seed) for seed in range(3))
    assert near(model.state_dict()["layers.0.weight"], plain.layers[0].weight)


def _trained(model: Any, after: Callable[[Any, Any], object] = lambda *_: None) -> dict[str, Any]:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    after(model, opt)
    for seed in range(3):
        x, y = batch(seed=seed)
        model(x, y)[1].backward()
        opt.step()
        opt.zero_grad()
    return model.state_dict()  # type: ignore[no-any-return]


def claim_hooks_of_an_optimizer_see_whole_tensors() -> None:
    def clip(model: Any, opt: Any) -> None:
        opt.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None)

    want = _trained(net(), clip)
    for degrees in ALL:
        got = _trained(parallel(degrees), clip)
        assert all(near(got[name], want[name], 1e-3) for name in want), degrees


def claim_data_of_a_plain_parameter_is_set_whole() -> None:
    for degrees in (TP2, PP2, ZERO3):
        model, plain = parallel(degrees), net()
        target = copy.deepcopy(plain)
        assert step(model, plain)
        for own, p in zip(target.parameters(), model.parameters(), strict=True):
            own.data = 0.1 * p.data + 0.9 * own.data
        for own, p, first in zip(target.parameters(), plain.parameters(), net().parameters(),
                                 strict=True):
            assert type(own) is nn.Parameter and near(own, 0.1 * p + 0.9 * first), degrees


def claim_gradients_from_before_the_first_batch_are_added_to() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        for own in (model, plain):
            sum(p.pow(2).sum() for p in own.parameters()).backward()  # type: ignore[union-attr]
        assert step(model, plain) and step(model, plain, 1), degrees


def claim_weights_of_two_stages_may_be_compared_in_a_penalty() -> None:
    for degrees in (PP2, ZERO3, TP2):
        model, plain = parallel(degrees), net()
        x, y = batch()
        for own in (model, plain):
            loss = own(x, y)[1] + (own.layers[0].weight - own.layers[3].weight).pow(2).sum()
            loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert near(p.grad.clone(), q.grad), degrees


def claim_gradients_that_a_script_averages_itself_stay_as_they_are() -> None:
    want = step_losses(net())
    for degrees in ALL:
        model = parallel(degrees)
        for seed, loss in enumerate(want):
            x, y = batch(seed=seed)
            out = model(x, y)[1]
            out.backward()
            for p in model.parameters():
                dist.broadcast(p.data, 0)
                work = dist.all_reduce(p.grad, async_op=seed == 1)
                if work is not None:
                    work.wait()
                p.grad /= dist.get_world_size()
                with torch.no_grad():
                    p -= 0.1 * p.grad
                p.grad = None
            assert near(out, loss), (degrees, seed)


def claim_named_tuples_and_sequences_are_what_they_are() -> None:
    out = parallel(DP2, Named, outputs=("logits",))(*batch())
    assert isinstance(out, Output) and out.number == 3 and out.logits.shape == (8, 4)
    out.backward()
    again = pickle.loads(pickle.dumps(out._replace(logits=None, loss=None)))
    assert type(again) is Output and again.number == 3
    assert torch.utils._pytree.tree_map(type, out).loss is not Output
    model = parallel(PP2, lambda: nn.Sequential(  # type: ignore[arg-type]
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    assert len(model) == 5 and model[0].out_features == 8 and len(list(model)) == 5 and model


def _half(part: nn.Module) -> None:
    if isinstance(part, Net):
        part.head.bias.data.fill_(0.5)


class Around(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.last = net, nn.Linear(1, 1)


def claim_children_and_names_are_those_of_the_module() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        for own in (model, plain):
            for child in list(own.children())[:1]:
                child.requires_grad_(False)
            own.get_submodule("head").register_buffer("seen", torch.zeros(2))
            own.apply(_half)
        for seed in (0, 1):
            names, outer, other = dict(model.named_modules()), Around(model), Around(plain)
            assert list(names) == [name for name, _ in plain.named_modules()]
            assert names["layers.1"] is model.module.layers[1]
            for kind in ("named_parameters", "named_buffers", "state_dict"):
                assert list(dict(getattr(outer, kind)())) == list(dict(getattr(other, kind)()))
            halves = {name: 0.5 * value for name, value in outer.state_dict().items()}
            assert not any(outer.load_state_dict(halves))
            other.load_state_dict(halves)
            for own in (outer, other):
                own.eval()
                assert not own.net.layers[0].training
                own.train()
            assert model.module.training and step(model, plain, seed), degrees


def claim_other_names_of_whole_parameters_follow_them() -> None:
    model, plain = parallel(DP2), net()
    values = [list(own.state_dict().values()) for own in (model, plain)]
    for own in (model, plain):
        penalty = sum(p.pow(2).sum() for p in own.parameters())
        (own(*batch())[1] + penalty).backward()
    for seed in (0, 1):
        assert step(model, plain, seed)
        assert all(map(near, *values)), seed


def claim_memory_that_processes_share_is_left_alone() -> None:
    """As torch.multiprocessing.spawn does with what it is given: each rank trains its own."""
    shared, plain = net().share_memory(), net()
    before = [p.data for p in shared.parameters()]
    assert step(ap.parallelize(shared, plan=ap.Plan.uniform(**DP2)), plain)
    assert all(map(near, before, net().parameters()))


def slow_claim_a_compiled_parallel_model_trains() -> None:
    for degrees in (DP2, PP2):
        model, plain = parallel(degrees), net()
        assert step(torch.compile(model), plain) and step(model, plain, 1), degrees


def trained(own: Any, loss_of: Callable[[Any, int], Tensor]) -> Tensor:
    """Losses of three steps of SGD, and everything that the model then holds."""
    losses = []
    for seed in range(3):
        own.zero_grad()
        losses.append(loss_of(own, seed))
        losses[-1].backward()
        with torch.no_grad():
            for param in own.parameters():
                param -= 0.1 * param.grad
    return torch.cat([torch.stack(losses).detach(), *(
        value.flatten() for value in own.state_dict().values())])


def normed(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(),
                         nn.Linear(8, 4))


def claim_batch_norms_may_run_twice_before_backward_but_no_parameter_may_change() -> None:
    def twice(own: Any, seed: int) -> Tensor:
        other = own(batch(6, seed + 9)[0])
        x, y = batch(8, seed)
        return F.cross_entropy(own(x), y) + other.softmax(1).square().mean()

    for degrees in (DP2, TP2, {"pp": 2}):
        model = ap.parallelize(normed(), plan=ap.Plan.uniform(**degrees))
        assert near(trained(model, twice), trained(normed(), twice)), degrees
        loss = model(batch()[0]).square().mean()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        assert "was changed between forward and backward" in refused(loss.backward)


def claim_batch_norms_without_a_momentum_average_all_batches() -> None:
    def loss_of(own: Any, seed: int) -> Tensor:
        x, y = batch(8, seed)
        return F.cross_entropy(own(x), y)

    for degrees in (DP2, TP2, {"pp": 2}):
        model = ap.parallelize(normed(None), plan=ap.Plan.uniform(**degrees))
        assert near(trained(model, loss_of), trained(normed(None), loss_of)), degrees


class Alike(nn.Module):
    """A loss that begins at a number, of which a mean is taken away, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (F.cosine_similarity(own(x), y).mean() for own in (self.one, self.other))
        return 4 - 2 * first - (second - 1) * 3


def claim_a_mean_taken_from_a_number_is_one_over_rows() -> None:
    def loss_of(own: Any, seed: int) -> Tensor:
        x, y = batch(8, seed)
        return own(x, F.one_hot(y, 4).float())

    for degrees in (PP2, DP2):
        assert near(trained(parallel(degrees, Alike), loss_of), trained(net(Alike), loss_of))


def claim_a_checkpoint_around_the_model_is_refused() -> None:
    for degrees in (DP2, TP2):
        out = checkpoint(parallel(degrees), batch()[0], use_reentrant=False)[0]
        assert "inside of another forward or backward" in refused(out.square().mean().backward)


def slow_claim_plans_are_tried_inside_of_the_first_forward() -> None:
    model = ap.parallelize(net(), confirm=2, constraints={"dp": 2})
    assert step(model, net()) and model.found.measured


class Found(nn.Module):
    """A loss in training, a list of what was found in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.head(x)
        return [own[own > 0] for own in out] if y is None else F.cross_entropy(out, y)


def claim_what_evaluation_cannot_trace_the_plain_module_answers() -> None:
    model = parallel(DP2, Found)
    model(*batch()).backward()
    model.eval()
    with torch.no_grad():
        assert "model.module(...)" in refused(lambda: model(batch()[0]))
        assert len(model.module(batch()[0])) == 8


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        return self.layer(x, state)


def claim_a_state_that_comes_later_is_to_start_from_zeros() -> None:
    model, x = parallel(DP2, Recurrent), batch()[0].view(8, 1, 8)
    state = model(x)[1].detach()
    assert "start from one of zeros" in refused(lambda: model(x, state))


def claim_sizes_that_do_not_fit_are_a_runtime_error() -> None:
    model = parallel(DP2)
    model(*batch())
    with pytest.raises(RuntimeError, match="pass strict=False"):
        model.load_state_dict(model.state_dict() | {"head.bias": torch.zeros(5)})


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

"""Precision: bfloat16 plans and autocast, beside one process of plain torch under autocast."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
import oracle
import zoo
from autopar_torch.errors import FileError

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_micro_batches": 2},
    "zero bubble": {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
    "dp2": {"dp": 2, "num_micro_batches": 2},
    "zero3": {"dp": 2, "zero": 3},
}
# bfloat16 has 8 digits, so a rounding is up to 2e-3 of a value; sums in another order round
# otherwise. Losses are means of many such values.
NOISE = 5e-3


class Regression(nn.Module):
    """Float inputs and targets, a table made in forward, a weight that only the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU()
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        table = torch.linspace(-1, 1, 12, device=x.device)
        h = self.act(self.norm(self.first(x * table)))
        return (F.smooth_l1_loss(self.last(h), y, reduction="none").mean(1) * w).mean()


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.change, self.mlp = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.change(F.silu(c))[:, None].chunk(2, -1)
        h = self.norm(x) * (1 + scale) + shift
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(F.gelu(x))


class DiT(nn.Module):
    """Diffusion: timesteps become sines in float32, the loss reads noise that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.time = nn.Conv2d(3, 32, 4, 4), nn.Linear(16, 32)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(4)])
        self.out = nn.Linear(32, 48)

    def forward(self, image: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        angles = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        c = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = torch.cos(t.float() / 1000)[:, None, None, None]
        x = self.patch(a * image + (1 - a) * noise).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, c)
        y = self.out(x).view(-1, 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5)
        return F.mse_loss(y.reshape(-1, 3, 16, 16), noise)


class VAE(nn.Module):
    """A product of two losses in float32: of probabilities, and by hand. (Noise is an input.)"""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(4, 3, 4, 4)

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        mu, logvar = self.down(image).chunk(2, 1)
        z = mu + noise * (0.5 * logvar).exp()
        seen = F.binary_cross_entropy_with_logits(self.up(z), image.sigmoid())
        return seen - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()


def _regression(rows: int, seed: int, pad: bool) -> zoo.Batch:
    gen = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 12, generator=gen), "y": torch.randn(rows, 4, generator=gen),
            "w": torch.rand(rows, generator=gen)}


def _diffusion(rows: int, seed: int, pad: bool) -> zoo.Batch:
    gen = torch.Generator().manual_seed(seed)
    image, noise = torch.randn(2, rows, 3, 16, 16, generator=gen)
    return {"image": image, "t": torch.randint(0, 1000, (rows,), generator=gen), "noise": noise}


def _autoencoder(rows: int, seed: int, pad: bool) -> zoo.Batch:
    gen = torch.Generator().manual_seed(seed)
    return {"image": torch.randn(rows, 3, 16, 16, generator=gen),
            "noise": torch.randn(rows, 4, 4, 4, generator=gen)}


zoo.OWN |= {"regression": (Regression, _regression), "dit": (DiT, _diffusion),
            "vae": (VAE, _autoencoder)}


# --- steps, and those of one process ------------------------------------------------------------

Steps = tuple[list[float], list[float]]  # losses and norms of gradients


def _steps(model: Any, clip: Callable[[float], Any], name: str, cast: Any) -> Steps:
    opt, losses, norms = oracle.optimizer(model.parameters()), [], []
    for seed in range(2):
        with cast():
            loss = oracle.loss_of(model(**zoo.batch(name, 8, seed)))
        loss.backward()
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
        norms.append(float(clip(1.0)))
        opt.step()
        opt.zero_grad()
        losses.append(float(loss))
    return losses, norms


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@functools.cache
def _alone(name: str) -> Steps:
    """One process, plain torch under autocast."""
    model = zoo.build(name)
    params = list(model.parameters())
    return _steps(model, lambda m: nn.utils.clip_grad_norm_(params, m), name, autocast)


def _off(found: Steps, want: Steps) -> float:
    """The largest relative difference of a loss, or a tenth of that of a norm."""
    parts = zip((1.0, 0.1), found, want, strict=True)
    return max(scale * abs(a - b) / abs(b) for scale, x, y in parts
               for a, b in zip(x, y, strict=True))


def _check(name: str, plans: list[str], under: Any = contextlib.nullcontext,
           precision: Any = "bfloat16") -> None:
    for text in plans:
        plan = ap.Plan.uniform(**PLANS[text], precision=precision)
        model = ap.parallelize(zoo.build(name), plan=plan)
        found = _steps(model, model.clip_grad_norm_, name, under)
        assert not model.fallback_reason, model.fallback_reason
        assert _off(found, _alone(name)) < NOISE, (name, text, found, _alone(name))


def slow_claim_float_inputs_meet_bfloat16_parameters_as_under_autocast() -> None:
    _check("dit", ["tp2", "zero bubble", "dp2"])
    _check("regression", ["pp2", "zero3"])
    _check("vae", ["tp2", "zero bubble"])


def slow_claim_batch_statistics_are_right_in_bfloat16() -> None:
    _check("resnet", ["tp2", "zero3"])


def slow_claim_losses_of_bfloat16_models_are_computed_in_float32() -> None:
    """Also where the model does not ask for it (HF's GPT-2 does)."""
    _check("nanogpt", ["tp2", "pp2"])
    _check("gpt2", ["zero3"])


def _gradients(plan: ap.Plan, batches: list[zoo.Batch]) -> list[Tensor]:
    model = ap.parallelize(zoo.build("nanogpt"), plan=plan)
    found = [p.new_zeros(()).double() for p in model.parameters()]
    for batch in batches:
        (model(**batch) / len(batches)).backward()
        parts = [(p.grad if p.numel() else p.detach()).double() for p in model.parameters()]
        found = [a + b for a, b in zip(found, parts, strict=True)]
        model.zero_grad()
    return found


def slow_claim_gradients_are_added_up_in_float32_unless_asked_otherwise() -> None:
    batch = zoo.batch("nanogpt", 64)
    for degrees, ways in (({"pp": 2, "schedule": "zero_bubble"}, 1), ({"dp": 2}, 2)):
        each = 64 // ways
        one_by_one = [{k: v[i::each].clone() for k, v in batch.items()} for i in range(each)]
        want = _gradients(ap.Plan.uniform(**degrees, precision="bfloat16"), one_by_one)
        errors = []
        for kept in ("float32", "bfloat16"):
            plan = ap.Plan.uniform(**degrees, precision="bfloat16", grad_dtype=kept,
                                   num_micro_batches=each)
            found = _gradients(plan, [batch])
            off = sum((a - b).square().sum() for a, b in zip(found, want, strict=True))
            errors.append(math.sqrt(float(off / sum(x.square().sum() for x in want))))
        assert errors[0] < 1e-6 and errors[1] > 2e-3, (degrees, errors)


def claim_a_call_may_come_between_a_forward_and_its_backward() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for degrees in ({"dp": 2}, {"tp": 2}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        plan = ap.Plan.uniform(**degrees, precision="bfloat16")
        model = ap.parallelize(copy.deepcopy(plain), plan=plan)
        for own in (plain, model):
            loss = own(x).float().square().mean()
            with torch.no_grad():
                own(x)
            (loss + own(-x).float().square().mean()).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert float((p.grad - q.grad).norm() / p.grad.norm()) < 0.02, degrees


def claim_autocast_around_the_model_is_honoured() -> None:
    _check("regression", ["tp2", "pp2", "zero3"], autocast, "float32")


def slow_claim_autocast_around_larger_models_is_honoured() -> None:
    _check("gpt2", ["zero bubble", "tp2"], autocast, "float32")
    _check("dit", ["dp2", "zero3"], autocast, "float32")
    _check("resnet", ["zero3"], autocast, "float32")


class Regions(nn.Module):
    """A layer in float32 where the others are not, and a product that is written as a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 4)
        self.mix = nn.Parameter(torch.eye(16) + 0.1)

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x).tanh()
        h = torch.einsum("be,ef->bf", h.float(), self.mix)
        with torch.autocast("cpu", enabled=False):
            h = self.last(h.float())
        return (F.mse_loss(h, y, reduction="none").mean(1) * w).mean()


zoo.OWN["regions"] = (Regions, _regression)


def claim_autocast_may_change_between_calls_and_inside_forward() -> None:
    plain, model = zoo.build("regions"), ap.parallelize(
        zoo.build("regions"), plan=ap.Plan.uniform(pp=2))
    batch, losses = zoo.batch("regions", 8), []
    for on in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            got, want = model(**batch), plain(**batch)
        got.backward()
        losses.append(got.item())
        assert abs(got.item() - want.item()) < 1e-6 * want.item(), (on, got, want)
    assert losses[0] == losses[2] != losses[1]


class Faint(nn.Module):
    """Gradients that float16 only holds if the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.build("unet")

    def forward(self, **batch: Tensor) -> Tensor:
        return 1e-6 * self.inner(**batch)


zoo.OWN["faint"] = (Faint, zoo.MODELS["unet"][1])


def _scaled(model: Any, norm: Callable[[], Any]) -> list[float]:
    opt, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for seed in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**zoo.batch("faint", 8, seed))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms.append(float(norm()))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return norms[1:]  # the first step does not know yet that it is scaled


def claim_float16_is_scaled_by_grad_scaler_where_its_gradients_are_computed() -> None:
    plain = zoo.build("faint")
    want = _scaled(plain, lambda: nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    for degrees in ({"pp": 2, "num_micro_batches": 2}, {"tp": 2}):
        model = ap.parallelize(zoo.build("faint"), plan=ap.Plan.uniform(**degrees))
        found = _scaled(model, lambda model=model: model.clip_grad_norm_(1e9))
        assert all(abs(a - b) < 1e-2 * b for a, b in zip(found, want, strict=True)), (found, want)


def claim_weights_may_be_in_any_precision_themselves() -> None:
    for dtype, off in ((torch.bfloat16, 2e-2), (torch.float64, 1e-6), (torch.float16, 2e-3)):
        batch = {k: v.to(dtype) if v.is_floating_point() else v
                 for k, v in zoo.batch("unet", 8).items()}
        want = zoo.build("unet").to(dtype)(**batch).item()
        for text in ("pp2", "zero3"):
            model = zoo.build("unet").to(dtype)
            model = ap.parallelize(model, plan=ap.Plan.uniform(**PLANS[text]))
            loss = model(**batch)
            loss.backward()
            assert abs(loss.item() - want) < off * want, (dtype, text, loss, want)
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


@pytest.mark.parametrize("field", ["precision", "grad_dtype"])
def test_unknown_precision_is_refused(field: str) -> None:
    with pytest.raises(FileError, match=rf"'float16' - at .*{field}"):
        ap.parallelize(zoo.build("mlp"), plan=ap.Plan.uniform(**{field: "float16"}))


def test_autocast_that_cannot_be_written_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What nothing splits it is then trained as it is, under autocast."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x)[0]).square().mean()

    torch.manual_seed(0)
    plain, x = Recurrent(), torch.randn(4, 5, 4)
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform())
    with autocast():
        assert model(x).item() == plain(x).item()
    assert "what autocast does to aten::gru.input cannot be written out" in caplog.text

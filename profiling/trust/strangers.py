"""Ordinary scripts that nobody had measured: vision, diffusion, contrastive, GAN, and so on."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust.lab import Net, Wrap, batches, case, gpt, net, rows, sgd, tokens, train, weights


def seeded(make: Any, *args: Any) -> Any:
    torch.manual_seed(0)
    return make(*args)


# --- vision, diffusion, regression --------------------------------------------------------------


class _Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 16, 8)

    def forward(self, x: Tensor, a: Tensor, b: Tensor, part: float) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = self.fc(F.relu(self.b(x)).flatten(1))
        one, two = (F.cross_entropy(x, y, label_smoothing=0.1) for y in (a, b))
        return part * one + (1 - part) * two


@case()
def mixup(wrap: Wrap) -> Any:
    """The part of each image is a number that is another in every step."""
    model, said = wrap(seeded(_Cnn)), []
    opt = sgd(model)
    for _ in range(3):
        x, y = torch.randn(8, 3, 8, 8), torch.randint(8, (8,))
        part = float(torch.distributions.Beta(0.4, 0.4).sample())
        other = torch.randperm(8)
        mixed = part * x + (1 - part) * x[other]
        said += train(model, [(mixed, y, y[other], part)], opt)
    return said


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.inp = nn.Embedding(10, 32), nn.Linear(16, 32)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        keep = (1 - t / 10)[:, None]
        noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
        return F.mse_loss(self.body(self.inp(noisy) + self.time(t)), noise)


@case()
def diffusion(wrap: Wrap) -> Any:
    """Times and noise come from the global generator, in the script."""
    model, said = wrap(seeded(_Denoiser)), []
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for x, _ in batches(4):
        said += train(model, [(x, torch.randint(10, (8,)), torch.randn_like(x))], opt)
    return said


class _NoisyInside(Net):
    """Noise is added in forward: the loss is a little above the one without."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + 1e-3 * torch.randn_like(x), y)


@case(tolerance=1e-2)
def noise_in_forward(wrap: Wrap) -> Any:
    return train(wrap(seeded(_NoisyInside)))


class _Regression(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        guess = self.head(self.features(x))[:, 0]
        return {"loss": F.huber_loss(guess, y.float()), "guess": guess}


@case()
def regression_with_outputs(wrap: Wrap) -> Any:
    model = wrap(seeded(_Regression), outputs=("guess",))
    opt, said = sgd(model, 1e-2), []
    for x, y in batches():
        out = model(x, y)
        opt.zero_grad()
        out["loss"].backward()
        opt.step()
        said.append((out["loss"].item(), 1 - ((out["guess"] - y) ** 2).sum() / y.float().var()))
    return said


@case()
def dict_with_loss(wrap: Wrap) -> Any:
    """`outputs=` is not given: `model(...)["loss"]` as it stands in the script."""
    model = wrap(seeded(_Regression))
    opt, said = sgd(model, 1e-2), []
    for x, y in batches():
        loss = model(x, y)["loss"]
        opt.zero_grad()
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


# --- contrastive, several losses ----------------------------------------------------------------


class _Contrastive(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (F.normalize(self.head(self.features(v)), dim=1) for v in (x, x + 0.1))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(x.shape[0], device=x.device))


@case()
def contrastive(wrap: Wrap) -> Any:
    return train(wrap(seeded(_Contrastive)))


class _Triplet(Net):
    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        a, p, n = (self.head(self.features(x)) for x in (a, p, n))
        return F.triplet_margin_loss(a, p, n)


@case()
def triplet(wrap: Wrap) -> Any:
    model = wrap(seeded(_Triplet))
    return train(model, ([rows(8, 3 * s + k)[0] for k in range(3)] for s in range(3)))


class _TwoLosses(Net):
    def forward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        hidden = self.features(x)
        return F.cross_entropy(self.head(hidden), y) + weight * hidden.pow(2).mean()


@case()
def weight_of_a_loss_decays(wrap: Wrap) -> Any:
    return train(wrap(seeded(_TwoLosses)), ((*b, 0.5**i) for i, b in enumerate(batches(4))))


class _PenaltyInside(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 1e-2 * sum(p.norm() for p in self.parameters())


@case()
def penalty_in_forward(wrap: Wrap) -> Any:
    return train(wrap(seeded(_PenaltyInside)))


# --- language -----------------------------------------------------------------------------------


@case()
def curriculum_of_lengths(wrap: Wrap) -> Any:
    model = wrap(gpt())
    return train(model, (tokens(4, seq, seq) for seq in (4, 8, 8, 16, 4))), weights(model)


class _Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, idx: Tensor, labels: Tensor) -> Tensor:
        logits = self.gpt.logits(idx)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@case()
def padded_rows(wrap: Wrap) -> Any:
    model, (idx, labels) = wrap(seeded(_Padded)), tokens(6, 16)
    labels = labels.masked_fill(torch.arange(16) > torch.arange(6)[:, None] * 3, -100)
    return train(model, [(idx, labels)] * 3)


@case()
def dict_batches(wrap: Wrap) -> Any:
    model = wrap(gpt())
    opt, said = sgd(model), []
    for seed in range(3):
        batch = dict(zip(("idx", "targets"), tokens(seed=seed), strict=True))
        loss = model(**{k: v.to("cpu", non_blocking=True) for k, v in batch.items()})
        model.zero_grad()
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.rnn, self.head = nn.Embedding(64, 16), nn.LSTM(16, 16), nn.Linear(16, 64)

    def forward(self, idx: Tensor, y: Tensor) -> Tensor:
        out, _ = self.rnn(self.tok(idx))
        return F.cross_entropy(self.head(out).flatten(0, 1), y.flatten())


@case()
def lstm_sequence_first(wrap: Wrap) -> Any:
    """torch's own default: dim 0 is time, dim 1 the batch."""
    model = wrap(seeded(_Lstm))
    return train(model, ([t.T.contiguous() for t in tokens(4, 6, s)] for s in range(3)))


@case()
def loss_fn_of_logits_flattened(wrap: Wrap) -> Any:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt()

        def forward(self, idx: Tensor) -> Tensor:
            return self.gpt.logits(idx)

    model = wrap(Logits(), loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    opt, said = sgd(model), []
    for seed in range(3):
        idx, y = tokens(seed=seed)
        loss = model(idx, target=y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


# --- two models, teachers, adapters -------------------------------------------------------------


@case()
def gan(wrap: Wrap) -> Any:
    """Two models and two optimizers; neither model returns a loss."""
    torch.manual_seed(0)
    g = wrap(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16)))
    d = wrap(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    g_opt, d_opt, said = sgd(g, 1e-2), sgd(d, 1e-2), []
    for x, _ in batches():
        fake = g(torch.randn(8, 4))
        d_loss = F.softplus(-d(x)).mean() + F.softplus(d(fake.detach())).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = F.softplus(-d(fake)).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        said += [d_loss.item(), g_loss.item()]
    return said


@case()
def loss_outside(wrap: Wrap) -> Any:
    """`criterion(model(x), y)`: the plainest loop of all."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)))
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


@case()
def two_models(wrap: Wrap) -> Any:
    one, two = wrap(net()), wrap(gpt())
    opt = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05)
    said = []
    for seed in range(3):
        loss = one(*rows(8, seed)) + two(*tokens(seed=seed))
        opt.zero_grad()
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


class _Policy(Net):
    def forward(self, x: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.head(self.features(x)))
        return -(policy.log_prob(action) * reward).mean() - 0.01 * policy.entropy().mean()


@case()
def reinforce(wrap: Wrap) -> Any:
    model, said = wrap(seeded(_Policy)), []
    opt = sgd(model)
    for x, _ in batches():
        action = torch.distributions.Categorical(logits=torch.zeros(8, 8)).sample()
        said += train(model, [(x, action, torch.randn(8))], opt)
    return said


class _Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(width=16), Net().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = self.teacher.head(self.teacher.features(x)).softmax(-1)
        logits = self.student.head(self.student.features(x))
        apart = F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean")
        return F.cross_entropy(logits, y) + apart


@case()
def frozen_teacher_inside(wrap: Wrap) -> Any:
    model = wrap(seeded(_Distilled))
    params = [p for p in model.parameters() if p.requires_grad]
    return train(model, opt=torch.optim.SGD(params, lr=0.05)), weights(model)


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, 2) * 0.1)
        self.b = nn.Parameter(torch.zeros(2, base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


@case()
def lora_by_hand(wrap: Wrap) -> Any:
    module = net()
    module.requires_grad_(False)
    for block in module.blocks:
        block.fc, block.out = _Lora(block.fc), _Lora(block.out)
    model = wrap(module)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return train(model, opt=opt), weights(model)


@case()
def gradual_unfreezing(wrap: Wrap) -> Any:
    """From the head down: one more block trains in every epoch, with an optimizer of its own."""
    module = net()
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    model, said = wrap(module), []
    for block in reversed(module.blocks):
        params = [p for p in model.parameters() if p.requires_grad]
        said += train(model, batches(2), torch.optim.SGD(params, lr=0.05))
        block.requires_grad_(True)
    return said, weights(model)


@case()
def head_is_replaced(wrap: Wrap) -> Any:
    module = net()
    model = wrap(module)
    said = train(model)
    module.head = seeded(nn.Linear, 32, 8)
    return said, train(model)


@case()
def weights_set_afterwards(wrap: Wrap) -> Any:
    """Initialised after wrapping, as nanoGPT's `model.apply(init)` in the wrong place."""
    model = wrap(net())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
    return train(model)


@case()
def weights_set_later(wrap: Wrap) -> Any:
    model = wrap(net())
    said = train(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
    return said, train(model)


# --- gradients and steps by hand ----------------------------------------------------------------


@case()
def gradient_noise(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-2)
        opt.step()
        said.append(loss.item())
    return said


@case()
def gradient_norms_by_name(wrap: Wrap) -> Any:
    model = wrap(net())
    model(*rows()).backward()
    return {name: p.grad.norm() for name, p in model.named_parameters()}


@case()
def sgd_by_hand(wrap: Wrap) -> Any:
    model, said = wrap(net()), []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad = None
        said.append(loss.item())
    return said, weights(model)


@case()
def sharpness_aware(wrap: Wrap) -> Any:
    """SAM: a step up along the gradient, a second one, and back."""
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        model(x, y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
        opt.step()
        said.append(loss.item())
    return said


@case()
def layer_wise_rates(wrap: Wrap) -> Any:
    """LARS by hand: the rate of a matrix is its norm over that of its gradient."""
    model, said = wrap(net()), []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-2 * (p.norm() + 1e-3) / (p.grad.norm() + 1e-3) * p.grad
                p.grad = None
        said.append(loss.item())
    return said


@case()
def parameters_to_vector(wrap: Wrap) -> Any:
    model = wrap(net())
    train(model)
    return nn.utils.parameters_to_vector(model.parameters())


@case()
def weights_clamped(wrap: Wrap) -> Any:
    model, said = wrap(net()), []
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-3)
    for batch in batches():
        said += train(model, [batch], opt)
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
    return said, weights(model)


@case()
def step_is_skipped(wrap: Wrap) -> Any:
    """By the loss, and by the gradient being finite."""
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches(5):
        loss = model(x, y)
        opt.zero_grad()
        loss.backward()
        if loss.item() < 2.4 and all(p.grad.isfinite().all() for p in model.parameters()):
            opt.step()
        said.append(loss.item())
    return said


@case()
def backward_twice(wrap: Wrap) -> Any:
    model = wrap(net())
    loss = model(*rows())
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.norm() if p.grad is not None else None for p in list(model.parameters())[:1]]


@case()
def gradient_penalty(wrap: Wrap) -> Any:
    """Of the norm of the gradient itself (create_graph)."""
    model = wrap(net())
    loss = model(*rows())
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.1 * sum(g.pow(2).sum() for g in grads)).backward()
    return loss.item(), [p.grad.norm() for p in model.parameters()]


@case()
def zero_grad_keeps_zeros(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        said.append(loss.item())
    return said, all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- schedules, checkpoints -----------------------------------------------------------------------


@case()
def warm_restarts(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-4), []
    warm = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 2)
    for i, batch in enumerate(batches(5)):
        said += train(model, [batch], opt)
        warm.step(i + 1)
    return said, opt.param_groups[0]["lr"]


@case()
def plateau_and_early_stop(wrap: Wrap) -> Any:
    model, best, kept, said = wrap(net()), math.inf, {}, []
    opt = sgd(model, 0.5)
    slow = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for batch in batches(5):
        train(model, [batch], opt)
        model.eval()
        with torch.no_grad():
            loss = model(*rows(10, 99)).item()
        model.train()
        slow.step(loss)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
        said.append(loss)
    model.load_state_dict(kept)
    return said, best, weights(model)


@case()
def resume_from_torch_save(wrap: Wrap) -> Any:
    """Rank 0 saves both, a new model and a new optimizer go on."""
    model, path = wrap(net()), wrap.folder / "resume.pt"
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    said = train(model, opt=opt)
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    if wrap.rank == 0:
        torch.save(state, path.with_suffix(".draft"))
        path.with_suffix(".draft").rename(path)
    while not path.exists():
        pass
    again = wrap(seeded(Net))
    new = torch.optim.AdamW(again.parameters(), lr=1e-2, eps=1e-4)
    state = torch.load(path)
    again.load_state_dict(state["model"])
    new.load_state_dict(state["opt"])
    return said, train(again, opt=new), weights(again)


@case()
def logits_in_eval(wrap: Wrap) -> Any:
    """`if targets is None: return logits`; and the right answers counted."""

    class Either(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            logits = self.head(self.features(x))
            return logits if y is None else F.cross_entropy(logits, y)

    model = wrap(seeded(Either))
    said = train(model)
    model.eval()
    x, y = rows(11, 9)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).sum().item()
    model.train()
    return said, right, train(model)


@case()
def class_weights(wrap: Wrap) -> Any:
    class Weighted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.linspace(0.5, 2, 8))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.features(x)), y, weight=self.w)

    return train(wrap(seeded(Weighted)))


@case()
def sum_over_batch_size(wrap: Wrap) -> Any:
    class Summed(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.features(x)), y, reduction="sum") / len(x)

    return train(wrap(seeded(Summed)), (rows(n) for n in (8, 5, 8)))


@case()
def running_statistic(wrap: Wrap) -> Any:
    """A buffer that forward updates (a codebook, a normaliser of observations)."""

    class Running(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return super().forward(x - self.mean, y)

    model = wrap(seeded(Running))
    return train(model), weights(model)

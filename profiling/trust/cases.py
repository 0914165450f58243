"""Scripts that were seen to be wrong in silence, or to fail: each as a user writes it."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trust.lab import Net, Wrap, batches, case, gpt, net, rows, sgd, tokens, train, weights

# --- batches and random numbers ---------------------------------------------------------------


def dataset(num_rows: int = 21) -> TensorDataset:
    return TensorDataset(*rows(num_rows))


@case(right=True)
def dataloader_shuffle(wrap: Wrap) -> Any:
    model, said = wrap(net()), []
    opt, loader = sgd(model, 1e-2), DataLoader(dataset(), batch_size=4, shuffle=True)
    for _ in range(3):
        said += train(model, loader, opt)
        model.eval()
        with torch.no_grad():
            said += [model(*batch).item() for batch in DataLoader(dataset(), batch_size=5)]
        model.train()
    return said, weights(model)


@case(right=True)
def randint_batches(wrap: Wrap) -> Any:
    model, (x, y) = wrap(net()), rows(64)
    draws = (torch.randint(64, (8,)) for _ in range(4))
    return train(model, ((x[i], y[i]) for i in draws))


@case(refuse=True)
def each_rank_another_batch(wrap: Wrap) -> Any:
    sampler = DistributedSampler(dataset(16), wrap.size, wrap.rank, shuffle=True)
    return train(wrap(net()), DataLoader(dataset(16), batch_size=4, sampler=sampler))


@case(refuse=True)
def each_rank_another_batch_later(wrap: Wrap) -> Any:
    """Equal in the first three steps."""
    seeds = [1, 2, 3, *(4 + wrap.rank for _ in range(12))]
    return train(wrap(net()), (rows(8, seed) for seed in seeds))


@case(refuse=True)
def each_rank_other_row_count(wrap: Wrap) -> Any:
    return train(wrap(net()), (rows(n + wrap.rank) for n in (6, 6, 6)))


@case(refuse=True)
def row_count_parts_later(wrap: Wrap) -> Any:
    return train(wrap(net()), (rows(n) for n in (8, 8, 8 + wrap.rank)))


# --- backward of one's own --------------------------------------------------------------------


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _Between(Net):
    """Something between the features and the head."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between

    def features(self, x: Tensor) -> Tensor:
        return self.between(super().features(x))


def between(what: Any) -> Net:
    torch.manual_seed(0)
    return _Between(what)


@case()
def gradient_reversal(wrap: Wrap) -> Any:
    model = wrap(between(_Reverse.apply))
    return train(model), weights(model)


@case()
def straight_through(wrap: Wrap) -> Any:
    model = wrap(between(_Straight.apply))
    return train(model), weights(model)


# --- norms, clipping, scaling -----------------------------------------------------------------


def clipped(wrap: Wrap, clip: Any) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        said += [loss.item(), torch.as_tensor(clip(model)).item()]
        opt.step()
    return said


@case()
def torch_clip_grad_norm(wrap: Wrap) -> Any:
    return clipped(wrap, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))


@case()
def own_clip_grad_norm_type(wrap: Wrap) -> Any:
    def clip(model: Any) -> Tensor:
        if wrap.is_library:
            return model.clip_grad_norm_(0.1, norm_type=2)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=2)

    return clipped(wrap, clip)


@case(right=True)
def clip_grad_value(wrap: Wrap) -> Any:
    def clip(model: Any) -> float:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return 0.0

    return clipped(wrap, clip)


@case()
def get_total_norm(wrap: Wrap) -> Any:
    return clipped(wrap, lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]))


@case()
def norm_by_hand(wrap: Wrap) -> Any:
    def norm(model: Any) -> float:
        return sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5

    return clipped(wrap, norm)


@case()
def weight_norm_logged(wrap: Wrap) -> Any:
    return clipped(wrap, lambda m: sum(p.detach().pow(2).sum() for p in m.parameters()).sqrt())


@case()
def grad_scaler_one_inf(wrap: Wrap) -> Any:
    """An infinity in the gradient of the first layer alone: everybody skips the step."""
    model = wrap(net())
    opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    said = []
    for step, (x, y) in enumerate(batches(4)):
        opt.zero_grad()
        loss = model(x, y)
        scaler.scale(loss).backward()
        if step == 1:
            first = next(p for n, p in model.named_parameters() if n.endswith("inp.weight"))
            if first.grad is not None:
                first.grad.view(-1)[:1] = float("inf")
        scaler.step(opt)
        scaler.update()
        said += [loss.item(), scaler.get_scale()]
    return said


# --- state ------------------------------------------------------------------------------------


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


@case()
def optimizer_state_of_rank_0(wrap: Wrap) -> Any:
    model, path = wrap(net()), wrap.folder / "opt.pt"
    opt = adamw(model)
    said = train(model, opt=opt)
    if wrap.rank == 0:
        torch.save(opt.state_dict(), path)
    if wrap.size > 1:
        dist.barrier()
    again = adamw(model)
    again.load_state_dict(torch.load(path))
    return said + train(model, opt=again)


@case()
def optimizer_state_everywhere(wrap: Wrap) -> Any:
    model = wrap(net())
    opt = adamw(model)
    train(model, opt=opt)
    kept = opt.state_dict()["state"]
    return [dict(kept[i]) for i in sorted(kept)]


@case()
def module_state_dict(wrap: Wrap) -> Any:
    module = net()
    model = wrap(module)
    said = train(model)
    return said, weights(module)


@case(right=True)
def state_dict_in_and_out(wrap: Wrap) -> Any:
    model = wrap(net())
    before = train(model)
    kept = weights(model)
    train(model)
    model.load_state_dict(kept)
    return before, train(model), weights(model)


@case()
def numel(wrap: Wrap) -> Any:
    model = wrap(net())
    train(model)
    return sum(p.numel() for p in model.parameters()), [tuple(p.shape) for p in model.parameters()]


@case()
def state_dict_on_rank_0(wrap: Wrap) -> Any:
    model = wrap(net(), guards={"timeout_s": 5})
    said = train(model)
    if wrap.rank == 0:
        torch.save(model.state_dict(), wrap.folder / "model.pt")
    return said + train(model)


@case()
def eval_on_rank_0(wrap: Wrap) -> Any:
    model = wrap(net(), guards={"timeout_s": 5})
    said = train(model)
    if wrap.rank == 0:
        model.eval()
        with torch.no_grad():
            model(*rows(4, 9))
        model.train()
    return said + train(model)


@case(right=True)
def save_and_load(wrap: Wrap) -> Any:
    model = wrap(net())
    opt = adamw(model)
    said = train(model, opt=opt)
    if wrap.is_library:
        folder = wrap.folder / "kept"
        model.save(folder, opt)
        train(model, opt=opt)
        model.load(folder, opt)
    return said + train(model, opt=opt)


# --- optimizers that look at whole matrices, and penalties ------------------------------------


class _Wide(nn.Module):
    """Its gradients have full rank: Muon works in bfloat16 and makes noise of what has not."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((16, 32), (32, 32), (32, 32), (32, 32))
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(*s), nn.Tanh()) for s in sizes))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


@case(tolerance=1e-3)
def muon(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    model, draw = wrap(_Wide()), torch.Generator().manual_seed(1)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
    said = []
    for _ in range(2):
        x, y = (torch.randn(256, n, generator=draw) for n in (16, 32))
        loss = model(x, y)
        loss.backward()
        for opt in (muon, rest):
            opt.step()
            opt.zero_grad()
        said.append(loss.item())
    return said, weights(model)


@case()
def adafactor(wrap: Wrap) -> Any:
    model = wrap(net())
    opt = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return train(model, opt=opt), weights(model)


@case()
def adafactor_of_transformers(wrap: Wrap) -> Any:
    from transformers import Adafactor

    model = wrap(net())
    opt = Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=True)
    return train(model, opt=opt), weights(model)


@case(tolerance=1e-4)
def lbfgs(wrap: Wrap) -> Any:
    model, (x, y) = wrap(net()), rows(8)
    opt, said = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        said.append(loss.item())
        return loss

    for _ in range(3):
        opt.step(closure)
    return said


@case()
def penalty_in_the_loop(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        loss = model(x, y) + 1e-3 * sum((p**2).sum() for p in model.parameters())
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said, weights(model)


# --- what the trace burnt in ------------------------------------------------------------------


@case()
def freeze_after_first_step(wrap: Wrap) -> Any:
    module = net()
    model = wrap(module)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    said = train(model, opt=opt)
    for p in module.blocks[0].parameters():
        p.requires_grad_(False)
    return said, train(model, opt=opt), weights(model)


@case()
def unfreeze_after_first_step(wrap: Wrap) -> Any:
    module = net()
    module.head.requires_grad_(False)
    model = wrap(module)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    said = train(model, opt=opt)
    module.head.requires_grad_(True)
    return said, train(model, opt=opt), weights(model)


@case()
def forward_hook_afterwards(wrap: Wrap) -> Any:
    module = net()
    model = wrap(module)
    said = train(model)
    module.head.register_forward_hook(lambda m, args, out: out * 0.5)
    return said, train(model)


@case()
def hook_that_records(wrap: Wrap) -> Any:
    module, seen = net(), []
    module.head.register_forward_hook(lambda m, args, out: seen.append(out.detach().mean()))
    said = train(wrap(module))
    return said, torch.stack(seen)


@case()
def dropout_p_afterwards(wrap: Wrap) -> Any:
    module = net(dropout=0.5)
    model, batch = wrap(module), rows(8)
    train(model, [batch])
    for drop in module.modules():
        if isinstance(drop, nn.Dropout):
            drop.p = 0.0
    losses = [model(*batch).item() for _ in range(2)]
    return losses[0] == losses[1]


@case()
def submodule_eval(wrap: Wrap) -> Any:
    module = net(dropout=0.5)
    model, batch = wrap(module), rows(8)
    train(model, [batch])
    for block in module.blocks:
        block.eval()
    losses = [model(*batch).item() for _ in range(2)]
    return losses[0] == losses[1]


class _Counts(Net):
    """Its loss grows with the number of calls."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y) * (1 + 0.1 * self.calls)


class _Draws(Net):
    """Leaves a layer out by Python's dice."""

    def features(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return x


@case()
def counter_in_forward(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    return train(wrap(_Counts()))


@case()
def python_random_in_forward(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    return train(wrap(_Draws()))


class _Scaled(Net):
    """A plain number as a knob (a curriculum, a temperature)."""

    temperature = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x)) / self.temperature, y)


@case()
def plain_number_afterwards(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    module = _Scaled()
    model, said = wrap(module), []
    opt = sgd(model)
    for step, batch in enumerate(batches()):
        module.temperature = 1.0 + step
        said += train(model, [batch], opt)
    return said


class _Buffered(Net):
    """The knob as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x)) / self.temperature, y)


@case()
def buffer_set_between_steps(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    module = _Buffered()
    model, said = wrap(module), []
    opt = sgd(model)
    for step, batch in enumerate(batches()):
        module.temperature.fill_(1.0 + step)
        said += train(model, [batch], opt)
    return said


# --- hooks and gradients ----------------------------------------------------------------------


@case()
def tensor_hook(wrap: Wrap) -> Any:
    model = wrap(net())
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 0.5)
    return train(model), weights(model)


@case()
def post_accumulate_hook(wrap: Wrap) -> Any:
    """An optimizer inside backward."""
    model = wrap(net())
    opts = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(p: Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    said = []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        said.append(loss.item())
    return said


@case()
def autograd_grad(wrap: Wrap) -> Any:
    model = wrap(net())
    loss = model(*rows())
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss, [g.norm() if g is not None else None for g in grads]


@case()
def gradient_of_the_input(wrap: Wrap) -> Any:
    """A saliency map, or an adversarial example."""
    model, (x, y) = wrap(net()), rows()
    x.requires_grad_(True)
    loss = model(x, y)
    loss.backward()
    return loss, x.grad


@case()
def logits_and_loss(wrap: Wrap) -> Any:
    model = wrap(gpt(loss_alone=False))
    opt, said = sgd(model), []
    for seed in range(3):
        logits, loss = model(*tokens(seed=seed))
        opt.zero_grad()
        loss.backward()
        opt.step()
        said += [loss.item(), logits.detach().mean().item()]
    return said


@case()
def logits_and_loss_in_eval(wrap: Wrap) -> Any:
    model = wrap(gpt(loss_alone=False))
    train(model, [], torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    with torch.no_grad():
        logits, loss = model(*tokens())
    return logits, loss


# --- rows that are mixed ------------------------------------------------------------------------


class _Mixed(Net):
    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.mix(x), y)


def mixed(wrap: Wrap, mix: Any) -> Any:
    torch.manual_seed(0)
    model = wrap(_Mixed(mix))
    return train(model), weights(model)


@case()
def batch_mixes_rows(wrap: Wrap) -> Any:
    return mixed(wrap, lambda x: (x @ x.T).softmax(0) @ x)


@case()
def batch_sorts_rows(wrap: Wrap) -> Any:
    return mixed(wrap, lambda x: x.sort(0).values)


@case()
def batch_rolls_rows(wrap: Wrap) -> Any:
    return mixed(wrap, lambda x: x.roll(1, 0))


@case()
def batch_is_centred(wrap: Wrap) -> Any:
    return mixed(wrap, lambda x: x - x.mean(0))


@case()
def batch_is_flipped(wrap: Wrap) -> Any:
    return mixed(wrap, lambda x: 0.7 * x + 0.3 * x.flip(0))


@case()
def batch_cumsum(wrap: Wrap) -> Any:
    return mixed(wrap, lambda x: x.cumsum(0))


# --- other wrappers -----------------------------------------------------------------------------


@case()
def ddp_around(wrap: Wrap) -> Any:
    model = wrap(net())
    if wrap.is_library and wrap.size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return train(model)


@case()
def ddp_before(wrap: Wrap) -> Any:
    module: nn.Module = net()
    if wrap.is_library and wrap.size > 1:
        import autopar_torch as ap

        ap.parallelize(net())  # starts the process group, as a script would
        module = nn.parallel.DistributedDataParallel(module)
    return train(wrap(module))


@case()
def fully_shard_around(wrap: Wrap) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = wrap(net())
    if wrap.is_library and wrap.size > 1:
        fully_shard(model)
    return train(model)


@case()
def parallelize_twice(wrap: Wrap) -> Any:
    return train(wrap(wrap(net())))


@case()
def parallelize_again(wrap: Wrap) -> Any:
    """The same module, after it has trained."""
    module = net()
    model = wrap(module)
    return train(model), train(wrap(module))


@case(tolerance=2e-2)
def autocast(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


@case()
def deepcopy_of_it(wrap: Wrap) -> Any:
    model = wrap(net())
    said = train(model)
    ema = copy.deepcopy(model)
    train(model)
    ema.eval()
    with torch.no_grad():
        return said, ema(*rows())


@case()
def averaged_model(wrap: Wrap) -> Any:
    model = wrap(net())
    average = torch.optim.swa_utils.AveragedModel(model)
    opt = sgd(model)
    for batch in batches():
        train(model, [batch], opt)
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        return average(*rows())


@case()
def torch_save_of_it(wrap: Wrap) -> Any:
    model, path = wrap(net()), wrap.folder / f"whole{wrap.rank}.pt"
    train(model)
    torch.save(model, path)
    return weights(torch.load(path, weights_only=False))


@case()
def attribute(wrap: Wrap) -> Any:
    model = wrap(gpt())
    train(model, [tokens()])
    return model.config["n_embd"], model.head.weight.shape[0]


@case()
def attribute_that_is_not_there(wrap: Wrap) -> Any:
    model = wrap(net())
    return hasattr(model, "generate"), getattr(model, "nothing", 3)


@case()
def method_of_the_model(wrap: Wrap) -> Any:
    """`model.features(x)`, `model.generate(ids)`: not the forward that was traced."""
    model = wrap(net())
    train(model)
    with torch.no_grad():
        return model.features(rows()[0])


@case(tolerance=2e-2)
def bfloat16_afterwards(wrap: Wrap) -> Any:
    model = wrap(net())
    model.bfloat16()
    return train(model, ((x.bfloat16(), y) for x, y in batches()), sgd(model, 1e-2))


@case(tolerance=2e-2)
def bfloat16_later(wrap: Wrap) -> Any:
    model = wrap(net())
    said = train(model)
    model.bfloat16()
    return said, train(model, ((x.bfloat16(), y) for x, y in batches()), sgd(model, 1e-2))


@case()
def double_afterwards(wrap: Wrap) -> Any:
    model = wrap(net()).double()
    return train(model, ((x.double(), y) for x, y in batches()))


@case(tolerance=2e-2)
def bfloat16_plan_float_inputs(wrap: Wrap) -> Any:
    return train(wrap(net(), precision="bfloat16"), opt=None)


# --- models and losses ----------------------------------------------------------------------


@case()
def spectral_and_weight_norm(wrap: Wrap) -> Any:
    module = net()
    nn.utils.parametrizations.spectral_norm(module.head)
    nn.utils.parametrizations.weight_norm(module.inp)
    return train(wrap(module))


class _Weighted(Net):
    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        each = F.cross_entropy(self.head(self.features(x)), y, reduction="none")
        return (each * w).sum() / w.sum()


@case()
def weighted_mean(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)
    data = [(*batch, torch.rand(8, generator=draw)) for batch in batches()]
    return train(wrap(_Weighted()), data)


@case(right=True)
def odd_rows(wrap: Wrap) -> Any:
    """5 rows on 2 replicas."""
    model = wrap(net())
    return train(model, (rows(n) for n in (5, 3, 7))), weights(model)


@case(right=True)
def fewer_rows_than_replicas(wrap: Wrap) -> Any:
    model = wrap(net())
    return train(model, (rows(n) for n in (4, 1, 4))), weights(model)


class _Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(32)

    def features(self, x: Tensor) -> Tensor:
        return self.bn(super().features(x))


@case()
def batch_norm(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    model = wrap(_Normed())
    said = train(model)
    model.eval()
    with torch.no_grad():
        return said, model(*rows()), weights(model)


@case()
def batch_norm_odd_rows(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    model = wrap(_Normed())
    return train(model, (rows(n) for n in (5, 7, 3))), weights(model)


class _Drop(nn.Module):
    """How much of many ones is left: near 1, and not the same in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(1, 4096, bias=False), nn.Dropout(0.3)
        nn.init.ones_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(x)).mean()


@case()
def dropout_statistics(wrap: Wrap) -> Any:
    model, x = wrap(_Drop()), torch.ones(64, 1)
    found = [model(x).item() for _ in range(4)]
    spread = torch.tensor(found).std().item()
    return [abs(f - 1) < 0.01 for f in found], 1e-5 < spread < 1e-2


@case()
def user_generator_untouched(wrap: Wrap) -> Any:
    """Dropout in the model takes nothing from what the script draws."""
    model = wrap(net())
    torch.manual_seed(11)
    said = [torch.rand(1).item()]
    for batch in batches():
        train(model, [batch])
        said.append(torch.rand(1).item())
    return said, random.random()


@case(right=True)
def gradient_accumulation(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for step, (x, y) in enumerate(batches(6)):
        loss = model(x, y) / 2
        loss.backward()
        said.append(loss.item())
        if step % 2:
            opt.step()
            opt.zero_grad()
    return said, weights(model)


@case(right=True)
def two_forwards_one_backward(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    for a, b in itertools.pairwise(batches(4)):
        opt.zero_grad()
        loss = model(*a) + 0.5 * model(*b)
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


@case(right=True)
def forward_without_backward(wrap: Wrap) -> Any:
    """A loss that is thrown away leaves no gradients."""
    model = wrap(net())
    model(*rows(8, 5))
    return [p.grad is None for p in model.parameters()], train(model)


@case(right=True)
def first_call_no_grad(wrap: Wrap) -> Any:
    model = wrap(net())
    model.eval()
    with torch.no_grad():
        said = [model(*rows()).item()]
    model.train()
    return said + train(model), weights(model)


@case()
def first_call_no_grad_in_training(wrap: Wrap) -> Any:
    model = wrap(net())
    with torch.no_grad():
        said = [model(*rows()).item()]
    return said + train(model)


@case(right=True)
def frozen_and_tied(wrap: Wrap) -> Any:
    module = gpt()
    module.pos.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
    model = wrap(module)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return train(model, (tokens(seed=s) for s in range(3)), opt), weights(model)


class _Checkpointed(Net):
    def features(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@case(right=True)
def gradient_checkpointing(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    return train(wrap(_Checkpointed()))


@case(right=True)
def inference_mode(wrap: Wrap) -> Any:
    model = wrap(net())
    said = train(model)
    model.eval()
    with torch.inference_mode():
        said.append(model(*rows(6)).item())
    model.train()
    return said + train(model)


@case()
def ema_by_hand(wrap: Wrap) -> Any:
    model = wrap(net())
    opt = sgd(model)
    train(model, [rows()], opt)
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
    for batch in batches():
        train(model, [batch], opt)
        for n, p in model.named_parameters():
            ema[n].lerp_(p.detach(), 0.1)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(ema[n])
    model.eval()
    with torch.no_grad():
        return model(*rows())


@case(right=True)
def weight_decay_groups(wrap: Wrap) -> Any:
    model = wrap(net())
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.SGD(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.1
    )
    return train(model, opt=opt), weights(model)


@case(right=True)
def scheduler(wrap: Wrap) -> Any:
    model = wrap(net())
    opt, said = sgd(model), []
    warm = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=6)
    for batch in batches(5):
        said += train(model, [batch], opt)
        warm.step()
    return said


@case()
def nan_is_named(wrap: Wrap) -> Any:
    model = wrap(net())
    data = [rows(), (rows()[0] * float("nan"), rows()[1])]
    return train(model, data), wrap.heard("nan")


@case(right=True)
def loss_fn_and_target(wrap: Wrap) -> Any:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)),
                 loss_fn=F.cross_entropy)
    opt, said = sgd(model), []
    for x, y in batches():
        opt.zero_grad()
        loss = model(x, target=y)
        loss.backward()
        opt.step()
        said.append(loss.item())
    return said


@case()
def edited_plan_file(wrap: Wrap) -> Any:
    """The plan that ran is given back as a file in which partial sums are called whole."""
    model, rate_0 = wrap(net()), {"lr": 0.0}
    said = train(model, [rows()], torch.optim.SGD(model.parameters(), **rate_0))
    if not wrap.is_library or wrap.size == 1:
        return said, said
    import autopar_torch as ap
    from autopar_torch import files

    path = wrap.folder / f"edited{wrap.rank}.json"
    path.write_bytes(files.encode(model.plan).replace(b'>P"', b'>R"'))
    again = ap.parallelize(net(), plan=str(path))
    return said, train(again, [rows()], torch.optim.SGD(again.parameters(), **rate_0))

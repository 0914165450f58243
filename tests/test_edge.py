"""What scripts do with parameters, gradients and optimizers: the same as in one process.

Each script below runs on a plain module and under four plans, on 2 ranks that are started once.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.errors import AutoparError, PlanError, RunError
from autopar_torch.plan import Plan, Replica, Stage, check
from autopar_torch.run import world
from autopar_torch.run.sharded import ShardedParameter
from autopar_torch.shard.atoms import atoms
from autopar_torch.shard.holdings import Box
from ranks import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_micro_batches": 2},
    "zero3": {"dp": 2, "zero": 3},
    "dp2": {"dp": 2},
}


_MODELS: dict[str, Any] = {}


def _batch(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    batch = zoo.batch("nanogpt", rows, seed)
    return {name: value[:, :8] % 24 for name, value in batch.items()}


def _module(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = zoo.NanoGPT(vocab=24, width=16, layers=2, seq=8)
    if frozen:
        module.tok.requires_grad_(False)
        module.blocks[1].requires_grad_(False)
    return module.double()  # so that only wrong things differ


class Job:
    """A model in training, whole or under a plan (made and traced once)."""

    def __init__(self, plan: str, frozen: bool = False) -> None:
        key = plan + frozen * " frozen"
        if key not in _MODELS:
            module = _module(frozen)
            _MODELS[key] = module if not plan else ap.parallelize(
                module, _batch(), plan=ap.Plan.uniform(**PLANS[plan]))
        self.model = _MODELS[key]
        self.module = self.model.module if plan else self.model
        self.module.load_state_dict(_module(frozen).state_dict())
        self.model.zero_grad()
        self.params = list(self.module.parameters())
        self.plan = plan

    def loss(self, seed: int = 0) -> Tensor:
        return oracle.loss_of(self.model(**_batch(seed)))

    def backward(self, seed: int = 0) -> None:
        self.loss(seed).backward()

    def train(self, opt: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
        for seed in range(steps):
            opt.zero_grad()
            self.backward(seed)
            opt.step()
        return self.state()

    def state(self) -> list[Tensor]:
        return [v.clone() for v in self.module.state_dict().values()]


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-3)


def script_torch_clips_norms_of_any_order(job: Job) -> Any:
    found = []
    for order in (1.0, 2.0, 3.0, float("inf"), 0.0):
        job.backward()
        found.append(nn.utils.clip_grad_norm_(job.params, 0.1, norm_type=order))
        found += [p.grad.clone() for p in job.params]
    return found


def script_the_model_clips_as_torch_does(job: Job) -> Any:
    clip = (lambda *a, **k: nn.utils.clip_grad_norm_(job.params, *a, **k)) if (
        not job.plan) else job.model.clip_grad_norm_
    found = []
    for order in (1.0, 2.0, float("inf")):
        job.backward()
        found += [clip(0.1, norm_type=order), *(p.grad for p in job.params)]
    return found


def script_get_total_norm_and_clip_value(job: Job) -> Any:
    job.backward()
    norm = nn.utils.get_total_norm([p.grad for p in job.params])
    nn.utils.clip_grad_value_(job.params, 1e-3)
    return [norm, *(p.grad.abs().max() for p in job.params), *(p.grad for p in job.params)]


def script_norms_by_hand(job: Job) -> Any:
    job.backward()
    total = sum(p.grad.detach().data.norm(2).item() ** 2 for p in job.params) ** 0.5
    grads = [p.grad for p in job.params]
    return [total, *(g.norm() for g in grads), *(g.abs().mean() for g in grads),
            *(g.square().sum().sqrt() for g in grads), *(g.max() for g in grads),
            *(g.min() for g in grads), torch.stack([g.pow(2).sum() for g in grads]).sum(),
            *(torch.linalg.norm(g) for g in grads), *(g.std() for g in grads if g.numel() > 1),
            *(g.isfinite().all() for g in grads), torch.cat([g.flatten() for g in grads]).norm(),
            sum((g * p).sum() for g, p in zip(grads, job.params, strict=True))]


def script_a_penalty_in_the_loss(job: Job) -> Any:
    loss = job.loss() + 1e-3 * sum((p**2).sum() for p in job.params)
    loss = loss + 1e-2 * sum(p.norm() for p in job.params) + 1e-3 * sum(
        p.abs().mean() for p in job.params)
    weights = [p for p in job.params if p.ndim == 2]
    loss = loss + 1e-3 * sum((w.T @ w).trace() for w in weights)
    loss = loss + 1e-3 * sum(w[:2].exp().sum() for w in weights)
    loss.backward()
    return [loss, *(p.grad for p in job.params)]


def script_shapes_and_counts(job: Job) -> Any:
    job.backward()
    return [sum(p.numel() for p in job.params), sum(p.nelement() for p in job.params),
            *(d for p in job.params for d in (*p.shape, *p.size(), p.ndim, len(p), p.stride(0))),
            *(d for p in job.params for d in p.grad.shape), *(p.nbytes for p in job.params),
            *(torch.numel(p) for p in job.params),
            *(p.data.size(-1) for p in job.params)]


def script_hooks_see_gradients(job: Job) -> Any:
    seen: list[Any] = []
    handles = []
    for p in job.params:
        handles += [
            p.register_hook(lambda g: seen.append(g.norm())),
            p.register_hook(lambda g: g * 2),
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm())),
        ]
    job.backward()
    for handle in handles:
        handle.remove()
    return [len(seen), torch.stack(seen).norm(), max(seen), *(p.grad for p in job.params)]


def script_autograd_grad(job: Job) -> Any:
    grads = torch.autograd.grad(job.loss() * 3, job.params)
    return [*grads, *(g.norm() for g in grads), *(p.grad is None for p in job.params)]


def script_the_scaler_finds_what_is_infinite(job: Job) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found: list[Any] = []
    for make in (torch.optim.SGD, lambda ps, lr: torch.optim.AdamW(ps, lr, eps=1e-3)):
        opt = make(job.params, lr=1e-3)
        for bad in (False, True, False):
            opt.zero_grad()
            scaler.scale(job.loss()).backward()
            if bad:  # on one stage, in one part only
                job.params[0].grad[0, 0] = float("inf")
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(job.params, 1.0)
            scaler.step(opt)
            scaler.update()
            found += [scaler.get_scale(), *job.state()]
    return found


def script_muon(job: Job) -> Any:
    matrices = [p for p in job.params if p.ndim == 2]
    return job.train(torch.optim.Muon(matrices, lr=1e-2))


def script_adafactor(job: Job) -> Any:
    return job.train(torch.optim.Adafactor(job.params, lr=1e-2, eps=(1e-4, 1e-3)))


def script_lbfgs(job: Job) -> Any:
    opt = torch.optim.LBFGS(job.params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Any:
        opt.zero_grad()
        loss = job.loss()
        loss.backward()
        return loss

    opt.step(closure)
    return job.state()


def script_a_closure_for_adam_with_a_penalty(job: Job) -> Any:
    opt = _adamw(job.params)

    def closure() -> Any:
        opt.zero_grad()
        loss = job.loss() + 1e-2 * sum(p.square().sum() for p in job.params)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    opt.zero_grad()
    job.backward()
    opt.step()
    return job.state()


def script_all_common_optimizers(job: Job) -> Any:
    found = []
    for name in ("SGD", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD"):
        opt = getattr(torch.optim, name)(job.params, lr=1e-3)
        found += job.train(opt, 1)
    found += job.train(torch.optim.AdamW(job.params, lr=1e-3, eps=1e-3, fused=True))
    return found + job.train(torch.optim.SGD(job.params, 1e-2, momentum=0.9, weight_decay=0.1))


def script_an_optimizer_of_ones_own(job: Job) -> Any:
    job.backward()
    with torch.no_grad():
        for p in job.params:
            p -= 1e-2 * p.grad / (p.grad.norm() + 1e-6)
            p.data.clamp_(-0.5, 0.5)
            p.data.mul_(0.99)
            p.data = p.data + 1e-3
            p[0] = 0.25
            p.view(-1)[3:5] = 0.125
    torch.manual_seed(3)
    for p in job.params:
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-2)
        p.data.add_(torch.randn(p.shape), alpha=1e-2)
    nn.init.normal_(job.params[0], std=0.02)
    nn.init.zeros_(job.params[-1])
    return [*job.state(), *(p.grad for p in job.params)]


def script_gradients_are_edited(job: Job) -> Any:
    job.backward()
    job.params[0].grad.zero_()
    job.params[1].grad = None
    job.params[2].grad = job.params[2].grad * 0.5
    job.params[3].grad = torch.ones(job.params[3].shape, dtype=torch.float64)
    job.params[4].grad.div_(job.params[4].grad.max())
    _adamw(job.params).step()
    job.backward()
    return [*job.state(), *(p.grad for p in job.params)]


def script_an_average_of_the_weights(job: Job) -> Any:
    ema = [p.detach().clone() for p in job.params]
    twin, swa = copy.deepcopy(job.module), AveragedModel(job.module)
    opt = _adamw(job.params)
    for _ in range(2):
        job.train(opt, 1)
        swa.update_parameters(job.module)
        with torch.no_grad():
            for e, p, q in zip(ema, job.params, twin.parameters(), strict=True):
                e.lerp_(p, 0.1)
                q.mul_(0.9).add_(p, alpha=0.1)
    loss = oracle.loss_of(swa(**_batch()))
    return [*ema, *twin.state_dict().values(), *swa.module.state_dict().values(), loss]


def script_groups_and_schedules(job: Job) -> Any:
    decayed = [p for p in job.params if p.ndim >= 2]
    rest = [p for p in job.params if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                             {"params": rest, "weight_decay": 0.0}], lr=1e-3, eps=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=10)
    for _ in range(3):
        job.train(opt, 1)
        schedule.step()
        opt.param_groups[1]["lr"] *= 0.5
    return [len(decayed), *job.state()]


def script_saved_by_one_and_loaded_by_all(job: Job) -> Any:
    found: list[Any] = []
    for make in (_adamw, lambda ps: torch.optim.Adafactor(ps, 1e-2, eps=(1e-4, 1e-3)),
                 lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9)):
        opt = make(job.params)
        job.train(opt)
        file = io.BytesIO()
        torch.save({"model": job.module.state_dict(), "opt": opt.state_dict()}, file)
        job.train(opt)
        file.seek(0)
        read = torch.load(file)
        found += _clones(v for values in read["opt"]["state"].values() for v in values.values())
        found += _clones(read["model"].values())
        job.module.load_state_dict(read["model"])
        opt = make(job.params)
        opt.load_state_dict(read["opt"])
        found += _clones(v for vs in opt.state_dict()["state"].values() for v in vs.values())
        found += job.train(opt)
    return found


def _clones(values: Any) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in values]


def script_state_of_parts_of_the_model(job: Job) -> Any:
    sub = job.module.blocks[1]
    before = {k: v.clone() for k, v in sub.state_dict().items()}
    state = job.module.state_dict()
    tied = state["tok.weight"].data_ptr() == state["head.weight"].data_ptr()
    job.train(_adamw(job.params))
    sub.load_state_dict(before)
    whole = {k: v.clone() for k, v in job.model.state_dict().items()}
    job.model.load_state_dict({k: v * 0.5 for k, v in whole.items()})
    vector = nn.utils.parameters_to_vector(job.params)
    nn.utils.vector_to_parameters(vector * 2, job.params)
    return [tied, *before.values(), *whole.values(), vector.detach(), *job.state()]


def script_frozen_parameters(job: Job) -> Any:
    job = Job(job.plan, frozen=True)
    opt = _adamw([p for p in job.params if p.requires_grad])
    job.backward()
    norm = nn.utils.clip_grad_norm_(job.params, 1.0)
    opt.step()
    return [norm, *job.state(), *(p.grad is None for p in job.params)]


def script_adafactor_of_transformers(job: Job) -> Any:
    optimization = pytest.importorskip("transformers.optimization")
    make = functools.partial(optimization.Adafactor, job.params, eps=(1e-4, 1e-3))
    found = job.train(make())
    return found + job.train(make(lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9))


def script_a_view_sees_and_writes_the_parameter(job: Job) -> Any:
    flat = [p.data.view(-1) for p in job.params]
    job.train(_adamw(job.params), 1)
    for f in flat:
        f[1:3] += 1.0
        f.mul_(0.5)
    return [*(f.clone() for f in flat), *job.state()]


def script_the_module_is_called_itself(job: Job) -> Any:
    loss = oracle.loss_of(job.module(**_batch()))
    loss.backward()
    return [loss, *(p.grad for p in job.params)]


SCRIPTS = sorted(name for name in globals() if name.startswith("script_"))


def _values(found: Any) -> list[Tensor]:
    """As full plain tensors."""
    return [torch.as_tensor(x).detach().clone().double() if not isinstance(x, Tensor)
            else x.detach().double().cpu() for x in found]


def _differ(got: list[Tensor], want: list[Tensor]) -> str:
    if len(got) != len(want):
        return f"{len(got)} values for {len(want)}"
    worst, where = 0.0, ""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if tuple(a.shape) != tuple(b.shape):
            return f"value {i}: {tuple(a.shape)} for {tuple(b.shape)}"
        a, b = torch.add(a.view(-1), 0.0), b.view(-1)
        same = (a == b) | (a.isnan() & b.isnan())
        scale = max(1e-3, float(b[b.isfinite()].abs().max())) if b.isfinite().any() else 1.0
        error = float((a - b)[~same].abs().max()) / scale if not same.all() else 0.0
        if not error <= worst:
            worst, where = error, f"value {i} of {len(got)} is off by {error:.1e}"
    return where if not worst <= 1e-9 else ""


def check_all(only: str = "") -> dict[str, str]:
    """Script and plan -> "" or what was wrong."""
    world.start()
    torch.set_num_threads(1)
    found = {}
    for name in SCRIPTS:
        if only not in name:
            continue
        script: Callable[[Job], Any] = globals()[name]
        want = _values(script(Job("")))
        for plan in PLANS:
            try:
                found[f"{name} {plan}"] = _differ(_values(script(Job(plan))), want)
            except (AutoparError, RuntimeError, AttributeError, TypeError, ValueError) as error:
                if only:
                    raise
                found[f"{name} {plan}"] = f"{type(error).__name__}: {error}"
    for name, claim in sorted(globals().items()):
        if name.startswith("claim_") and only in name:
            try:
                claim()
                found[name] = ""
            except (AssertionError, pytest.fail.Exception) as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def checked() -> dict[str, str]:
    return run_ranks(2, "test_edge:check_all")[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_come_out_as_in_one_process(name: str, checked: dict[str, str]) -> None:
    wrong = {k.split()[1]: v for k, v in checked.items() if k.split()[0] == name and v}
    assert not wrong, f"{name.removeprefix('script_').replace('_', ' ')}: {wrong}"


def claim_gradients_are_handed_over_without_a_copy() -> None:
    job = Job("tp2")
    kept: list[int] = []
    finish = job.model._finish_grads

    def seen(program: Any) -> Any:
        grads = finish(program)
        kept.extend(grad.data_ptr() for _, grad in grads)
        return grads

    job.model._finish_grads = seen
    job.backward()
    job.model._finish_grads = finish
    assert [p.grad.data_ptr() for p in job.params] == kept


def _frozen_and_thawed(job: Job) -> list[Any]:
    opt = _adamw(job.params)
    hook = job.params[0].register_hook(lambda g: g * 2)
    few = [*job.module.blocks[0].fc.parameters(), job.module.pos.weight]
    found = job.train(opt, 1)
    for frozen in (True, False):
        for p in few:
            p.requires_grad_(not frozen)
        found += [*job.train(opt, 2), *(p.grad is None for p in few)]
    hook.remove()
    return found


def claim_parameters_can_be_frozen_and_thawed_between_steps() -> None:
    want = _values(_frozen_and_thawed(Job("")))
    for plan in ("tp2", "pp2", "dp2"):
        wrong = _differ(_values(_frozen_and_thawed(Job(plan))), want)
        assert not wrong, f"{plan}: {wrong}"


def claim_a_fresh_optimizer_has_whole_state_once_it_is_loaded() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    for plan in ("tp2", "pp2", "zero3"):
        job = Job(plan)
        opt, fresh = _adamw(job.params), _adamw(job.params)
        job.train(opt, 1)
        job.model.save(folder[0], opt)
        job.model.load(folder[0], fresh)
        got, want = (
            [state[k] for state in o.state_dict()["state"].values() for k in sorted(state)]
            for o in (fresh, opt)
        )
        assert not _differ(_values(got), _values(want)), plan
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def claim_what_cannot_be_right_is_refused() -> None:
    for plan in ("tp2", "pp2"):
        job = Job(plan)
        param = next(p for p in job.params if type(p) is ShardedParameter)
        loss = job.loss()
        with pytest.raises(RunError, match="gradient of the gradients"):
            torch.autograd.grad(loss, job.params, create_graph=True)
        loss = job.loss()
        loss.backward(retain_graph=True)
        with pytest.raises(RunError, match="already called"):
            loss.backward()
        with pytest.raises(RunError, match="out="):
            torch.add(param, 1.0, out=param.data)
        with pytest.raises(RunError, match="full shape"):
            param.data = torch.zeros(3)
        with pytest.raises(RuntimeError, match="broadcast"), torch.no_grad():
            param.add_(torch.zeros(3, 1, 1))
        view = param.view(-1)
        with torch.no_grad():
            param.mul_(1.5)
        with pytest.raises(RunError, match="before the parameter changed"):
            view.sum()


def claim_a_step_that_raised_leaves_whole_parameters() -> None:
    job = Job("tp2")
    opt = _adamw(job.params)
    job.backward()
    opt.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        opt.step()
    job.loss()
    assert sum(p.numel() for p in job.params) == sum(p.numel() for p in Job("").params)


def claim_plain_data_parallelism_keeps_plain_parameters() -> None:
    assert {type(p) for p in Job("dp2").params} == {nn.Parameter}
    assert {type(p) for p in Job("zero3").params} == {ShardedParameter}


def test_claims(checked: dict[str, str]) -> None:
    wrong = {k: v for k, v in checked.items() if k.startswith("claim_") and v}
    assert not wrong


@pytest.mark.slow
def test_replicas_and_stages_of_other_shapes_hold_parts_that_overlap() -> None:
    assert run_ranks(3, "test_edge:check_overlaps")[0] == {}


UNEVEN = {
    "tp2 beside tp1": Plan((Replica((Stage((0, 1)),)), Replica((Stage((2,)),)))),
    "the same, ZeRO": Plan((Replica((Stage((0, 1)),)), Replica((Stage((2,)),))), zero=1),
    "tp2 then tp1, tied": Plan((Replica((Stage((0, 1)), Stage((2,)))),)),
    "tp1 then tp2, tied": Plan((Replica((Stage((0,)), Stage((1, 2)))),)),
}


def check_overlaps() -> dict[str, Any]:
    """Norms, training, state dicts and checkpoints of plans whose parts overlap; what is wrong."""
    world.start()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, plan in UNEVEN.items():
        found |= {f"{name}: {what}": off for what, off in oracle.compare(
            "nanogpt", plan, True).items() if off > 1e-5}
        found |= {f"{name}: {what}": off for what, off in _saved(plan).items() if off > 1e-5}
    pair = Plan((Replica((Stage((0,)), Stage((1,)))), Replica((Stage((2,)),))))
    found |= {k: v for k, v in oracle.compare("resnet", pair, False).items() if v > 1e-5}
    with pytest.raises(PlanError, match="cut it in different ways"):
        oracle.compare("resnet", UNEVEN["tp2 beside tp1"], False)
    return found


def _saved(plan: Plan) -> dict[str, float]:
    """Saved under a plan, loaded under another: how far model and optimizer are apart."""
    batch, states = zoo.batch("nanogpt", 8), []
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    for own in (plan, Plan.uniform(dp=3, zero=2)):
        model = ap.parallelize(zoo.build("nanogpt"), batch, plan=own)
        opt = oracle.optimizer(model.parameters())
        if own is plan:
            model(**batch).backward()
            opt.step()
            model.save(folder[0], opt)
        else:
            model.load(folder[0], opt)
        values = [state[k] for state in opt.state_dict()["state"].values() for k in sorted(state)]
        states.append(list(model.state_dict().values()) + values)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    apart = [float((a - b).abs().max()) for a, b in zip(*states, strict=True)]
    return {"saved": max(apart)}


def test_stages_on_the_same_devices_have_one_mesh() -> None:
    stages = (Stage((0, 1, 2, 3), (0, 1), (2, 2)), Stage((0, 1, 2, 3), (1, 2), (4,)))
    with pytest.raises(PlanError, match="are a mesh of"):
        check(Plan((Replica(stages),)), 4)


def test_atoms_cover_what_anyone_holds_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
        held = {rank: _boxes(rng, shape) for rank in range(rng.randint(1, 4))}
        counts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for atom in atoms(held):
            for cell in (cell for box in atom.boxes for cell in _cells(box)):
                counts.setdefault(cell, []).append(atom.holders)
        for cell in _cells(((0,) * len(shape), tuple(shape))):
            holders = tuple(r for r, own in held.items() if any(cell in _cells(b) for b in own))
            assert counts.get(cell, []) == ([holders] if holders else [])


def _boxes(rng: random.Random, shape: list[int]) -> list[Box]:
    """Of one rank, disjoint: a box, or two halves of another."""
    starts = tuple(rng.randint(0, n - 1) for n in shape)
    sizes = tuple(rng.randint(0, n - a) for n, a in zip(shape, starts, strict=True))
    half = sizes[0] // 2
    if rng.random() < 0.5 or not half:
        return [(starts, sizes)]
    return [(starts, (half, *sizes[1:])),
            ((starts[0] + half, *starts[1:]), (sizes[0] - half, *sizes[1:]))]


def _cells(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(*box, strict=True))))

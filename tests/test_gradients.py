"""What scripts do with parameters and gradients: the same as in one process."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch
from torch import nn

import claims
import oracle
from autopar_torch.run.sharded import ShardedParameter
from autopar_torch.run.step import RankStep
from scripts import Job, adamw, difference, everywhere, small_batch, values_of


@everywhere
def claim_torch_clips_norms_of_any_order(job: Job) -> Any:
    found = []
    for order in (1.0, 2.0, 3.0, float("inf"), 0.0):
        job.backward()
        found.append(nn.utils.clip_grad_norm_(job.params, 0.1, norm_type=order))
        found += [p.grad.clone() for p in job.params]
    return found


@everywhere
def claim_the_model_clips_as_torch_does(job: Job) -> Any:
    clip = (lambda *a, **k: nn.utils.clip_grad_norm_(job.params, *a, **k)) if (
        not job.plan) else job.model.clip_grad_norm_
    found = []
    for order in (1.0, 2.0, float("inf")):
        job.backward()
        found += [clip(0.1, norm_type=order), *(p.grad for p in job.params)]
    return found


@everywhere
def slow_claim_get_total_norm_and_clip_value(job: Job) -> Any:
    job.backward()
    norm = nn.utils.get_total_norm([p.grad for p in job.params])
    nn.utils.clip_grad_value_(job.params, 1e-3)
    return [norm, *(p.grad.abs().max() for p in job.params), *(p.grad for p in job.params)]


@everywhere
def slow_claim_norms_by_hand(job: Job) -> Any:
    job.backward()
    total = sum(p.grad.detach().data.norm(2).item() ** 2 for p in job.params) ** 0.5
    grads = [p.grad for p in job.params]
    return [total, *(g.norm() for g in grads), *(g.abs().mean() for g in grads),
            *(g.square().sum().sqrt() for g in grads), *(g.max() for g in grads),
            *(g.min() for g in grads), torch.stack([g.pow(2).sum() for g in grads]).sum(),
            *(torch.linalg.norm(g) for g in grads), *(g.std() for g in grads if g.numel() > 1),
            *(g.isfinite().all() for g in grads), torch.cat([g.flatten() for g in grads]).norm(),
            sum((g * p).sum() for g, p in zip(grads, job.params, strict=True))]


@everywhere
def slow_claim_a_penalty_in_the_loss(job: Job) -> Any:
    loss = job.loss() + 1e-3 * sum((p**2).sum() for p in job.params)
    loss = loss + 1e-2 * sum(p.norm() for p in job.params) + 1e-3 * sum(
        p.abs().mean() for p in job.params)
    weights = [p for p in job.params if p.ndim == 2]
    loss = loss + 1e-3 * sum((w.T @ w).trace() for w in weights)
    loss = loss + 1e-3 * sum(w[:2].exp().sum() for w in weights)
    loss.backward()
    return [loss, *(p.grad for p in job.params)]


@everywhere
def claim_shapes_and_counts(job: Job) -> Any:
    job.backward()
    return [sum(p.numel() for p in job.params), sum(p.nelement() for p in job.params),
            *(d for p in job.params for d in (*p.shape, *p.size(), p.ndim, len(p), p.stride(0))),
            *(d for p in job.params for d in p.grad.shape), *(p.nbytes for p in job.params),
            *(torch.numel(p) for p in job.params),
            *(p.data.size(-1) for p in job.params)]


@everywhere
def slow_claim_hooks_see_gradients(job: Job) -> Any:
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


@everywhere
def slow_claim_autograd_grad(job: Job) -> Any:
    grads = torch.autograd.grad(job.loss() * 3, job.params)
    return [*grads, *(g.norm() for g in grads), *(p.grad is None for p in job.params)]


@everywhere
def claim_the_scaler_finds_what_is_infinite(job: Job) -> Any:
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


@everywhere
def claim_gradients_are_edited(job: Job) -> Any:
    job.backward()
    job.params[0].grad.zero_()
    job.params[1].grad = None
    job.params[2].grad = job.params[2].grad * 0.5
    job.params[3].grad = torch.ones(job.params[3].shape, dtype=torch.float64)
    job.params[4].grad.div_(job.params[4].grad.max())
    adamw(job.params).step()
    job.backward()
    return [*job.state(), *(p.grad for p in job.params)]


@everywhere
def slow_claim_frozen_parameters(job: Job) -> Any:
    job = Job(job.plan, frozen=True)
    opt = adamw([p for p in job.params if p.requires_grad])
    job.backward()
    norm = nn.utils.clip_grad_norm_(job.params, 1.0)
    opt.step()
    return [norm, *job.state(), *(p.grad is None for p in job.params)]


@everywhere
def claim_a_view_sees_and_writes_the_parameter(job: Job) -> Any:
    flat = [p.data.view(-1) for p in job.params]
    job.train(adamw(job.params), 1)
    for f in flat:
        f[1:3] += 1.0
        f.mul_(0.5)
    return [*(f.clone() for f in flat), *(float(f"{f[0]:.17g}") for f in flat), *job.state()]


@everywhere
def slow_claim_the_module_is_called_itself(job: Job) -> Any:
    loss = oracle.loss_of(job.module(**small_batch()))
    loss.backward()
    return [loss, *(p.grad for p in job.params)]


def claim_gradients_are_handed_over_without_a_copy() -> None:
    job = Job("tp2")
    kept: list[int] = []
    finish = RankStep._finish_grads

    def seen(step: RankStep, *given: Any) -> Any:
        grads = finish(step, *given)
        kept.extend(grad.data_ptr() for grad in grads.values())
        return grads

    with unittest.mock.patch.object(RankStep, "_finish_grads", seen):
        job.backward()
    assert [p.grad.data_ptr() for p in job.params] == kept


def _frozen_and_thawed(job: Job) -> list[Any]:
    opt = adamw(job.params)
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
    want = values_of(_frozen_and_thawed(Job("")))
    for plan in ("tp2", "pp2", "dp2"):
        wrong = difference(values_of(_frozen_and_thawed(Job(plan))), want)
        assert not wrong, f"{plan}: {wrong}"


def claim_plain_data_parallelism_keeps_plain_parameters() -> None:
    assert {type(p) for p in Job("dp2").params} == {nn.Parameter}
    assert {type(p) for p in Job("zero3").params} == {ShardedParameter}


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

"""What scripts do with optimizers and their state: the same as in one process."""

from __future__ import annotations

import copy
import functools
import io
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import claims
import oracle
from autopar_torch.errors import RunError
from autopar_torch.run.sharded import ShardedParameter
from scripts import Job, adamw, difference, everywhere, small_batch, values_of


@everywhere
def claim_muon(job: Job) -> Any:
    matrices = [p for p in job.params if p.ndim == 2]
    return job.train(torch.optim.Muon(matrices, lr=1e-2))


@everywhere
def slow_claim_adafactor(job: Job) -> Any:
    return job.train(torch.optim.Adafactor(job.params, lr=1e-2, eps=(1e-4, 1e-3)))


@everywhere
def claim_lbfgs(job: Job) -> Any:
    opt = torch.optim.LBFGS(job.params, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Any:
        opt.zero_grad()
        loss = job.loss()
        loss.backward()
        return loss

    opt.step(closure)
    return job.state()


@everywhere
def slow_claim_a_closure_for_adam_with_a_penalty(job: Job) -> Any:
    opt = adamw(job.params)

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


@everywhere
def slow_claim_all_common_optimizers(job: Job) -> Any:
    found = []
    for name in ("SGD", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD"):
        opt = getattr(torch.optim, name)(job.params, lr=1e-3)
        found += job.train(opt, 1)
    # With eps of 1e-10 it divides rounding by itself, where a gradient is zero (biases of keys).
    found += job.train(torch.optim.Adagrad(job.params, lr=1e-3, eps=1e-3), 1)
    found += job.train(torch.optim.AdamW(job.params, lr=1e-3, eps=1e-3, fused=True))
    return found + job.train(torch.optim.SGD(job.params, 1e-2, momentum=0.9, weight_decay=0.1))


@everywhere
def claim_an_optimizer_of_ones_own(job: Job) -> Any:
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


@everywhere
def slow_claim_an_average_of_the_weights(job: Job) -> Any:
    ema = [p.detach().clone() for p in job.params]
    twin, swa = copy.deepcopy(job.module), AveragedModel(job.module)
    opt = adamw(job.params)
    for _ in range(2):
        job.train(opt, 1)
        swa.update_parameters(job.module)
        with torch.no_grad():
            for e, p, q in zip(ema, job.params, twin.parameters(), strict=True):
                e.lerp_(p, 0.1)
                q.mul_(0.9).add_(p, alpha=0.1)
    loss = oracle.loss_of(swa(**small_batch()))
    return [*ema, *twin.state_dict().values(), *swa.module.state_dict().values(), loss]


@everywhere
def claim_groups_and_schedules(job: Job) -> Any:
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


@everywhere
def slow_claim_saved_by_one_and_loaded_by_all(job: Job) -> Any:
    found: list[Any] = []
    for make in (adamw, lambda ps: torch.optim.Adafactor(ps, 1e-2, eps=(1e-4, 1e-3)),
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


@everywhere
def claim_state_of_parts_of_the_model(job: Job) -> Any:
    sub = job.module.blocks[1]
    before = {k: v.clone() for k, v in sub.state_dict().items()}
    state = job.module.state_dict()
    tied = state["tok.weight"].data_ptr() == state["head.weight"].data_ptr()
    job.train(adamw(job.params))
    sub.load_state_dict(before)
    whole = {k: v.clone() for k, v in job.model.state_dict().items()}
    job.model.load_state_dict({k: v * 0.5 for k, v in whole.items()})
    vector = nn.utils.parameters_to_vector(job.params)
    nn.utils.vector_to_parameters(vector * 2, job.params)
    return [tied, *before.values(), *whole.values(), vector.detach(), *job.state()]


@everywhere
def slow_claim_adafactor_of_transformers(job: Job) -> Any:
    optimization = pytest.importorskip("transformers.optimization")
    make = functools.partial(optimization.Adafactor, job.params, eps=(1e-4, 1e-3))
    found = job.train(make())
    return found + job.train(make(lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9))


@everywhere
def claim_state_is_read_and_written_parameter_by_parameter(job: Job) -> Any:
    found: list[Any] = []
    for opt in (adamw(job.params), torch.optim.Adagrad(job.params, lr=1e-3, eps=1e-3)):
        job.train(opt)
        found += [opt.state[p][key].sum() for p in job.params for key in opt.state[p]]
        for state in opt.state.values():
            state.get("exp_avg_sq", state.get("sum")).mul_(2.0)
        found += job.train(opt)
    return found


def slow_claim_a_fresh_optimizer_has_whole_state_once_it_is_loaded() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    for plan in ("tp2", "pp2", "zero3"):
        job = Job(plan)
        opt, fresh = adamw(job.params), adamw(job.params)
        job.train(opt, 1)
        job.model.save(folder[0], opt)
        job.model.load(folder[0], fresh)
        assert fresh.state.keys() == opt.state.keys() == set(job.params), plan
        got, want = (
            [state[k] for state in o.state_dict()["state"].values() for k in sorted(state)]
            for o in (fresh, opt)
        )
        assert not difference(values_of(got), values_of(want)), plan
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def claim_what_cannot_be_right_is_refused() -> None:
    for plan in ("tp2", "pp2"):
        job = Job(plan)
        param = next(p for p in job.params if type(p) is ShardedParameter)
        with pytest.raises(RuntimeError, match="out="):  # as torch says
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
    opt = adamw(job.params)
    job.backward()
    opt.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        opt.step()
    job.loss()
    assert sum(p.numel() for p in job.params) == sum(p.numel() for p in Job("").params)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

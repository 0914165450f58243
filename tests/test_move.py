"""Moving to another plan between two steps is what saving and loading under it would have done."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar_torch as ap
import oracle
import zoo
from autopar_torch.errors import AutoparError
from autopar_torch.measure.bytes import TensorBytes
from autopar_torch.plan import Replica, Stage
from autopar_torch.run import stored
from ranks import run_ranks
from slow import slowly

CHAINS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"tp2": {"tp": 2}, "pp2": {"pp": 2, "num_micro_batches": 2}, "dp2": {"dp": 2},
        "zero1": {"dp": 2, "zero": 1}, "zero3": {"dp": 2, "zero": 3}, "one": {}},
    4: {"tp2pp2": {"tp": 2, "pp": 2, "num_micro_batches": 2}, "zero2": {"dp": 4, "zero": 2},
        "tp4": {"tp": 4}, "pp2dp2": {"pp": 2, "dp": 2, "num_micro_batches": 2}},
}
UNEVEN = ap.Plan((Replica((Stage((0, 1)),)), Replica((Stage((2,)), Stage((3,))), 2)))
class Heavy(torch.optim.Optimizer):
    """Momentum by hand, in tensors that know nothing of parts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            kept = self.state[p].setdefault("momentum", torch.zeros(tuple(p.shape)))
            kept.mul_(0.9).add_(torch.cat([p.grad.flatten()]).view(p.shape))
            p.sub_(kept * 1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": oracle.optimizer,
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def plans(size: int) -> dict[str, ap.Plan]:
    made = {name: ap.Plan.uniform(**degrees) for name, degrees in CHAINS[size].items()}
    return made if size < 4 else {**made, "tp2|pp2": UNEVEN}


def _start(name: str, plan: ap.Plan, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    model = ap.parallelize(zoo.build(name, 0), zoo.batch(name, 8), plan=plan)
    return model, OPTIMIZERS[kind](model.parameters())


def _backward(model: Any, name: str, seed: int) -> float:
    loss = oracle.loss_of(model(**zoo.batch(name, 8, seed)))
    loss.backward()
    return loss.item()


def _step(model: Any, opt: torch.optim.Optimizer, name: str, seed: int) -> float:
    loss = _backward(model, name, seed)
    opt.step()
    opt.zero_grad()
    return loss


def _contents(folder: str) -> dict[str, torch.Tensor]:
    saved = stored.Checkpoint(Path(folder), stored.read(Path(folder)))
    return {name: saved.whole(name) for name in saved.manifest.tensors}


def chain(name: str, kind: str, size: int, root: str) -> list[str]:
    """Move through all plans; names what was not as after save and load."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    able = [(title, plan) for title, plan in plans(size).items()
            if name != "resnet" or plan.num_micro_batches == len(plan.replicas)]  # BatchNorm
    wrong, (first, *others) = [], able
    model, opt = _start(name, first[1], kind)
    kept = {n: id(p) for n, p in model.named_parameters()}
    _step(model, opt, name, 1)
    for number, (title, plan) in enumerate([*others, first]):
        folder, then = f"{root}/{number}", f"{root}/{number}-moved"
        model.save(folder, opt)
        model.move(plan)
        model.save(then, opt)
        before, after = _contents(folder), _contents(then)
        wrong += [f"{title}: {n}" for n in before if not torch.equal(before[n], after[n])]
        other, other_opt = _start(name, plan, kind)
        other.load(folder, other_opt)
        here, there = ([_step(m, o, name, seed) for seed in (2, 3)]
                       for m, o in ((model, opt), (other, other_opt)))
        wrong += [f"{title}: losses {here} {there}"] if here != there else []
    wrong += ["other objects"] if kept != {n: id(p) for n, p in model.named_parameters()} else []
    return wrong


@pytest.mark.parametrize(("name", "kind"), [
    ("resnet", "momentum"), *slowly(("gpt2", "adamw"), ("nanogpt", "adafactor"))])
def test_a_move_is_bit_for_bit_a_checkpoint_saved_and_loaded(
        name: str, kind: str, tmp_path: Path) -> None:
    for found in run_ranks(2, "test_move:chain", name, kind, 2, str(tmp_path)):
        assert found == []


@pytest.mark.slow
def test_a_move_between_four_ranks_and_uneven_plans_is_too(tmp_path: Path) -> None:
    for found in run_ranks(4, "test_move:chain", "gpt2", "adamw", 4, str(tmp_path)):
        assert found == []


def many(num_rounds: int) -> list[tuple[int, int, int]]:
    """(process groups, bytes of tensors, threads) after each round of moves through all plans."""
    torch.set_num_threads(1)
    found = []
    with TensorBytes() as count:
        model, opt = _start("gpt2", ap.Plan.uniform(tp=4), "adamw")
        for seed in range(num_rounds):
            for plan in plans(4).values():
                model.move(plan)
                _step(model, opt, "gpt2", seed)
            gc.collect()
            groups = len(torch.distributed.distributed_c10d._world.pg_map)
            found.append((groups, int(count.at(count.mark())), threading.active_count()))
    return found


@pytest.mark.slow
def test_after_25_moves_there_are_no_more_groups_bytes_or_threads_than_after_5() -> None:
    for first, *others in run_ranks(4, "test_move:many", 5):
        assert others == [first] * 4


def by_hand() -> list[list[float]]:
    """Losses without a move, and with one between every two steps."""
    torch.set_num_threads(1)
    runs = []
    for moves in (False, True):
        model, _ = _start("gpt2", ap.Plan.uniform(tp=2), "adamw")
        opt, losses = Heavy(model.parameters()), []
        for seed, title in enumerate(("tp2", "tp2", "zero3", "pp2", "zero1")):
            if moves and seed:
                model.move(plans(2)[title])
            losses.append(_step(model, opt, "gpt2", seed))
        runs.append(losses)
    return runs


@pytest.mark.slow
def test_state_that_is_whole_on_every_rank_stays_whole() -> None:
    for plain, moved in run_ranks(2, "test_move:by_hand"):
        assert moved == pytest.approx(plain, rel=1e-5)


def gradients(size: int) -> list[str]:
    """A move between backward and step: gradients come along, and clipping sees all of them."""
    torch.set_num_threads(1)
    found = []
    for target in ("zero3", "pp2"):
        runs = []
        for moves in (False, True):
            model, opt = _start("gpt2", ap.Plan.uniform(tp=2), "adamw")
            _step(model, opt, "gpt2", 1)
            _backward(model, "gpt2", 2)
            if moves:
                model.move(plans(size)[target])
            norm = float(model.clip_grad_norm_(0.1))
            opt.step()
            opt.zero_grad()
            runs.append([norm, _step(model, opt, "gpt2", 3)])
        if not torch.allclose(*map(torch.tensor, runs), rtol=1e-5, atol=0.0):
            found.append(f"{target}: {runs}")
    return found


@pytest.mark.slow
def test_gradients_move_too() -> None:
    for found in run_ranks(2, "test_move:gradients", 2):
        assert found == []


def refusals() -> list[str]:
    model, opt = _start("gpt2", ap.Plan.uniform(tp=2), "adamw")
    loss, said = _step(model, opt, "gpt2", 1), []
    for plan in (ap.Plan.uniform(tp=2, precision="bfloat16"), ap.Plan.uniform(tp=4), "nowhere"):
        try:
            model.move(plan)
        except AutoparError as error:
            said.append(str(error))
    other, other_opt = _start("gpt2", ap.Plan.uniform(tp=2), "adamw")
    same = [_step(other, other_opt, "gpt2", 1), _step(other, other_opt, "gpt2", 2)]
    return [*said, str([loss, _step(model, opt, "gpt2", 2)] == same)]


def test_what_cannot_be_moved_to_is_refused_and_training_goes_on() -> None:
    for precision, size, path, same in run_ranks(2, "test_move:refusals"):
        assert "precision is bfloat16" in precision
        assert "4 devices" in size
        assert "nowhere" in path
        assert same == "True"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def peaks() -> list[tuple[float, float]]:
    """(peak as predicted, as counted) of moves in both directions."""
    torch.set_num_threads(1)
    found = []
    x = torch.randn(8, 256)
    for first, then in ((ap.Plan.uniform(dp=2), ap.Plan.uniform(tp=2)),
                        (ap.Plan.uniform(tp=2), ap.Plan.uniform(dp=2)),
                        (ap.Plan.uniform(pp=2, num_micro_batches=2), ap.Plan.uniform(tp=2))):
        with TensorBytes() as count:
            model = ap.parallelize(Wide(), x, plan=first)
            opt = torch.optim.AdamW(model.parameters())
            model(x).backward()
            opt.step()
            opt.zero_grad()
            start = count.mark()
            moved = model.move(then)
            end = count.mark()
            del model, opt
            gc.collect()
        found.append((count.at(start) + moved.more_bytes, count.peak(start, end)))
    return found


@pytest.mark.slow
def test_a_move_needs_the_memory_that_it_says() -> None:
    for rank in run_ranks(2, "test_move:peaks"):
        for predicted, counted in rank:
            assert predicted == pytest.approx(counted, rel=0.05), rank


def _state_norms(opt: torch.optim.Optimizer) -> list[float]:
    """Of what `state_dict()` has: whole tensors."""
    return [float(value.double().norm()) for own in opt.state_dict()["state"].values()
            for key, value in sorted(own.items())]


def oddities() -> dict[str, Any]:
    """What ordinary scripts have besides: frozen parameters, hooks, averages, a scheduler, a loss
    made outside of the model."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {"numbers": [], "pending": []}
    x, y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    for moves in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 4))
        net[2].bias.requires_grad_(False)
        seen: list[float] = []
        model = ap.parallelize(net, x, plan=ap.Plan.uniform(tp=2))
        net[0].weight.register_hook(lambda grad, seen=seen: seen.append(float(grad.norm())))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        average = torch.optim.swa_utils.AveragedModel(model)
        losses = []
        for step in range(4):
            if moves and step:
                model.move(ap.Plan.uniform(**[{"pp": 2, "num_micro_batches": 2},
                                              {"dp": 2, "zero": 1}, {"dp": 2}][step - 1]))
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
            average.update_parameters(model)
            losses.append(loss.item())
            losses += _state_norms(opt)
        means = [float(p.detach().norm()) for p in average.parameters()]
        found["numbers"].append([*losses, *means, *seen, *_state_norms(opt)])
    pending = nn.functional.cross_entropy(model(x), y)
    model.move(ap.Plan.uniform(dp=2))
    try:
        pending.backward()
        found["pending"] = ["it ran"]
    except AutoparError as error:
        found["pending"] = [str(error)]
    model, _ = _start("gpt2", ap.Plan.uniform(tp=2), "adamw")
    loss = oracle.loss_of(model(**zoo.batch("gpt2", 8)))
    model.move(ap.Plan.uniform(dp=2, zero=1))
    try:
        loss.backward()
        found["pending"] += ["it ran"]
    except AutoparError as error:
        found["pending"] += [str(error)]
    return found


@pytest.mark.slow
def test_hooks_averages_and_schedulers_live_through_moves() -> None:
    for found in run_ranks(2, "test_move:oddities"):
        plain, moved = found["numbers"]
        assert moved == pytest.approx(plain, rel=1e-5)
        assert ["changed between forward" in said for said in found["pending"]] == [True, True]

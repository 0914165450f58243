"""Random numbers: those of one process, on any number of ranks."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import autopar_torch as ap
import claims
from autopar_torch.run.agree import checksum
from texts import (
    DP2,
    PLANS,
    PP2,
    TP2,
    Masked,
    Text,
    Untraced,
    everyone,
    learner,
    parallelized,
    same,
    states,
    windows,
)


def _train_on_windows(model: Any) -> tuple[list[float], list[int]]:
    torch.manual_seed(1337)
    step, batches = learner(model), [windows() for _ in range(5)]
    return [step(**batch) for batch in batches], [checksum(batch["idx"]) for batch in batches]


def _epochs(model: Any) -> tuple[list[float], list[int]]:
    """A loop with a shuffling loader, an odd last batch, and eval between the epochs."""
    torch.manual_seed(3)
    rows = torch.randint(61, (27, 17))
    loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=8, shuffle=True)
    step, losses, batches = learner(model), list[float](), list[int]()
    for _ in range(3):
        model.train()
        for idx, targets in loader:
            losses.append(step(idx=idx, targets=targets))
            batches.append(checksum(idx))
        model.eval()
        with torch.no_grad():
            losses += [model(idx=idx, targets=targets).item() for idx, targets in loader]
    return losses, batches


def _off(got: list[float], want: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))


def _draw_as_one_process(script: Callable[[Any], tuple[list[float], list[int]]]) -> None:
    want, expected = script(Text(0.0))
    for degrees in PLANS:
        losses, batches = script(parallelized(Text(0.0), degrees))
        assert batches == expected and _off(losses, want) <= 1e-6, (degrees, losses, want)
        losses, batches = script(parallelized(Text(0.1), degrees))
        assert batches == expected and same(losses), degrees
        assert 1e-5 < _off(losses, want) < 0.1, (degrees, losses, want)


def slow_claim_randomwindows_are_the_same_on_all_ranks() -> None:
    _draw_as_one_process(_train_on_windows)


def slow_claim_shuffled_epochs_are_those_of_one_process() -> None:
    _draw_as_one_process(_epochs)


def slow_claim_generators_stay_the_users() -> None:
    batch = {"idx": torch.arange(64).view(4, 16) % 61, "targets": torch.ones(4, 16).long()}
    for kind, degrees in ((Text, DP2), (Text, PP2), (Text, TP2), (Untraced, DP2)):
        module, before = kind(0.1), states()
        model = parallelized(module, degrees)
        for train in (True, True, False, True):
            model.train(train)
            loss = model(**batch)
            if train:
                loss.backward()
        if kind is Untraced:  # forward draws as Python, on all ranks alike
            assert same(states())
        else:
            assert states() == before, degrees


def claim_dropout_is_drawn_by_step_replica_and_part() -> None:
    x = torch.ones(8, 64)
    for degrees in (TP2, DP2, {"dp": 2, "num_micro_batches": 2, "recompute": True}):
        model = parallelized(Masked(), degrees, outputs=("y",), guards={"drift_every": 1})
        seen = []
        for _ in range(4):
            out = model(x=x)
            out.loss.backward()
            if degrees is not TP2:  # backward, which may compute again, sees the same numbers
                gradient = model.module.weight.grad
                assert torch.allclose(gradient, out.y.sum(0) / out.y.numel()), degrees
            model.zero_grad()
            seen.append(out.y)
            assert same(out.y.tolist()), degrees
        masks = torch.stack(seen) > 0
        assert abs(float(torch.stack(seen).mean()) - 1.0) < 0.1, degrees
        half = (32, 1) if degrees is TP2 else (4, 0)
        halves = [part for mask in masks[:2] for part in mask.split(*half)]
        for i, a in enumerate(halves):
            for b in halves[:i]:
                assert 0.3 < float((a == b).float().mean()) < 0.7, degrees


def claim_a_model_and_its_copy_draw_numbers_of_their_own() -> None:
    x = torch.ones(8, 64)
    for kind in (Masked, Untraced):
        student = parallelized(kind(0.5), DP2) if kind is Untraced else parallelized(
            kind(), DP2, outputs=("y",))
        call = (lambda m: m(**windows()) and m.module.mask) if kind is Untraced else (
            lambda m: m(x=x).y)
        call(student)
        teacher = copy.deepcopy(student)
        assert not torch.equal(call(student), call(teacher)), kind


def claim_numbers_go_on_from_a_saved_state() -> None:
    x = torch.ones(8, 64)
    model = parallelized(Masked(), DP2, outputs=("y",))
    model(x=x)
    state = model.numbers.state()
    first = model(x=x).y
    other = parallelized(Masked(), DP2, outputs=("y",))
    other(x=x)
    other.numbers.load(state)
    assert torch.equal(other(x=x).y, first)
    assert not torch.equal(other(x=x).y, first)


def claim_numbers_go_on_from_a_checkpoint() -> None:
    x, folders = torch.ones(8, 64), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    model = parallelized(Masked(), DP2, outputs=("y",))
    model(x=x)
    model.save(folders[0], torch.optim.SGD(model.parameters()))
    first = model(x=x).y
    other = parallelized(Masked(), DP2, outputs=("y",))
    other.load(folders[0], torch.optim.SGD(other.parameters()))
    assert torch.equal(other(x=x).y, first)


def claim_untraced_numbers_are_shared_but_dropout_is_not() -> None:
    model = parallelized(Untraced(0.1), DP2)
    torch.manual_seed(5)
    drawn = []
    for _ in range(4):
        model(**windows()).backward()
        drawn.append((model.module.drawn, *model.module.seen))
        masks = torch.tensor(everyone(model.module.mask.tolist()))
        assert 0.2 < float((masks[0] == masks[1]).float().mean()) < 0.8
        assert torch.allclose(model.module.weight.grad, masks.mean(0) / 64)
        model.zero_grad()
    assert same(drawn) and len({d for step in drawn for d in step}) == 12, drawn


def test_one_process_draws_what_plain_pytorch_draws() -> None:
    plain, model = Text(0.1), ap.parallelize(Text(0.1))
    want, _ = _train_on_windows(plain)
    losses, _ = _train_on_windows(model)
    assert _off(losses, want) <= 1e-6


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

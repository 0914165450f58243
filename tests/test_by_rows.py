"""The logits of a language model are never there at once, and nothing else changes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
from autopar_torch.measure.bytes import TensorBytes
from autopar_torch.shard import by_rows
from autopar_torch.simulate import simulate
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))
from clock.accuracy import Side, pin, session_for

WIDTH, VOCAB, SEQ, ROWS = 16, 256, 96, 4
TOLERANCE = 1e-6  # of gradients, of the largest of a parameter
Tail = Callable[["Model", Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small losses go in pieces, too."""
    monkeypatch.setattr(by_rows, "LEAST_ROWS", 32)
    monkeypatch.setattr(by_rows, "LEAST_LOGITS", 0)


class Model(nn.Module):
    def __init__(self, tail: Tail, vocab: int = VOCAB, width: int = WIDTH, bias: bool = False,
                 layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=bias)
        self.scales = torch.linspace(0.5, 1.5, vocab)
        self.tail = tail

    def hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.tail(self, self.hidden(ids), labels)


def plain(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def shifted(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1),
                           ignore_index=3)


def padded(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    logits = model.head(x)
    return F.cross_entropy(logits.view(-1, VOCAB), labels, ignore_index=-100, reduction="sum") / 7


def capped(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = 5.0 * torch.tanh(model.head(x) / 5.0)
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def weighed(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x.flatten(0, 1)), labels.flatten(), model.scales,
                           label_smoothing=0.1)


def tied(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    logits = x @ model.embed.weight.t()
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) + 0.0 * model.head.weight.sum()


def frozen(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, model.head.weight.detach()).view(-1, VOCAB),
                           labels.view(-1)) + 0.0 * model.head.weight.sum()


def half(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(x)
    return F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))


TAILS: list[Tail] = [plain, shifted, padded, capped, weighed, tied, frozen, half]


def batch_of(vocab: int = VOCAB, rows: int = ROWS, seq: int = SEQ) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (rows, seq), generator=draw)
    labels = torch.randint(vocab, (rows, seq), generator=draw)
    labels[0, seq // 4 :] = 3
    return {"ids": ids, "labels": labels}


def compared(model: Model, plan: ap.Plan) -> tuple[float, str]:
    """The worst relative difference of loss and gradients from plain PyTorch's in float64, and the
    code that ran."""
    want = copy.deepcopy(model) if model.tail is half else copy.deepcopy(model).double()
    want.scales = want.scales.to(want.head.weight.dtype)
    wanted = want(**batch_of())
    wanted.backward()
    parallel = ap.parallelize(model, plan=plan)
    for _ in range(2):  # the second adds to gradients of the first
        loss = parallel(**batch_of())
        loss.backward()
    worst = abs(float(loss.detach()) / float(wanted.detach()) - 1)
    for own, other in zip(parallel.parameters(), want.parameters(), strict=True):
        whole = own.full_tensor() if hasattr(own, "full_tensor") else own
        assert whole.grad is not None and other.grad is not None
        top = float(other.grad.abs().max()) or 1.0
        worst = max(worst, float((whole.grad.double() / 2 - other.grad).abs().max()) / top)
    return worst, parallel.explain("")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_losses_and_gradients_by_rows_are_those_of_plain_pytorch(
    tail: Tail, recompute: bool
) -> None:
    model = Model(tail, bias=tail in (plain, capped))
    plan = ap.Plan.uniform(num_micro_batches=2, recompute=recompute)
    worst, code = compared(model, plan)
    assert "loss_by_rows" in code
    assert worst < (5e-3 if tail is half else TOLERANCE)


def peak_of_step(**degrees: Any) -> int:
    batch = batch_of(seq=512)
    model = ap.parallelize(Model(plain), plan=ap.Plan.uniform(**degrees))
    model(**batch).backward()
    with TensorBytes() as count:
        start = count.mark()
        model(**batch).backward()
        end = count.mark()
    return count.peak(start, end)


def test_the_peak_has_no_logits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_bytes = 4 * ROWS * 512 * VOCAB
    assert max(peak_of_step(), peak_of_step(recompute=True)) < logits_bytes
    monkeypatch.setattr(by_rows, "LEAST_LOGITS", 10**12)
    assert peak_of_step() > logits_bytes


def test_logits_that_are_returned_are_there() -> None:
    class Both(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = self.head(self.hidden(ids))
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
                    "logits": logits}

    model = Both(plain)
    want = copy.deepcopy(model)(**batch_of())
    parallel = ap.parallelize(model, plan=ap.Plan.uniform(num_micro_batches=2), outputs=("logits",))
    found = parallel(**batch_of())
    torch.testing.assert_close(found["logits"], want["logits"])
    torch.testing.assert_close(found["loss"], want["loss"], check_dtype=False)
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(**batch_of())["loss"], want["loss"],
                                   check_dtype=False)


def on_ranks(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[float, bool]]:
    """On a rank: for each way to train, the worst difference, and whether it went by rows."""
    by_rows.LEAST_ROWS, by_rows.LEAST_LOGITS = 16, 0
    torch.set_num_threads(1)
    found = []
    for name, degrees in cases:
        tail = next(tail for tail in TAILS if tail.__name__ == name)
        worst, code = compared(Model(tail), ap.Plan.uniform(**degrees))
        found.append((worst, "loss_by_rows" in code))
    return found


CASES: list[tuple[str, dict[str, Any]]] = [
    ("shifted", {"tp": 2}), ("capped", {"tp": 2, "recompute": True}),
    ("tied", {"tp": 2, "num_micro_batches": 2}),
    ("padded", {"pp": 2, "num_micro_batches": 4}),
    ("tied", {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"}),
    ("plain", {"pp": 2, "num_micro_batches": 2, "schedule": "zero_bubble", "recompute": True}),
    ("capped", {"dp": 2, "zero": 2}), ("shifted", {"dp": 2, "zero": 3, "num_micro_batches": 2}),
    ("plain", {"dp": 2, "zero": 3, "recompute": True}),
]


def test_by_rows_two_ranks_train_as_one() -> None:
    for rank, found in enumerate(run_ranks(2, "test_by_rows:on_ranks", CASES)):
        for case, (worst, went) in zip(CASES, found, strict=True):
            assert worst < TOLERANCE, case
            last = case[1].get("pp", 1) == 1 or rank == 1
            assert went == last, case


PLANS: list[dict[str, Any]] = [
    {"pp": 2, "num_micro_batches": 2}, {"tp": 2}, {"dp": 2, "num_micro_batches": 2},
    {"tp": 2, "recompute": True}, {"pp": 2, "num_micro_batches": 4, "schedule": "zero_bubble"},
    {"pp": 2, "num_micro_batches": 2, "schedule": "gpipe"},
]


def counted() -> list[tuple[float, float]]:
    """On a rank: (predicted, measured) bytes of every plan."""
    by_rows.LEAST_ROWS, by_rows.LEAST_LOGITS = 128, 0
    pin()
    torch.set_num_threads(1)

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        return Model(plain, 4096, 64), batch_of(4096, seq=512)

    sides = {str(plan): Side(make, plan) for plan in PLANS}
    for side in sides.values():
        side.step()
        assert "cross_entropy" not in side.model.explain("")
    session = session_for(sides)
    session.round()
    profile, rank = session.profile(), dist.get_rank()
    return [(float(simulate(s.model.plan, s.model.graph, profile, ROWS).memory[rank].peak_bytes),
             float(s.peak_bytes())) for s in sides.values()]


@pytest.mark.slow
def test_predicted_bytes_of_losses_by_rows_are_those_of_the_process() -> None:
    _, last = run_ranks(2, "test_by_rows:counted")
    print(last)
    for plan, (predicted, measured) in zip(PLANS, last, strict=True):
        assert 0.95 < predicted / measured < 1.05, plan

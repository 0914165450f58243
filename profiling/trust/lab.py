"""What the cases of table.py share: how a case is declared, `wrap`, two small models, and batches.

A case is a script of some lines, as a user would write it, and returns the numbers that must agree.
It runs once in plain PyTorch, where `wrap` gives the model back as it is, and then on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trust import gpus

TOLERANCE, EXACT = 1e-5, 1e-6
SMALL = 1e-2  # below this a difference counts as it is, not as a part of the value
GUARDS = {"timeout_s": 10}
LEARNING_RATE = 0.05
AUTO = {"auto": True}  # in place of degrees: the plan is searched for

Run = Callable[["Wrap"], Any]
Found = TypeVar("Found", bound=Run)


@dataclass(frozen=True)
class Case:
    """One script; `refuse`: there is no right answer on several ranks, so it must be refused;
    `right`: it was right, or is a goal, so a refusal does not do."""

    name: str
    group: str
    run: Run
    refuse: bool = False
    right: bool = False
    tolerance: float = TOLERANCE


CASES: dict[str, Case] = {}


def case(
    *, refuse: bool = False, right: bool = False, tolerance: float = TOLERANCE
) -> Callable[[Found], Found]:
    """Declares a case; its group is the file it stands in."""

    def declare(run: Found) -> Found:
        group = run.__module__.rpartition(".")[2]
        CASES[run.__name__] = Case(run.__name__, group, run, refuse, right, tolerance)
        return run

    return declare


@dataclass
class Wrap:
    """`model = wrap(model)` is the line of the library, or nothing: then this is the oracle."""

    degrees: dict[str, Any] | None
    rank: int
    size: int
    folder: Path
    said: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # what a script tells beside its numbers

    def __call__(self, model: nn.Module, precision: str = "float32", **options: Any) -> Any:
        if self.degrees is None:
            return _plain(model, precision, options.get("loss_fn"))
        import autopar_torch as ap

        if self.degrees == AUTO:
            options = {"constraints": {"precision": precision}} | options
        else:
            options["plan"] = ap.Plan.uniform(**self.degrees, precision=precision)
        return ap.parallelize(model, **({"guards": GUARDS, "compile": False} | options))

    @property
    def is_library(self) -> bool:
        return self.degrees is not None

    def listen(self) -> None:
        """Keep what the library logs from here on."""
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("autopar_torch").addHandler(handler)

    def heard(self, word: str) -> bool:
        """Whether rank 0 was told so; always, where there is no library."""
        return (
            not self.is_library or self.rank > 0 or any(word in line.lower() for line in self.said)
        )


class _WithLoss(nn.Module):
    """What `loss_fn` and `target=` mean in one process."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *args: Any, target: Any, **kwargs: Any) -> Any:
        return self.loss_fn(self.model(*args, **kwargs), target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)


def _plain(model: nn.Module, precision: str, loss_fn: Any) -> nn.Module:
    whole = _WithLoss(model, loss_fn) if loss_fn else model
    if precision == "bfloat16":
        whole.forward = torch.autocast(gpus.device().type, torch.bfloat16)(whole.forward)  # type: ignore[method-assign]
    return whole


# --- models ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.out(F.gelu(self.fc(self.norm(x)))))


class Net(nn.Module):
    """A classifier of rows of 16 numbers into 8 classes."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(16, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(4)])

    def features(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(x)), y)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm(x)).split(w, dim=2)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(b, s, w))


class Gpt(nn.Module):
    """As nanoGPT: `logits, loss = model(idx, targets)`, a tied head, a config."""

    def __init__(self, vocab: int = 64, width: int = 32, layers: int = 2, seq: int = 32) -> None:
        super().__init__()
        self.config = {"vocab_size": vocab, "n_embd": width, "block_size": seq}
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        pairs = [nn.Sequential(Attention(width, 4), Block(width)) for _ in range(layers)]
        self.blocks, self.norm = nn.ModuleList(pairs), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.tok.weight = self.head.weight

    def logits(self, idx: Tensor) -> Tensor:
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        logits = self.logits(idx)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class GptLoss(Gpt):
    """The same, with the loss alone."""

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        return super().forward(idx, targets)[1]


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def gpt(loss_alone: bool = True, **options: Any) -> Gpt:
    torch.manual_seed(0)
    return (GptLoss if loss_alone else Gpt)(**options)


# --- batches and the loop ---------------------------------------------------------------------


def rows(num_rows: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 16, generator=draw)
    return x, torch.randint(8, (num_rows,), generator=draw)


def tokens(num_rows: int = 4, seq: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (num_rows, seq + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def batches(num: int = 3, num_rows: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    return (rows(num_rows, seed) for seed in range(1, num + 1))


def sgd(model: nn.Module, lr: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(
    model: Any,
    data: Iterable[tuple[Tensor, ...]] | None = None,
    opt: torch.optim.Optimizer | None = None,
) -> list[float]:
    """The usual loop; the losses."""
    opt, losses = opt or sgd(model), []
    for batch in batches() if data is None else data:
        opt.zero_grad()
        loss = model(*batch)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- comparing --------------------------------------------------------------------------------


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every number of a result under a name of its own."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return {name: whole.detach().cpu().double() if isinstance(whole, Tensor) else whole}
    return {key: one for k, v in items for key, one in flat(v, f"{name}.{k}").items()}


def difference(got: dict[str, Any], want: dict[str, Any]) -> tuple[float, str]:
    """The worst relative difference, and where it is."""
    if got.keys() != want.keys():
        return float("inf"), f"other names: {sorted(got.keys() ^ want.keys())[0]}"
    found = {name: _apart(got[name], want[name]) for name in want}
    worst = max(found, key=found.__getitem__, default="")
    return found.get(worst, float("inf")), worst.lstrip(".")


def _apart(got: Any, want: Any) -> float:
    if isinstance(want, (str, bool)) or isinstance(got, str) or got is None or want is None:
        return 0.0 if got == want else float("inf")
    a, b = torch.as_tensor(got).double(), torch.as_tensor(want).double()
    if a.shape != b.shape:
        return float("inf")
    if not b.numel() or bool((a.isnan() & b.isnan()).all()):
        return 0.0
    apart = float((a - b).abs().max()) / max(SMALL, float(b.abs().max()))
    return float("inf") if apart != apart else apart

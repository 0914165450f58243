"""Claims about sequences that come first: the rows of the batch are where `batch_dim` says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar_torch as ap
import claims
from autopar_torch.errors import TraceError
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart

WORDS, WIDTH, LENGTH, NUM_ROWS = 30, 8, 6, 4
PLANS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2, "num_micro_batches": 2}}


class Words(nn.Module):
    """A language model over (length, rows), with a causal mask without rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        x = self.embed(ids) * scale[:, None]
        return self.head(self.layers(x, mask=mask)).view(-1, WORDS)


class Recurrent(Words):
    """The same with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        x, _ = self.layers(self.embed(ids) * scale[:, None])
        return self.head(x).view(-1, WORDS)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.view(-1, WORDS), target.view(-1))


def batch() -> tuple[tuple[Tensor, ...], Tensor]:
    """Ids (length, rows), a mask (length, length), a number for each row; targets."""
    draw = torch.Generator().manual_seed(1)
    ids, target = torch.randint(WORDS, (2, LENGTH, NUM_ROWS), generator=draw)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return (ids, mask, torch.rand(NUM_ROWS, generator=draw)), target


def _trains(plain: nn.Module, options: dict[str, Any], outside: bool = False) -> None:
    """One step is that of plain PyTorch, and the output comes back as the model returns it."""
    inputs, target = batch()
    model = ap.parallelize(copy.deepcopy(plain), plan=ap.Plan.uniform(**options),
                           loss_fn=None if outside else loss_of, batch_dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model(*inputs), target) if outside else model(*inputs, target=target)
    want = loss_of(plain(*inputs), target)
    loss.backward()
    optimizer.step()
    want.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert not model.fallback_reason
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(dict(model.state_dict()), plain.state_dict(), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*inputs), plain.eval()(*inputs), rtol=1e-4,
                                   atol=1e-5)


def claim_sequences_first_train_in_replicas() -> None:
    _trains(Words(), PLANS["dp2"])


def claim_sequences_first_train_in_a_tensor_group() -> None:
    _trains(Words(), PLANS["tp2"])


def slow_claim_sequences_first_train_in_a_pipeline() -> None:
    _trains(Words(), PLANS["pp2"])


def claim_recurrent_sequences_first_train_in_a_tensor_group() -> None:
    _trains(Recurrent(), PLANS["tp2"])


def slow_claim_recurrent_sequences_first_train_in_replicas_with_the_loss_outside() -> None:
    _trains(Recurrent(), PLANS["dp2"], outside=True)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


def test_a_loop_over_the_rows_ends_at_once_and_names_the_way_out() -> None:
    (ids, mask, _), target = batch()
    call, _ = take_apart((ids, mask, torch.ones(1)), {"target": target})
    with pytest.raises(TraceError, match=r"(?s)row by row.*batch_dim=1"):
        trace(Recurrent(), call, loss_fn=loss_of)

"""Claims about torch's own encoders: in evaluation they leave out what is padded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar_torch as ap
import claims

PLANS = {"tp2": ap.Plan.uniform(tp=2), "pp2": ap.Plan.uniform(pp=2), "dp2": ap.Plan.uniform(dp=2)}
LENGTHS = {"at the end": (5, 3, 2, 5), "none": (5, 5, 5, 5)}


class Encoder(nn.Module):
    def __init__(self, norm: bool, fast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if norm else None,
                                            enable_nested_tensor=fast)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.table(x), src_key_padding_mask=x == 0)


def _batches() -> dict[str, Tensor]:
    tokens = 1 + torch.arange(20).view(4, 5) % 8
    found = {name: tokens.masked_fill(torch.arange(5) >= torch.tensor(lengths)[:, None], 0)
             for name, lengths in LENGTHS.items()}
    return {**found, "in front": found["at the end"].flip(1),
            "in one row": torch.cat([tokens[:3], tokens[3:].index_fill(1, torch.tensor([1]), 0)])}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def claim_what_is_padded_is_as_in_one_process() -> None:
    for norm, fast in (True, True), (False, True), (True, False):
        plain = Encoder(norm, fast).double()
        for name, plan in PLANS.items():
            model = ap.parallelize(copy.deepcopy(plain), plan=plan)
            model(_batches()["none"]).mean().backward()
            with torch.no_grad():
                for where, x in _batches().items():
                    for own in (plain, model):
                        own.eval()
                    torch.testing.assert_close(model(x), plain(x), msg=f"{where} {name} {norm}")


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

"""Claims about the prologue of a step: computed when it is needed, shared, and gone afterwards."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar_torch as ap
from autopar_torch.run.prologue import Prologue
from test_attention import SEQ, VOCAB, build

ROWS = 8


def padded() -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(SEQ - ROWS, SEQ)[:, None]
    return {"input_ids": ids, "labels": ids.clone(),
            "attention_mask": (torch.arange(SEQ) < lengths).long()}


class Watch:
    """Looks on while the prologue runs: which masks live, and what the micro-batches share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[weakref.ref[Tensor]] = []
        self.shared: list[set[int]] = []
        self.most = self.num_whole = 0
        rows, batch = Prologue.for_rows, Prologue.for_batch

        def for_rows(own: Prologue, *args: Any) -> dict[str, Any]:
            made = rows(own, *args)
            tables = [made[name] for name in own.whole]
            self.shared.append({value.untyped_storage().data_ptr() for value in tables})
            self.masks += [weakref.ref(made[name]) for name in own.rowful
                           if made[name].shape[-2:] == (SEQ, SEQ)]
            self.most = max(self.most, self.alive())
            return made

        def for_batch(*args: Any) -> dict[str, Any]:
            self.num_whole += 1
            return batch(*args)

        monkeypatch.setattr(Prologue, "for_rows", for_rows)
        monkeypatch.setattr(Prologue, "for_batch", for_batch)

    def alive(self) -> int:
        return sum(mask() is not None for mask in self.masks)

    def step(self, parts: int) -> None:
        model = ap.parallelize(build("llama"), plan=ap.Plan.uniform(num_micro_batches=parts))
        loss = model(**padded()).loss
        assert self.alive() == 0  # the backwards have run: nothing is left of any micro-batch
        loss.backward()


@pytest.mark.parametrize("parts", [2, 8])
def test_masks_of_a_micro_batch_are_gone_when_its_backward_has_run(
        parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.step(parts)
    assert (len(watch.masks), watch.most) == (parts, 1)


def test_what_does_not_depend_on_rows_is_computed_once_and_shared(
        monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.step(4)
    assert watch.num_whole == 1
    first, *others = watch.shared
    assert len(watch.shared) == 4 and first and all(other == first for other in others)

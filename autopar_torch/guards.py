"""Guards: what is watched while training, and how closely. Each may be turned off."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Guards(Struct, frozen=True, forbid_unknown_fields=True):
    """`parallelize(model, guards={"nan": False})` leaves one out."""

    batches: bool = True  # all ranks have one batch: shapes every step, values now and then
    nan: bool = True  # a loss that is no number is named at its step
    first_step: bool = True  # its outputs are those of the module in one process
    # Steps between looks for replicas that differ.
    drift_every: Annotated[int, Meta(ge=0, le=2**31)] = 100
    # A rank that stands still so long is named.
    timeout_s: Annotated[float, Meta(gt=0, le=1e7)] = 60.0

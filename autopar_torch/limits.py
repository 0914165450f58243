"""What numbers of nouns may be: wide enough for any machine, and no wider.

Files are checked against these when they are read, and so is what is given in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from .errors import NounError

Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Latency = Annotated[float, Meta(ge=0.0, le=10.0)]
Delta = Annotated[float, Meta(ge=-1e9, le=1e9)]  # seconds more or less than something else
Rate = Annotated[float, Meta(ge=1.0, le=1e19)]  # FLOPs per second
ByteRate = Annotated[float, Meta(ge=1.0, le=1e15)]  # bytes per second
Fraction = Annotated[float, Meta(ge=1e-4, le=1.0)]  # a part of a peak
Factor = Annotated[float, Meta(ge=0.0, le=1e6)]
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]  # bytes or FLOPs that may be a mean
Signed = Annotated[float, Meta(ge=-1e18, le=1e18)]  # bytes more or less than something else
Count = Annotated[int, Meta(ge=1, le=2**31)]
Index = Annotated[int, Meta(ge=0, le=2**31)]
Rank = Annotated[int, Meta(ge=0, le=2**20)]
# Text without control characters, which a terminal would obey.
_PLAIN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]*\Z"
Name = Annotated[str, Meta(max_length=1000, pattern=_PLAIN)]


def refuse(wrong: bool, what: str) -> None:
    """Raise a NounError while a noun is made; for a file, the reader adds where it was."""
    if wrong:
        raise NounError(what)


def increase(values: Sequence[float]) -> bool:
    """Whether every number is larger than the one before."""
    return all(a < b for a, b in pairwise(values))

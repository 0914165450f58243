"""What all ranks must have alike: asked with one small message, explained where it is not so."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import files
from ..errors import FileError, RunError
from ..plan import Plan
from ..shard.collectives import arrive
from .world import World

_LARGE = 2**24  # elements that are weighed at a time
_MOST_LINES, _MOST_RANKS, _MOST_SHOWN = 8, 6, 100
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OWN = ("AUTOPAR_CACHE", "AUTOPAR_PLAN")  # only rank 0 reads the one; the other's plan is compared

Facts = Mapping[str, str]


def digest(*parts: object) -> int:
    """A number that is the same for equal parts in any process, and fits in 62 bits."""
    hashed = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(hashed) >> 2


def ask(world: World, number: int) -> Callable[[], bool]:
    """Whether all ranks have the same number: under way until the answer is asked for."""
    pair = torch.tensor([number, -number])
    works = world.start_max(pair)

    def alike() -> bool:
        arrive(works)
        most, least = pair.tolist()
        return bool(most == -least)

    return alike


def differences(world: World, own: Facts) -> list[str]:
    """A line for each fact that is not the same on all ranks; all ranks must call this."""
    everyone = [files.decode(data, dict[str, str]) for data in world.exchange(files.encode(own))]
    names = dict.fromkeys(name for facts in everyone for name in facts)
    lines = [f"{name}: {_by_rank([facts.get(name, 'none') for facts in everyone])}"
             for name in names if len({facts.get(name) for facts in everyone}) > 1]  # fmt: skip
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"and {more} more"] if more > 0 else [])


def _by_rank(values: Sequence[str]) -> str:
    """`rank 0 has 8, ranks 1, 2 have 4`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{ranks_text(which)} {value if len(value) < _MOST_SHOWN else value[:97]}"
                     for value, which in ranks.items())  # fmt: skip


def ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}:"


def checksum(tensor: Tensor) -> int:
    """Of the bytes of a tensor, in their order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if not flat.is_cuda:
        return zlib.crc32(cast(Any, flat.view(torch.uint8).numpy()))
    return weighed(flat)


def weighed(flat: Tensor) -> int:
    """The same where the bytes are on a GPU: every element counts by its place."""
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _LARGE):
        bits = flat[start : start + _LARGE].view(_BITS[flat.element_size()])
        total += (bits * (2 * torch.arange(start, start + len(bits), device=flat.device) + 1)).sum()
    return int(total) % 2**61


# --- at the start ---------------------------------------------------------------------------------


def check_start(world: World, model: nn.Module, device: torch.device, plan: Any,
                **asked: object) -> None:  # fmt: skip
    """All ranks run the same code on the same model and were asked for the same."""
    if world.size == 1:
        return
    facts = {**_code(), "device": device.type, "plan": _plan_text(plan), **_environment()}
    facts |= {name: _text(value) for name, value in asked.items()}
    described = dict(_described(model))
    if ask(world, digest(facts, described))():
        return
    raise RunError(
        "the ranks were not started alike:\n    "
        + "\n    ".join(differences(world, facts | described)),
        where="parallelize",
        fix="start one script with one environment and one version of everything on all ranks, and "
        "build the model alike on each of them",
    )  # fmt: skip


@functools.cache
def _code() -> dict[str, str]:
    """Versions, and the sources of this package whatever their version."""
    package, crc = Path(__file__).resolve().parent.parent, 0
    for path in sorted(package.rglob("*.py")):
        crc = zlib.crc32(path.read_bytes(), crc)
    return {"sources of autopar_torch": f"{crc:08x}", "torch": str(torch.__version__),
            "Python": platform.python_version()}  # fmt: skip


def _environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items())
            if name.startswith("AUTOPAR_") and name not in _OWN}  # fmt: skip


def _plan_text(plan: Any) -> str:
    """A hash of a plan or of the file of one: where it lies may differ."""
    if plan is None:
        return "none given"
    try:
        data = files.encode(plan) if isinstance(plan, Plan) else files.encode(
            files.load(plan, Plan))  # fmt: skip
    except (FileError, TypeError) as error:
        return str(error)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _text(value: object) -> str:
    """The same in every process: functions by name, never an address."""
    if callable(value):
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    shown = repr(value)
    return type(value).__qualname__ if shown == object.__repr__(value) else shown


def _described(model: nn.Module) -> Iterable[tuple[str, str]]:
    yield "model", type(model).__qualname__
    yield "modules", f"{digest(*(type(m).__qualname__ for m in model.modules())):016x}"
    for items in (model.named_parameters, model.named_buffers):
        for name, t in items(remove_duplicate=False):
            kind = str(t.dtype).removeprefix("torch.") + ", trained" * t.requires_grad
            yield name, f"{tuple(t.shape)} {kind}{', on meta' * t.is_meta}"

"""What must be equal on all ranks: compared in one small message, explained if it differs."""

from __future__ import annotations

import hashlib
import os
import platform
import re
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
_ODD = 0x1E3779B97F4A7C15
_BITS = {1: torch.int8, 2: torch.int16}  # larger elements count as several of four bytes
_MOST_LINES, _MOST_RANKS, _MOST_SHOWN = 8, 6, 100
_OWN = ("AUTOPAR_CACHE", "AUTOPAR_PLAN")  # only rank 0 reads the one; the plan is compared
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Facts = Mapping[str, str]


def digest(*parts: object) -> int:
    """A number that is the same for equal parts in any process, and fits in 62 bits."""
    hashed = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(hashed) >> 2


def ask(world: World, number: int) -> Callable[[], bool]:
    """Start comparing a number over all ranks; the result waits and tells whether it is equal."""
    pair = torch.tensor([number, -number], device="cpu")
    works = world.start_max(pair)

    def alike() -> bool:
        arrive(works)
        most, least = pair.tolist()
        return bool(most == -least)

    return alike


def differences(world: World, own: Facts) -> list[str]:
    """A line for each fact that is not the same on all ranks; all ranks must call this."""
    everyone = world.everyones(dict(own), dict[str, str])
    columns = {name: [facts.get(name, "none") for facts in everyone]
               for facts in everyone for name in facts}
    lines = [f"{name}: {_by_rank(values)}" for name, values in columns.items()
             if len(set(values)) > 1]
    return lines[:_MOST_LINES] + ["..."] * (len(lines) > _MOST_LINES)


def _by_rank(values: Sequence[str]) -> str:
    """`rank 0: 8; ranks 1, 2: 4`."""
    found = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        ranks[_MOST_RANKS:] = ["..."] * (len(ranks) > _MOST_RANKS)
        found.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {value[:_MOST_SHOWN]}")
    return "; ".join(found)


def plain(value: object) -> str:
    """Text of a value that is no tensor, the same in every process."""
    if isinstance(value, (set, frozenset)):
        return f"{sorted(map(repr, value))}"
    if isinstance(value, torch.device):
        return value.type  # each rank has its own
    return _ADDRESS.sub("", repr(value))


def checksum(tensor: Tensor) -> int:
    """A number for the bytes of a tensor, in their order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride
    if not flat.is_cuda:
        return zlib.crc32(cast(Any, flat.view(torch.uint8).numpy()))
    return weighed(flat)


def weighed(flat: Tensor) -> int:
    """The same where the bytes are on a GPU: each element counts by an odd number that its place
    gives, in no simple series, as otherwise 1 2 2 1 would weigh what 2 1 1 2 does."""
    words = flat.view(_BITS.get(flat.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _LARGE):
        part = words[start : start + _LARGE]
        place = torch.arange(start, start + len(part), device=flat.device) * _ODD
        total += (part * ((place ^ (place >> 32)) * _ODD | 1)).sum()
    return digest(int(total))


# --- at the start ---------------------------------------------------------------------------------


def check_start(world: World, model: nn.Module, device: torch.device, plan: Any,
                **asked: object) -> None:
    """Refuse ranks that run other code, have another model, or were asked for something else."""
    if world.size == 1:
        return
    facts = {**_code(), "device": device.type, "plan": _plan_text(plan)}
    facts |= {name: value for name, value in sorted(os.environ.items())
              if name.startswith("AUTOPAR_") and name not in _OWN}
    facts |= {name: plain(value) for name, value in asked.items()}
    described = dict(_described(model))
    if ask(world, digest(facts, described))():
        return
    raise RunError(
        "the ranks were not started alike:\n    "
        + "\n    ".join(differences(world, facts | described)),
        where="parallelize",
        fix="start one script with one environment and one version of everything on all ranks, and "
        "build the model alike on each of them",
    )


def _code() -> dict[str, str]:
    """Versions, and the sources of this package whatever their version."""
    sources = sorted(Path(__file__).resolve().parent.parent.rglob("*.py"))
    return {"sources of autopar_torch": f"{digest(*(path.read_bytes() for path in sources)):x}",
            "torch": str(torch.__version__), "Python": platform.python_version()}


def _plan_text(plan: Any) -> str:
    """A hash of a plan or of the file of one: where it lies may differ."""
    if plan is None:
        return "none given"
    try:
        found = plan if isinstance(plan, Plan) else files.load(plan, Plan)
    except (FileError, TypeError) as error:
        return str(error)
    return f"{digest(files.encode(found)):x}"


def _described(model: nn.Module) -> Iterable[tuple[str, str]]:
    yield "model", type(model).__qualname__
    yield "modules", f"{digest(*(type(m).__qualname__ for m in model.modules())):016x}"
    for items in (model.named_parameters, model.named_buffers):
        for name, t in items(remove_duplicate=False):
            kind = str(t.dtype).removeprefix("torch.") + ", trained" * t.requires_grad
            yield name, f"{tuple(t.shape)} {kind}{', on meta' * t.is_meta}"

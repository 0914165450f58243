"""Damages checkpoints in every way that comes to mind, and sees what loading them does.

    python tests/damage.py 2000 [seed]

A damaged checkpoint must be refused with an error of ours and leave model and optimizer as they
were, or load what was saved (the damage hit nothing). What it holds must never run.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import autopar_torch as ap
from autopar_torch import files
from autopar_torch.errors import AutoparError
from autopar_torch.run.stored import MANIFEST, Manifest, Sealed

Damage = Callable[[random.Random, Path, Path], None]
X = torch.linspace(-1, 1, 12).view(3, 4)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def start(seed: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ap.parallelize(Small(), X, **options)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(seed + 1):
        model(X).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def content(model: Any, opt: torch.optim.Optimizer) -> str:
    """All that a checkpoint holds."""
    state = [sorted(opt.state[p].items()) for p in model.parameters() if p in opt.state]
    groups = [sorted((k, v) for k, v in g.items() if k != "params") for g in opt.param_groups]
    return repr((
        [(k, v.numpy().tobytes()) for k, v in model.state_dict().items()],
        [[(k, v.numpy().tobytes()) for k, v in own] for own in state], groups,
    ))


class Payload:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.sentinel}",)


def _any(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))


def _tensors(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def flip(rng: random.Random, folder: Path, _: Path) -> None:
    path = _any(rng, folder)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 3])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_header(rng: random.Random, folder: Path, _: Path) -> None:
    path = _tensors(folder)
    data = bytearray(path.read_bytes())
    data[rng.randrange(min(len(data), 400))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng: random.Random, folder: Path, _: Path) -> None:
    path = _any(rng, folder)
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


def append(rng: random.Random, folder: Path, _: Path) -> None:
    with _any(rng, folder).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 40)))


def swap(rng: random.Random, folder: Path, other: Path) -> None:
    """A file of another checkpoint in its place."""
    mine = _any(rng, folder)
    stranger = other / MANIFEST if mine.name == MANIFEST else _tensors(other)
    shutil.copy(stranger, mine)


def delete(rng: random.Random, folder: Path, _: Path) -> None:
    _any(rng, folder).unlink()


def garbage(rng: random.Random, folder: Path, _: Path) -> None:
    _any(rng, folder).write_bytes(rng.randbytes(rng.randrange(200)))


def bomb(rng: random.Random, folder: Path, _: Path) -> None:
    path = _any(rng, folder)
    deep = b"[" * 100_000
    path.write_bytes(rng.choice([
        deep, len(deep).to_bytes(8, "little") + deep, (2**63).to_bytes(8, "little"),
        b'{"sha256": ' + b"9" * 5000 + b"}", b"",
    ]))


def poison(rng: random.Random, folder: Path, _: Path) -> None:
    """A pickle in the place of a file, or beside, under names that others look for."""
    data = pickle.dumps(Payload(folder.parent / "sentinel"))
    if rng.random() < 0.5:
        _any(rng, folder).write_bytes(data)
    else:
        (folder / MANIFEST).unlink()
        for name in (".metadata", "__0_0.distcp", "optimizer.json", "pytorch_model.bin"):
            (folder / name).write_bytes(data)


def link(rng: random.Random, folder: Path, other: Path) -> None:
    path = _any(rng, folder)
    goal = rng.choice([path.rename(folder.parent / "moved"), other / MANIFEST, Path("/dev/zero")])
    path.symlink_to(goal)


def special(rng: random.Random, folder: Path, _: Path) -> None:
    path = _any(rng, folder)
    path.unlink()
    rng.choice([os.mkfifo, os.mkdir])(path)


def _edited(rng: random.Random, folder: Path, seal: bool) -> None:
    """Some value of the manifest is another; with `seal` its hash is right again."""
    value = json.loads((folder / MANIFEST).read_bytes())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for k in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, k))
            if isinstance(node[k], (dict, list)):
                walk(node[k])

    walk(value["manifest"])
    node, k = rng.choice(places)
    news = [None, -1, 0, 1, 2, 7, 2**62, 2**70, 1e300, "", "../x.safetensors", "/etc/passwd", [],
            {}, [[]], "F32", "I8", "F64", True, [0, [0], [1]], "\x1b[2J", "0" * 64]
    if isinstance(node, dict) and rng.random() < 0.3:
        if rng.random() < 0.5:
            del node[k]
        else:
            node[rng.choice(["x", "model.y", "../z"])] = node[k]
    else:
        node[k] = rng.choice(news)
    if seal:
        try:
            manifest = msgspec.convert(value["manifest"], Manifest)
            value = msgspec.to_builtins(Sealed(_hash(manifest), manifest))
        except (msgspec.MsgspecError, OverflowError):
            pass
    (folder / MANIFEST).write_text(json.dumps(value))


def _hash(manifest: Manifest) -> str:
    return hashlib.sha256(files.encode(manifest)).hexdigest()


def edit(rng: random.Random, folder: Path, _: Path) -> None:
    _edited(rng, folder, False)


def edit_and_seal(rng: random.Random, folder: Path, _: Path) -> None:
    _edited(rng, folder, True)


DAMAGES: list[Damage] = [
    flip, flip, flip, flip_header, truncate, append, swap, delete, garbage, bomb, poison, link,
    special, edit, edit, edit_and_seal,
]
ON_PURPOSE = {edit_and_seal}  # not damage: who writes a right hash may write other numbers


def attempts(number: int, seed: int = 0) -> Counter[str]:
    """What came of so many damaged checkpoints."""
    rng, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (saved, opt), (other, its) = start(0), start(3)
        saved.save(root / "saved", opt)
        other.save(root / "other", its)
        want, sentinel = content(saved, opt), root / "sentinel"
        model, fresh = start(1)
        for _ in range(number):
            damage = rng.choice(DAMAGES)
            shutil.copytree(root / "saved", root / "now")
            damage(rng, root / "now", root / "other")
            before = content(model, fresh)
            try:
                model.load(root / "now", fresh)
                right = content(model, fresh) == want or damage in ON_PURPOSE
                counts["loaded, right" if right else f"WRONG: {damage.__name__}"] += 1
                model, fresh = start(1)
            except AutoparError as error:
                named = bool(error.where and error.fix)
                same = content(model, fresh) == before
                counts["refused" if named and same else f"HALF: {damage.__name__}: {error}"] += 1
            except Exception as error:
                counts[f"FOREIGN: {damage.__name__}: {error!r}"] += 1
            if sentinel.exists():
                counts[f"RAN: {damage.__name__}"] += 1
                sentinel.unlink()
            _remove(root / "now", root / "moved")
    return counts


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)


def plain_attempts(number: int, seed: int = 0) -> Counter[str]:
    """The same with plain safetensors files, whose values no checksum guards."""
    from safetensors.torch import save_file

    rng, counts = random.Random(seed), Counter[str]()
    damages = [flip_header, flip_header, truncate, append, garbage, bomb, poison, special]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model, _ = start(0)
        for _ in range(number):
            (root / "now").mkdir()
            path = root / "now" / "model.safetensors"
            save_file(dict(model.state_dict()), str(path))
            (root / "now" / MANIFEST).write_text("{}")  # of somebody else
            damage = rng.choice(damages)
            damage(rng, root / "now", root)
            try:
                ap.parallelize(Small(), X, weights=root / "now")
                counts["loaded"] += 1
            except AutoparError as error:
                counts["refused" if error.where else f"UNNAMED: {error}"] += 1
            except Exception as error:
                counts[f"FOREIGN: {damage.__name__}: {error!r}"] += 1
            counts["RAN"] += (root / "sentinel").exists()
            _remove(root / "now", root / "moved")
    return +counts


if __name__ == "__main__":
    number, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    for made in (attempts(number, seed), plain_attempts(number // 4, seed)):
        for what, times in sorted(made.items()):
            print(f"{times:6} {what}")
        print()

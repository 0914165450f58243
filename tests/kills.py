"""Kills processes that save, at random moments, and sees what can be loaded afterwards.

    python tests/kills.py 50 [seed]

Parameters, moments and counters of step k are all k, so a mixture of two steps shows at once. A
step that was reported as saved, or a later one, must load; nothing else may.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar_torch as ap

WIDTH, KEEP = 384, 2
X = torch.ones(2, WIDTH)
LONGEST_S = 300


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def _start(num_ranks: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = ap.parallelize(Wide(), X, plan=ap.Plan.uniform(tp=num_ranks))
    opt = torch.optim.AdamW(model.parameters())
    model(X).backward()
    opt.step()
    return model, opt


def _values(model: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [p.detach() for p in model.parameters()]
    return tensors + [v for p in model.parameters() for v in opt.state[p].values()]


def _save_on(num_ranks: int, folder: Path, by_step: bool, first: int) -> None:
    """In a rank: save step after step, each reported when it is done."""
    model, opt = _start(num_ranks)
    for step in range(first, 10**6):
        for tensor in _values(model, opt):
            tensor.fill_(step)
        more: dict[str, Any] = {"step": step, "keep": KEEP} if by_step else {}
        model.save(folder / "saved", opt, **more)
        if os.environ["RANK"] == "0":
            draft = folder / "draft"
            draft.write_text(str(step))
            draft.rename(folder / "reported")


def _load(folder: Path) -> None:
    """In a process of its own: which step it is, if all of it is of one."""
    model, opt = _start(1)
    found = model.load(folder / "saved", opt)
    steps = {float(v) for tensor in _values(model, opt) for v in tensor.unique()}
    if len(steps) != 1 or found not in (None, *steps):
        raise AssertionError(f"a mixture of {sorted(steps)}, said to be {found}")
    (folder / "loaded").write_text(str(int(steps.pop())))


def _forked(rank: int, size: int, port: int, act: Callable[[], None], log: Path) -> int:
    """A child that has imported everything already."""
    if child := os.fork():
        return child
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                       "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        signal.alarm(LONGEST_S)
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else -1


def _end(children: list[int]) -> None:
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
        os.waitpid(child, 0)


def kill(rng: random.Random, num_ranks: int, folder: Path, by_step: bool) -> str:
    """Start ranks that save, kill one or all of them, and load: what came of it."""
    before, port = _number(folder / "reported"), _port()
    log = folder / "log"
    children = [
        _forked(r, num_ranks, port, lambda: _save_on(num_ranks, folder, by_step, before + 10), log)
        for r in range(num_ranks)
    ]
    deadline = time.monotonic() + LONGEST_S
    while _number(folder / "reported") == before and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(rng.random() * 0.4)
    if num_ranks > 1 and rng.random() < 0.5:
        victim = rng.choice(children)
        os.kill(victim, signal.SIGKILL)
        time.sleep(rng.random())  # the others go on for a while
    _end(children)
    reported = _number(folder / "reported")
    if reported == before:
        return f"nothing was saved: {log.read_text()[-500:]}"
    left = len(list((folder / "saved").rglob("*")))
    (folder / "loaded").unlink(missing_ok=True)
    _, status = os.waitpid(_forked(0, 1, port, lambda: _load(folder), log), 0)
    found = _number(folder / "loaded")
    if status or found not in (reported, reported + 1):
        return f"WRONG: reported {reported}, loaded {found}: {log.read_text()[-500:]}"
    (folder / "reported").write_text(str(found))
    return f"step {found} of {reported} reported, {left} files"


def _import_early(folder: Path) -> None:
    """What a rank imports on its way, so that those that are forked need not."""
    names = folder / "modules"

    def start() -> None:
        _start(1)
        names.write_text(" ".join(sys.modules))

    os.waitpid(_forked(0, 1, _port(), start, folder / "log"), 0)
    for name in names.read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def kills(number: int, seed: int) -> list[str]:
    """One or two ranks, one folder overwritten or a folder per step, again and again."""
    rng, told = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        _import_early(Path(name))
        for index in range(number):
            num_ranks, by_step = 1 + index % 2, index // 2 % 2 == 1
            folder = Path(name) / str(by_step)
            folder.mkdir(exist_ok=True)
            told.append(f"{num_ranks} ranks, {'steps' if by_step else 'over'}: "
                        f"{kill(rng, num_ranks, folder, by_step)}")
            print(told[-1], flush=True)
    return told


if __name__ == "__main__":
    made = kills(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    wrong = [what for what in made if "WRONG" in what or "nothing" in what]
    print(f"{len(made) - len(wrong)} of {len(made)} right")
    sys.exit(bool(wrong))

"""A training script whose last rank fails in a given way: python faulty.py '{"fault": "kill"}'.

What it prints begins with a word and the time, so that a test can tell how long it took:
FAULT, TOLD (a message of the library), CAUGHT (a RunError), DONE (with a digest of the weights).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar_torch as ap
from autopar_torch.errors import RunError

STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()


def say(word: str, text: object = "") -> None:
    sys.stdout.write(f"{word} {time.time():.3f} {os.environ['RANK']} {text}\n")
    sys.stdout.flush()


def fail(fault: str, model: Any) -> None:
    say("FAULT", fault)
    match fault:  # "mark" goes on
        case "fork":  # so does this: children are no ranks
            for _ in range(20):
                if not (child := os.fork()):
                    time.sleep(60)
                os.kill(child, signal.SIGTERM)
                os.waitpid(child, 0)
            say("FORKED")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold":  # nothing else of Python runs meanwhile
            ctypes.PyDLL(None).sleep(60)
        case "raise":
            raise ValueError("the data ended")
        case "crash":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "leave":
            sys.exit(0)
        case "state_dict":
            model.state_dict()
        case "clip":
            model.clip_grad_norm_(1.0)
        case "evaluate":
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 16))
        case "late, then state_dict":
            time.sleep(5)
            say("LATE")
            model.state_dict()


def main(fault: str = "", at: int = 3, steps: int = STEPS, folder: str = "", plan: str = "dp",
         pause_s: float = 0.0) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    torch.manual_seed(0)
    module = Net()
    given = None if "AUTOPAR_PLAN" in os.environ else ap.Plan.uniform(**{plan: size})
    model = ap.parallelize(module, [torch.ones(12, 16)], plan=given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, start = Path(folder) / "kept.pt", 0
    if folder and kept.exists():
        start, state = torch.load(kept)
        model.load_state_dict(state)
    data = torch.randn(steps, 12, 16, generator=torch.Generator().manual_seed(1))
    for step in range(start, steps):
        loss = model(data[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause_s)
        if folder:
            state = model.state_dict()
            if rank == 0:
                torch.save((step + 1, state), f"{kept}.new")
                os.replace(f"{kept}.new", kept)
        if fault and step == at and rank == size - 1 and not again:
            fail(fault, model)
    weights = b"".join(x.numpy().tobytes() for x in model.state_dict().values())
    say("DONE", f"{hashlib.sha256(weights).hexdigest()} from {start}")


if __name__ == "__main__":
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"TOLD %(created).3f {os.environ['RANK']} %(message)s"))
    logging.getLogger("autopar_torch").addHandler(handler)
    try:
        main(**json.loads(sys.argv[1]))
    except RunError as error:
        say("CAUGHT", error.what)
        raise

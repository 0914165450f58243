"""A twin of every rank, on the same core, in a process of its own: what runs there meets nothing of
what this library does to a process (its memory, the threads of Gloo)."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT_S = 300


class Twin:
    """Runs what it is given, in turn with this process: a rank waits while its twin works."""

    def __init__(self) -> None:
        port = [_free_port() if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(port)
        place = f"tcp://{os.environ['MASTER_ADDR']}:{port[0]}"
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(there, place, dist.get_rank(), dist.get_world_size()), daemon=True
        )
        self.process.start()
        there.close()

    def __call__(self, work: Callable[[], T]) -> T:
        self.here.send(work)
        if not self.here.poll(TIMEOUT_S):
            raise TimeoutError(f"the twin of rank {dist.get_rank()} took over {TIMEOUT_S} s")
        good, answer = self.here.recv()
        if not good:
            raise RuntimeError(f"the twin of rank {dist.get_rank()} failed:\n{answer}")
        return answer  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.here.close()  # it ends when there is nobody to ask it
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()


def _serve(asked: Connection, place: str, rank: int, size: int) -> None:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's, which has no such port
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size,
                            timeout=timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            work = asked.recv()
        except EOFError:
            break
        asked.send(_answer(work))
    dist.destroy_process_group()


def _answer(work: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, work()
    except Exception:  # whatever it was, it is told to whoever asked
        return False, traceback.format_exc()


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((os.environ["MASTER_ADDR"], 0))
        return int(probe.getsockname()[1])

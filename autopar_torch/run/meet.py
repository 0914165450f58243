"""Where ranks meet before anything else: one store, one attempt, and which did not come."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..errors import RunError

LIMIT_S = 120.0  # AUTOPAR_START_S overrides
POLL_S = 0.02
HERE = "127.0.0.1"
ROOM = "autopar"


def one_node() -> bool:
    """Whether all ranks are on this machine, by what the launcher says."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "1")


def seconds(name: str, otherwise: float) -> float:
    """A limit that the environment may set."""
    text = os.environ.get(name) or str(otherwise)
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1e7:
            return float(text)
    raise RunError(f"{text!r} is no number of seconds", where=name,
                   fix="set it to the seconds that ranks may take, like 120")


def meet(rank: int, size: int) -> Any:
    """A store for this attempt alone. An agent of torchrun keeps one store over all restarts, and
    what the ranks that died left there would lead the new ones astray."""
    limit_s = seconds("AUTOPAR_START_S", LIMIT_S)
    host, port = _address()
    place, where = f"{host}:{port}", f"rank {rank} on host {socket.gethostname()}"
    try:
        store = _store(host, port, rank, limit_s)
        attempt, absent = _answer(store, rank, limit_s) if rank else _call(store, size, limit_s)
    except (OSError, RuntimeError) as error:
        raise RunError(f"the ranks cannot meet at {place}: {str(error).splitlines()[0]}",
                       where=where, fix="see whether rank 0 runs there, no other program listens "
                       "there, and a firewall lets this machine in; AUTOPAR_START_S says how long "
                       "to wait") from error
    if absent:
        raise RunError(f"rank(s) {', '.join(absent)} of {size} did not come to {place}",
                       where=where, fix="see the end of their logs, and whether as many were "
                       "started as WORLD_SIZE says; AUTOPAR_START_S says how long to wait",
                       )
    return PrefixStore(f"{ROOM}/{attempt}", store)


def _address() -> tuple[str, int]:
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RunError(f"the ranks cannot meet at {host or '?'}:{port or '?'}",
                       where="MASTER_ADDR, MASTER_PORT",
                       fix="start with torchrun, which sets them")
    return HERE if one_node() and not _by_agent() else host, int(port)


def _by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(host: str, port: int, rank: int, limit_s: float) -> Any:
    """The store of torchrun's agent; without one, that of rank 0."""
    patience = timedelta(seconds=max(1.0, limit_s))
    if rank or _by_agent():
        _reach(host, port, time.monotonic() + limit_s)
        return TCPStore(host, port, is_master=False, timeout=patience)
    fd = listen(port).detach() if one_node() else None
    return TCPStore(host, port, is_master=True, timeout=patience, wait_for_workers=False,
                    master_listen_fd=fd)


def _reach(host: str, port: int, deadline: float) -> None:
    """Wait until somebody listens there: a store would not say what is in the way."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(10 * POLL_S)


def listen(port: int) -> socket.socket:
    """A socket that only this machine reaches (what a store opens itself listens to the world)."""
    return socket.create_server((HERE, port), backlog=1024)


def _call(store: Any, size: int, limit_s: float) -> tuple[str, list[str]]:
    """Rank 0 names the attempt to every rank that asks, until all have said that they joined. What
    earlier attempts have asked is answered too, and does no harm."""
    attempt, deadline = secrets.token_hex(8), time.monotonic() + limit_s
    asked, here = f"{ROOM}/asked", f"{ROOM}/{attempt}/here"
    answered: set[str] = set()
    absent = set(range(1, size))
    store.append(asked, " ")
    store.append(here, " ")
    while absent and time.monotonic() < deadline:
        for key in set(store.get(asked).decode().split()) - answered:
            store.set(f"{ROOM}/answer/{key}", attempt)
            answered.add(key)
        absent -= {int(rank) for rank in store.get(here).decode().split()}
        time.sleep(POLL_S)
    names = [str(rank) for rank in sorted(absent)]
    store.set(f"{ROOM}/{attempt}/absent", " ".join(names))
    return attempt, names


def _answer(store: Any, rank: int, limit_s: float) -> tuple[str, list[str]]:
    """The attempt that rank 0 names, and the ranks that are absent."""
    key = f"{rank}-{secrets.token_hex(8)}"
    store.append(f"{ROOM}/asked", f"{key} ")
    attempt = _read(store, f"{ROOM}/answer/{key}", limit_s, "")
    if not attempt:
        return "", ["0"]
    store.append(f"{ROOM}/{attempt}/here", f"{rank} ")
    # rank 0 may have begun to wait later
    return attempt, _read(store, f"{ROOM}/{attempt}/absent", 2 * limit_s, "0").split()


def _read(store: Any, key: str, limit_s: float, otherwise: str) -> str:
    deadline = time.monotonic() + limit_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            return otherwise
        time.sleep(POLL_S)
    return str(store.get(key).decode())

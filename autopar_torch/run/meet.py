"""Where ranks meet before anything else: one store, one attempt, and who did not come."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..errors import RunError

LIMIT_S = 120.0  # AUTOPAR_START_S overrides
POLL_S = 0.02
HERE = "127.0.0.1"
ROOM = "autopar"


def one_node() -> bool:
    """Whether all ranks are on this machine, as who started them says."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "1")


def meet(rank: int, size: int) -> Any:
    """A store for this attempt alone. An agent of torchrun keeps one store over all restarts, and
    what the ranks that died left there would lead the new ones astray."""
    limit_s = _limit_s()
    host, port = _address()
    deadline = time.monotonic() + limit_s
    store = _store(host, port, rank, deadline)
    place = f"{host}:{port}"
    attempt = (_call if rank == 0 else _answer)(store, rank, size, place, deadline)
    return PrefixStore(f"{ROOM}/{attempt}", store)


def _limit_s() -> float:
    text = os.environ.get("AUTOPAR_START_S", str(LIMIT_S))
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < 1e6:
        raise RunError(f"{text!r} is no number of seconds", where="AUTOPAR_START_S",
                       fix="set it to the seconds that ranks may take, like 120")  # fmt: skip
    return limit_s


def _address() -> tuple[str, int]:
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RunError(f"ranks cannot meet at {host or '?'}:{port or '?'}",
                       where="MASTER_ADDR, MASTER_PORT",
                       fix="start with torchrun, which sets them")  # fmt: skip
    return host, int(port)


def _store(host: str, port: int, rank: int, deadline: float) -> Any:
    """The store of torchrun's agent; without one, that of rank 0."""
    given = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if rank or given:
        _reach(host, port, deadline, rank)
        return TCPStore(host, port, is_master=False, timeout=patience)
    listening: dict[str, Any] = {}
    if one_node() and _is_loopback(host):
        listening["master_listen_fd"] = listen(port).detach()
    try:
        return TCPStore(host, port, is_master=True, timeout=patience, multi_tenant=True,
                        wait_for_workers=False, **listening)  # fmt: skip
    except RuntimeError as error:
        raise _taken(host, port) from error


def listen(port: int) -> socket.socket:
    """A socket that only this machine reaches (what a store opens itself listens to the world)."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HERE, port))
    except OSError as error:
        bound.close()
        raise _taken(HERE, port) from error
    bound.listen(1024)
    return bound


def _taken(host: str, port: int) -> RunError:
    return RunError(f"another program listens at {host}:{port}, where the ranks were to meet",
                    where="rank 0", fix="end it, or give another MASTER_PORT")  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError:
        return False
    return all(str(place[4][0]).startswith("127.") for place in found)


def _reach(host: str, port: int, deadline: float, rank: int) -> None:
    """Wait until somebody listens there."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"nobody listens at {host}:{port}, where the ranks were to meet: {error}",
                    where=f"rank {rank} on host {socket.gethostname()}",
                    fix="see whether rank 0 runs there and whether a firewall lets this machine "
                        "in; AUTOPAR_START_S says how long to wait",
                ) from error  # fmt: skip
        time.sleep(10 * POLL_S)


def _call(store: Any, _: int, size: int, place: str, deadline: float) -> str:
    """Rank 0 names the attempt to everybody who asks, until all have said that they are in it. What
    earlier attempts have asked is answered too, and does no harm."""
    attempt = secrets.token_hex(8)
    asked, here, all_here = f"{ROOM}/asked", f"{ROOM}/{attempt}/here", f"{ROOM}/{attempt}/all"
    answered: set[str] = set()
    present = {0}
    store.append(asked, " ")
    store.append(here, "0 ")
    while len(present) < size and time.monotonic() < deadline:
        for key in set(store.get(asked).decode().split()) - answered:
            store.set(f"{ROOM}/answer/{key}", attempt)
            answered.add(key)
        present = {int(rank) for rank in store.get(here).decode().split()}
        time.sleep(POLL_S)
    absent = sorted(set(range(size)) - present)
    store.set(all_here, " ".join(map(str, absent)))
    if absent:
        raise _absent(absent, size, place, 0)
    return attempt


def _answer(store: Any, rank: int, size: int, place: str, deadline: float) -> str:
    """The attempt that rank 0 names."""
    key = f"{rank}-{secrets.token_hex(8)}"
    store.append(f"{ROOM}/asked", f"{key} ")
    if not _wait(lambda: store.check([f"{ROOM}/answer/{key}"]), deadline):
        raise _absent([0], size, place, rank)
    attempt: str = store.get(f"{ROOM}/answer/{key}").decode()
    store.append(f"{ROOM}/{attempt}/here", f"{rank} ")
    # rank 0 may have begun to wait later
    if not _wait(lambda: store.check([f"{ROOM}/{attempt}/all"]), deadline + _limit_s()):
        raise _absent([0], size, place, rank)
    absent = store.get(f"{ROOM}/{attempt}/all").decode().split()
    if absent:
        raise _absent(absent, size, place, rank)
    return attempt


def _wait(there: Callable[[], bool], deadline: float) -> bool:
    while not there():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _absent(ranks: Iterable[Any], size: int, place: str, rank: int) -> RunError:
    names = ", ".join(map(str, ranks))
    return RunError(
        f"rank(s) {names} of {size} did not come to {place}",
        where=f"rank {rank} on host {socket.gethostname()}",
        fix="see the end of their logs, and whether as many were started as WORLD_SIZE says; "
            "AUTOPAR_START_S says how long to wait",
    )  # fmt: skip

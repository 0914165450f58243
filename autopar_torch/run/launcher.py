"""torchrun in this very process: what ends it ends the ranks, and on one node nothing of it listens
to other machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from ..errors import RunError
from .meet import HERE, listen


def launch(arguments: Sequence[str]) -> None:
    """Run what `torchrun` runs with these arguments; RunError if a rank failed. A signal that ends
    it comes out as SystemExit, after the ranks have ended."""
    options = parse_args(list(arguments))
    store = _meeting_here(options) if _one_node(options) else None
    with _logs(options):
        try:
            run(options)
        except SignalException as signal:
            sys.exit(128 + signal.sigval)
        except ChildFailedError as failure:
            raise RunError(f"a rank failed\n{failure}", fix="see the first failure") from None
        finally:
            del store


def _one_node(options: Any) -> bool:
    """Whether nothing says where ranks of several nodes meet."""
    return options.nnodes in ("1", "1:1") and (
        options.standalone
        or (options.rdzv_backend == "static" and not options.rdzv_endpoint
            and options.master_port is None)
    )  # fmt: skip


def _meeting_here(options: Any) -> Any:
    """A store that only this machine reaches. torchrun finds it by its port, as one process may
    have several users of a store; one that it makes itself listens to all machines."""
    place = listen(0)
    options.standalone, options.rdzv_backend = False, "static"
    options.master_addr, options.master_port = HERE, place.getsockname()[1]
    return TCPStore(HERE, options.master_port, is_master=True, multi_tenant=True,
                    wait_for_workers=False, master_listen_fd=place.detach())  # fmt: skip


@contextmanager
def _logs(options: Any) -> Iterator[None]:
    """torchrun leaves its folder of error files behind; ours goes."""
    if options.log_dir:
        yield
        return
    options.log_dir = mkdtemp(prefix="autopar-")
    try:
        yield
    finally:
        rmtree(Path(options.log_dir), ignore_errors=True)

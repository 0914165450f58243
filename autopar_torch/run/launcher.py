"""torchrun inside this process: what ends it ends the ranks, and on one node nothing of it listens
to other machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory
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
    _store = _meeting_here(options) if _one_node(options) else None  # kept until the end
    # torchrun leaves its folder of error files behind
    with TemporaryDirectory(prefix="autopar-", ignore_cleanup_errors=True) as logs:
        options.log_dir = options.log_dir or logs
        try:
            run(options)
        except SignalException as signal:
            sys.exit(128 + signal.sigval)
        except ChildFailedError as failure:
            raise RunError(f"a rank failed\n{failure}", fix="see the first failure") from None


def _one_node(options: Any) -> bool:
    """Whether nothing says where ranks of several nodes meet."""
    return options.nnodes in ("1", "1:1") and (
        options.standalone
        or (options.rdzv_backend == "static" and not options.rdzv_endpoint
            and options.master_port is None)
    )


def _meeting_here(options: Any) -> Any:
    """A store that only this machine reaches. torchrun finds it by its port, as one process may
    have several users of a store; one that it makes itself listens to all machines."""
    place = listen(0)
    options.standalone, options.rdzv_backend = False, "static"
    options.master_addr, options.master_port = HERE, place.getsockname()[1]
    return TCPStore(HERE, options.master_port, is_master=True, multi_tenant=True,
                    wait_for_workers=False, master_listen_fd=place.detach())

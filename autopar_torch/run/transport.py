"""Gloo's own threads, which share cores with the ranks that compute."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("autopar_torch")
THREADS = Path("/proc/self/task")
NAME = "gloo_tcp_loop"


def run_gloo_threads_as_batch() -> None:
    """Have Gloo's threads wait for their turn instead of pushing a rank off its core.

    Such a thread tries a connection's lock again and again. When a message arrives while the rank
    sends one, the thread takes the core from the rank that holds the lock, and both stand still
    until the scheduler's next tick, milliseconds later. A batch thread does not take a core on
    waking; while the rank waits for a message it runs at once all the same.
    """
    for thread in THREADS.glob("*/comm") if hasattr(os, "SCHED_BATCH") else ():
        try:
            if thread.read_text().strip() == NAME:
                os.sched_setscheduler(int(thread.parent.name), os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # it has ended, or this system does not allow it
            log.debug("scheduling of %s stays as it is: %s", NAME, error)

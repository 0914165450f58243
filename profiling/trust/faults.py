"""How soon is a fault named?

    python profiling faults --quick     # a kill and a stop
    python profiling faults             # all of them

Jobs of two ranks in which one fails (kill, hang, exception, ...). `told` is the time from the fault
to the first message that names the rank, `caught` until the script has the exception, `ended` until
every process of the job is gone.
"""

from __future__ import annotations

import argparse
import time

from jobs import Job

LIMIT_S = 6.0
MOST_S = 2 * LIMIT_S
WAIT_S = 180
CASES = {  # fault -> how its ranks are started
    "kill": "torchrun", "stop": "hand", "hold": "hand", "raise": "torchrun", "crash": "torchrun",
    "abort": "torchrun", "leave": "torchrun", "state_dict": "hand", "clip": "hand",
    "evaluate": "hand",
}
QUICK = ("kill", "stop")


def row(fault: str) -> tuple[str, float]:
    """What is shown, and when the script had the exception."""
    with Job(2, {"fault": fault}, how=CASES[fault], limit_s=LIMIT_S) as job:
        job.until("CAUGHT", WAIT_S)
        deadline = time.monotonic() + 5
        while job.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = f"{time.time() - job.said('FAULT')[0].at_s:6.2f}" if not job.alive() else "     -"
        told, caught = (job.after("FAULT", word, "rank ") for word in ("TOLD", "CAUGHT"))
        what = job.said("CAUGHT")[0].text
    return f"{fault:12}{told:6.2f}{caught:8.2f}  {ended}  {what[:100]}", caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(
        f"seconds, with a limit of {LIMIT_S:.0f} s (- : a process that hangs is left, and killed)"
    )
    print("fault         told  caught   ended  what")
    seconds = []
    for fault in QUICK if options.quick else CASES:
        shown, caught_s = row(fault)
        seconds.append(caught_s)
        print(shown, flush=True)
    print(f"{len(seconds)} faults, each an exception of the others within {max(seconds):.1f} s")
    return int(max(seconds) > MOST_S)

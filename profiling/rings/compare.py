"""What do linears in rings (PrimePar) gain, in the paper's setting and on real ranks?

    python profiling rings --simulated [--quick] [--json FILE]
    python profiling rings --real --nodes 4 [--quick] [--json FILE]     # emulated, needs root
    python profiling rings --real [--model gpt]                         # ranks of this machine

`--simulated` prints our figures beside the paper's (docs/log.md explains them); its exit status
is 0 only if the targets of its last line hold. `--real` times steps (real.py); its exit
status is 0 only if all plans gave the same losses.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from start import start_ranks

MODELS = ("gpt", "llama", "opt")
RATES = (100.0, 200.0, 1000.0)  # Mbit/s


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulated", action="store_true", help="the paper's setting, by prices")
    what.add_argument("--real", action="store_true", help="time ranks here")
    parser.add_argument("--nodes", type=int, default=0, help="emulated; 0: this machine alone")
    parser.add_argument("--ranks", type=int, default=4, help="on all nodes together")
    parser.add_argument("--rate", type=float, nargs="*", dest="rates", help="Mbit/s of a node")
    parser.add_argument("--model", nargs="*", dest="models", choices=(*MODELS, "vit"))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one cell, or 32 devices only")
    parser.add_argument("--json", type=Path)
    found = parser.parse_args()
    found.models = found.models or (MODELS[:1] if found.quick else MODELS)
    found.rates = found.rates or (RATES[-1:] if found.quick else RATES)
    found.model = found.models[0]
    return found


def main() -> int:
    chosen = options()
    if chosen.simulated:
        from rings.simulated import main as simulated

        return simulated(chosen)
    from rings.real import lab_main, rank_main

    if "RANK" in os.environ:
        return rank_main(chosen)
    if chosen.nodes:
        return lab_main(chosen)
    start_ranks("rings", sys.argv[1:], chosen.ranks)
    return 0

"""How may ops that no rule knows be split, over the models of `transformers`?

    python profiling discover [--kind causal,masked,seq2seq,image,sequence] [--only NAME,...]
        [--quick] [--write]

Traces every architecture that can be built tiny, and prints what was found out about each op
without a rule. `--write` keeps it in the package (`shard/discovered.json`), where what is there
already stays if it was written with this torch. The exit status is 0 if ops were asked about and
none took a second.
"""

from __future__ import annotations

import argparse
import signal
import time
import warnings
from typing import Any

from autopar_torch.files import save
from autopar_torch.trace import discover, trace
from autopar_torch.trace.call import take_apart
from covered.architectures import TASKS, Architecture, batch, build, dtype_of, listed

LIMIT_S, SLOW_S = 60, 1.0


def traced(own: Architecture) -> str:
    """Why it cannot be traced, or nothing."""
    try:
        signal.alarm(LIMIT_S)
        model = build(own)
        call, _ = take_apart((), batch(own, dtype_of(model)))
        trace(model, call)
    except Exception as error:  # of the architecture, whatever it is
        return f"{type(error).__name__}: {error}"[:80]
    finally:
        signal.alarm(0)
    return ""


def keep() -> None:
    met = discover.met()
    ops = discover._reviewed() | met.ops
    save(discover.Discovered(met.torch, dict(sorted(ops.items()))), discover.FILE)


def late(*_: Any) -> None:
    raise TimeoutError(f"not traced within {LIMIT_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="causal,masked", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--only", default="", help="names of architectures, with commas")
    parser.add_argument("--quick", action="store_true", help="every tenth")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGALRM, late)
    seconds, tried = dict[str, float](), discover._tried

    def timed(node: Any, *args: Any) -> discover.Evidence:
        began = time.perf_counter()
        found = tried(node, *args)
        seconds[f"{node.target}"] = max(time.perf_counter() - began, seconds.get(
            f"{node.target}", 0.0))
        return found

    discover._tried = timed
    asked = [own for task in options.kind.split(",") for own in listed(task)
             if not options.only or own.name in options.only.split(",")]
    for own in asked[::10] if options.quick else asked:
        print(f"{own.task:9}{own.name:28}{traced(own)}", flush=True)
        if options.write:
            keep()
    met = discover.met()
    for key, found in met.ops.items():
        print(f"{key[:100]:100} {found.tries:4} {' '.join(found.factors) or '-'}")
    worst = max(seconds.values(), default=0.0)
    print(f"FIGURES architectures={len(asked)} ops={len(met.ops)} run={len(seconds)} "
          f"worst_s={worst:.2f}")
    return 0 if met.ops and worst < SLOW_S else 1


if __name__ == "__main__":
    raise SystemExit(main())

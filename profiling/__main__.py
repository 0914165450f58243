"""The door to every script that answers a question: `python profiling NAME [options]`."""

from __future__ import annotations

import ast
import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parent / "tests"), str(HERE), str(HERE.parent)]
SCRIPTS = {  # name -> module whose first line is the question, and about how long the answer takes
    "accuracy": ("clock.accuracy", "an hour, --quick a minute"),
    "right": ("clock.right", "an hour, --quick two minutes"),
    "unequal": ("clock.unequal", "twenty minutes a case, --quick five"),
    "usual": ("clock.usual", "half an hour, --quick a minute"),
    "native": ("clock.native", "ten minutes, --quick two"),
    "compiled": ("clock.compiled", "twenty minutes, --quick five"),
    "changing": ("changing.compare", "--case traces or day a minute, noise or replan seconds"),
    "live": ("changing.live", "three minutes a case"),
    "lost": ("changing.lost", "three minutes (rank) to half an hour (cut); --times 3"),
    "gpu": ("clock.gpu", "five minutes on a GPU, --quick two"),
    "checkpoints": ("clock.checkpoints", "half a minute"),
    "published": ("published.grade", "three seconds"),
    "pools": ("published.pools", "half a minute"),
    "calibrate": ("published.calibrate", "seconds to a minute"),
    "rings": ("rings.compare", "--simulated minutes, --real --nodes 4 an hour"),
    "search": ("scale.search", "three minutes, --quick two"),
    "speed": ("scale.speed", "a minute"),
    "trace": ("scale.trace", "a minute"),
    "trust": ("trust.table", "half an hour, --quick three minutes"),
    "coverage": ("coverage.table", "an hour, --quick six minutes"),
    "discover": ("coverage.discover", "twenty minutes, --quick two"),
    "numbers": ("trust.numbers", "half an hour, --quick a minute"),
    "faults": ("trust.faults", "some minutes, --quick half of one"),
    "fuzz": ("trust.fuzz", "two minutes, --quick ten seconds"),
}


def question(module: str) -> str:
    """Read, not imported: that would take as long as torch does."""
    source = (HERE / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def listing() -> str:
    rows = (f"  {name:12} {question(module)}\n{'':15}{takes}"
            for name, (module, takes) in SCRIPTS.items())
    return "\n".join(["python profiling NAME [options], or NAME --help", *rows])


def main() -> int:
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name not in SCRIPTS:
        print(f"no script is called {name!r}\n{listing()}", file=sys.stderr)
        return 2
    sys.path[:0] = PATHS
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.argv = [f"profiling {name}", *options]
    return int(import_module(SCRIPTS[name][0]).main() or 0)


if __name__ == "__main__":
    sys.exit(main())

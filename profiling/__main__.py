"""The door to every script that answers a question: `python profiling NAME [options]`."""

from __future__ import annotations

import ast
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parent / "tests"), str(HERE), str(HERE.parent)]
class Script(NamedTuple):
    """`module`: its first line is the question. `takes`: about how long the answer takes. `target`:
    what the exit status 0 stands for; where there is none, nothing is aimed at. `quick`: its
    options in `python profiling all --quick`."""

    module: str
    takes: str
    target: str = ""
    quick: str = "--quick"


SCRIPTS = {
    "all": Script("every", "--quick twenty minutes, else a day"),
    "accuracy": Script("clock.accuracy", "an hour, --quick a minute",
                       "step accuracy 96 % in the mean, 85 % at worst; order 0.95; memory 5 %",
                       "--quick --rounds 6"),
    "right": Script("clock.right", "an hour, --quick a minute", "regret at most 2 %"),
    "unequal": Script("clock.unequal", "twenty minutes a case, --quick five",
                      "error 8 % in the median, 20 % at worst; ratio of two plans within 10 %",
                      "--quick --case half --plan 'dp 2:1' --plan 'pp 5|3 gpipe'"),
    "usual": Script("clock.usual", "half an hour, --quick a minute",
                    "at least 0.98 times as fast as the best usual plan", "--quick --rounds 12"),
    "native": Script("clock.native", "ten minutes, --quick two",
                     "time and memory at most those by hand", "--quick --only dp2"),
    "compiled": Script("clock.compiled", "twenty minutes, --quick five",
                       "compiled by default never slower", "--quick --only gpt --plans dp2"),
    "changing": Script("changing.compare", "--case traces or day a minute, noise or replan seconds",
                       "under a minute; no policy above the oracle", "--case noise"),
    "live": Script("changing.live", "three minutes a case",
                   "1.3 times as fast as the best plan that stays; busy: no move", "--case brief"),
    "lost": Script("changing.lost", "three minutes (rank) to half an hour (cut); --times 3",
                   "goes on within 30 s, with the losses of one process",
                   "--kind rank --times 1"),
    "gpu": Script("clock.gpu", "five minutes on a GPU, --quick two", "step and memory predicted"),
    "checkpoints": Script("clock.checkpoints", "half a minute", quick="1"),
    "published": Script("published.grade", "three seconds", "those of docs/published.md"),
    "pools": Script("published.pools", "half a minute",
                    "never slower than Sailor's plans by its own formula"),
    "calibrate": Script("published.calibrate", "seconds to a minute", quick="L4"),
    "rings": Script("rings.compare", "--simulated minutes, --real --nodes 4 an hour",
                    "the paper's geo-mean within 10 %, less memory, quicker search",
                    "--simulated --quick"),
    "search": Script("scale.search", "three minutes, --quick two",
                     "as quick as docs/log.md says, and the plans of trying everything"),
    "speed": Script("scale.speed", "a minute", "timeline 0.5 s, 100,000 plans a second"),
    "trace": Script("scale.trace", "a minute", "under 15 s and 1 GiB", ""),
    "trust": Script("trust.table", "half an hour, --quick three minutes",
                    "every cell right, or refused by name", "--quick --plans tp2 --only "
                    "dataloader_shuffle,torch_clip_grad_norm,logits_and_loss,batch_mixes_rows"),
    "coverage": Script("covered.table", "an hour, --quick six minutes",
                       "98 % of the cells exact, none wrong in silence",
                       "--only llama,bert,mixtral"),
    "discover": Script("covered.discover", "twenty minutes, --quick two",
                       "no op takes a second", "--only mamba,rwkv,longformer"),
    "numbers": Script("trust.numbers", "half an hour, --quick a minute",
                      "1e-5 relative after three steps", "--ranks 2 --models gpt2,unet"),
    "faults": Script("trust.faults", "some minutes, --quick half of one",
                     "an exception within 12 s"),
    "fuzz": Script("trust.fuzz", "two minutes, --quick ten seconds",
                   "everything damaged is refused"),
}


def question(module: str) -> str:
    """Read, not imported: that would take as long as torch does."""
    source = (HERE / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def listing() -> str:
    rows = (f"  {name:12} {question(script.module)}\n{'':15}{script.takes}"
            for name, script in SCRIPTS.items())
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
    return int(import_module(SCRIPTS[name].module).main() or 0)


if __name__ == "__main__":
    sys.exit(main())

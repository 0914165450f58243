"""Measure this machine for a model and keep the profile.

    torchrun --standalone --nproc-per-node 2 profiling/measure.py gpt --quick --out profile.json

Models are those of profiling/models.py, or any `file.py:function` that returns (model, inputs).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from autopar_torch.cli import main as autopar  # noqa: E402
from autopar_torch.profile import QUICK_S  # noqa: E402

THOROUGH_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_S:.0f} s instead of a minute")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    model = args.model if ":" in args.model else f"{HERE / 'models.py'}:{args.model}"
    seconds = QUICK_S if args.quick else THOROUGH_S
    return autopar(["measure", model, "--out", args.out, "--seconds", str(seconds), "--force"])


if __name__ == "__main__":
    sys.exit(main())

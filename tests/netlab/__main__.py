"""The command line: `check` says whether a lab can be built here, `run` runs a command in one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from netlab import Lab, Layout, Link, Node, NotPermitted

# as automake's for a skipped test, as timeout's, as argparse's
EXIT_CODES = ((NotPermitted, 77), (TimeoutError, 124), (OSError, 2), (ValueError, 2))


def main() -> int:
    options = _options()
    try:
        return _check() if options.do == "check" else _run(options)
    except (NotPermitted, OSError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m netlab", description=__doc__)
    verbs = parser.add_subparsers(dest="do", required=True)
    verbs.add_parser("check", help="build the smallest lab; exit status 0 if it works")
    run = verbs.add_parser("run", help="run a command once per rank, with RANK and the like set")
    run.add_argument("layout", type=Path, help='{"nodes": [{"name": "a", ...}], "links": [...]}')
    run.add_argument("--ranks-per-node", type=int, default=1, metavar="N")
    run.add_argument("--timeout-s", type=float, default=600, metavar="S")
    run.add_argument("command", nargs="+", help="after --")
    return parser.parse_args()


def _check() -> int:
    pair = [Node(name="a", cpu_share=0.5, rate_mbps=100), Node(name="b")]
    with Lab(pair, [Link("a", "b", 50)]) as lab:
        codes = [ended.code for ended in lab.run(["true"], timeout_s=30)]
    print("a lab can be built here" if not any(codes) else f"a node gave {codes}")
    return int(any(codes))


def _run(options: argparse.Namespace) -> int:
    layout = msgspec.json.decode(options.layout.read_bytes(), type=Layout)
    with Lab(layout.nodes, layout.links) as lab:
        ended = lab.run(
            options.command, timeout_s=options.timeout_s,
            ranks_per_node=options.ranks_per_node, echo=True,
        )
    failed = [code for code, _ in ended if code]
    return next((code for code in failed if code > 0), 128 - failed[0] if failed else 0)


if __name__ == "__main__":
    sys.exit(main())

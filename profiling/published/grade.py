"""How far from published runs are predictions that know only hardware descriptions?

    python profiling published                     every row
    python profiling published --quick             core.json and the ranking groups
    python profiling published --data FOLDER       other rows of the same form
    python profiling published --search            show the ranking groups one by one
    python profiling published --json FILE         every prediction

Exits with 0 only where every target holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from published import scores
from published.predictions import predict
from published.rows import Rows, read

HERE = Path(__file__).resolve().parent


def main() -> int:
    args = arguments()
    rows = read(args.data)
    core, groups = side_files(args.data)
    chosen = wanted(rows, core, groups) if args.quick and core else set(rows.jobs)
    predictions = {key: predict(rows.jobs[key]) for key in rows.jobs if key in chosen}
    report = scores.Report(rows, predictions, core, groups, show_groups=args.search)
    for line in report.lines():
        print(line)
    if args.json:
        args.json.write_text(json.dumps(report.records(), indent=1) + "\n", encoding="utf-8")
    return 0 if report.holds else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=HERE)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def side_files(folder: Path) -> tuple[dict[str, list[tuple[str, str]]], list[dict]]:
    """The chosen subset and the ranking groups, where a folder has them."""
    core, groups = folder / "core.json", folder / "ranking_groups.json"
    found = json.loads(core.read_text(encoding="utf-8")) if core.exists() else {}
    subset = {kind: [tuple(key) for key in found.get(kind, [])] for kind in ("time", "memory")}
    listed = json.loads(groups.read_text(encoding="utf-8")) if groups.exists() else []
    return (subset if found else {}), listed


def wanted(rows: Rows, core: dict[str, list[tuple[str, str]]], groups: list[dict]) -> set:
    keys = {*core["time"], *core["memory"]}
    return keys | {(group["file"], name) for group in groups for name in group["ids"]}

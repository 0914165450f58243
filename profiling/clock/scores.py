"""What the rows of `accuracy` say: figures, where the error comes from, a picture."""

from __future__ import annotations

import math
import operator
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MEAN, WORST, RANK = 0.96, 0.85, 0.95
MEMORY_MEDIAN, MEMORY_WORST = 0.05, 0.10
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SIZE, EDGE = 480, 50  # of the picture, in pixels


def memory_errors(row: Row) -> list[float]:
    pairs = zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
    return [abs(predicted / measured - 1) for predicted, measured in pairs]


def part_errors(row: Row) -> tuple[float, float]:
    """Of computing, and of waiting for others, as shares of the measured step.

    What is hidden under computation is not waited for, so an overlap that was predicted wrongly
    shows in the second; a transport does not tell when a message in the background has ended.
    """
    step = row["measured_s"]
    compute = row["compute_s"] - row["measured_compute_s"]
    waiting = (row["predicted_s"] - row["compute_s"]) - (step - row["measured_compute_s"])
    return compute / step, waiting / step


def show(row: Row) -> str:
    compute, waiting = part_errors(row)
    return (f"{row['model']:6} {row['world']} {row['network']:10} {row['plan']:30} "
            f"predicted {row['predicted_s'] * 1e3:8.1f} ms  measured {row['measured_s'] * 1e3:8.1f}"
            f"  accuracy {row['accuracy']:6.1%}  noise {row['noise']:5.1%}"
            f"  (computing {compute:+6.1%}, waiting {waiting:+6.1%}, "
            f"hidden {row['overlap_s'] / row['predicted_s']:5.1%})"
            f"  memory error {max(memory_errors(row)):5.1%}")


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman."""

    def places(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(places(a), places(b)) if len(a) > 2 else 1.0


def interval(
    values: list[float],
    of: Callable[[list[float]], float] = statistics.mean,
    resamples: int = 1000,
) -> tuple[float, float]:
    """95 % of the means (or what else is asked for) of resampled values."""
    pick = random.Random(0)
    found = sorted(of(pick.choices(values, k=len(values))) for _ in range(resamples))
    return found[int(0.025 * resamples)], found[int(0.975 * resamples) - 1]


def grouped(rows: list[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def correlations(rows: list[Row]) -> dict[str, float]:
    """Per model, the mean over its cases."""
    cases = grouped(rows, lambda r: (r["model"], r["world"], r["network"]))
    found = {key: rank_correlation([r["predicted_s"] for r in own], [r["measured_s"] for r in own])
             for key, own in cases.items()}
    models = sorted({model for model, _, _ in cases})
    return {m: statistics.mean(v for key, v in found.items() if key[0] == m) for m in models}


def table(rows: list[Row]) -> str:
    """Accuracy by network, world size and model."""
    lines = []
    for name in ("network", "world", "model"):
        for value, own in grouped(rows, operator.itemgetter(name)).items():
            accuracy = [row["accuracy"] for row in own]
            parts = [part_errors(row) for row in own]
            lines.append(f"{name} {value}: {len(own)} plans, mean {statistics.mean(accuracy):.1%}, "
                         f"worst {min(accuracy):.1%}; mean error of computing "
                         f"{statistics.mean(abs(c) for c, _ in parts):.1%}, of waiting "
                         f"{statistics.mean(abs(w) for _, w in parts):.1%}; noise "
                         f"{statistics.mean(row['noise'] for row in own):.1%}")
    return "\n".join(lines)


def figures(rows: list[Row]) -> tuple[str, bool]:
    """One line, and whether the targets hold."""
    accuracy = [row["accuracy"] for row in rows]
    by_model = correlations(rows)
    memory = [error for row in rows for error in memory_errors(row)]
    low, high = interval(accuracy)
    noise = statistics.mean(row["noise"] for row in rows)
    ranks = ", ".join(f"{m} {v:.3f}" for m, v in by_model.items())
    text = (f"{len(rows)} plans: accuracy mean {statistics.mean(accuracy):.1%} "
            f"[{low:.1%}, {high:.1%}], worst {min(accuracy):.1%}; noise floor {noise:.1%}; "
            f"rank correlation {ranks}; memory error median "
            f"{statistics.median(memory):.1%}, worst {max(memory):.1%}")
    good = (statistics.mean(accuracy) >= MEAN and min(accuracy) >= WORST
            and min(by_model.values()) >= RANK and statistics.median(memory) <= MEMORY_MEDIAN
            and max(memory) <= MEMORY_WORST)
    return text, good


def draw(rows: list[Row], path: Path) -> None:
    """Predicted over measured, as SVG; the band is where accuracy is at least `WORST`."""
    times = [r[name] for r in rows for name in ("predicted_s", "measured_s")]
    low, high = math.log(min(times) / 1.1), math.log(max(times) * 1.1)

    def at(seconds: float) -> float:
        return EDGE + (math.log(seconds) - low) / (high - low) * (SIZE - 2 * EDGE)

    def line(factor: float, style: str) -> str:
        ends = [(math.exp(e), math.exp(e) * factor) for e in (low, high)]
        (x0, y0), (x1, y1) = [(at(x), SIZE - at(y)) for x, y in ends]
        return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {style}/>'

    cases = grouped(rows, lambda r: (r["network"], r["world"]))
    dots, names = [], []
    for k, (case, own) in enumerate(cases.items()):
        color = COLORS[k % len(COLORS)]
        names.append(f'<text x="{EDGE + 10}" y="{EDGE + 16 * k}" fill="{color}">'
                     f"{case[0]}, {case[1]} ranks</text>")
        dots += [f'<circle cx="{at(r["measured_s"]):.1f}" cy="{SIZE - at(r["predicted_s"]):.1f}" '
                 f'r="3" fill="{color}"><title>{r["model"]} {r["plan"]}</title></circle>'
                 for r in own]
    band = 'stroke="#bbb" stroke-dasharray="4"'
    lines = [line(1, 'stroke="black"'), line(WORST, band), line(2 - WORST, band)]
    words = [
        f'<text x="{SIZE // 2 - 70}" y="{SIZE - 15}">measured seconds per step</text>',
        f'<text transform="translate(18,{SIZE // 2 + 70}) rotate(-90)">predicted</text>',
    ]
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}" '
                    'font-family="sans-serif" font-size="12">'
                    + "".join([*lines, *dots, *names, *words]) + "</svg>\n")

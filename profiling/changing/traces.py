"""Traces that other people published, as histories: which file is which is told by its form.

* Bamboo: `ms,add or remove,node`, and `date, time, count`
* Parcae: a JSON line a minute, `[ms, "add" or "remove" or "no-op", {"nodes": [...]}]`
* Sailor: JSON, `[{"Time": s, "GPUs": count}]`
* StepFun: JSON, faults of servers, in days
* DoiT intercloud: CSV, throughput of pairs of regions

Where only a count is told, the nodes with the highest numbers are the ones that leave. A node that
is new takes the lowest number that is free.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from autopar_torch.errors import FileError
from autopar_torch.history import History, Incident

DAY_S, MINUTE_S = 86400.0, 60.0
What = Literal["lost", "back"]
SLOW: list[Literal["link", "speed"]] = ["link", "speed"]
MOST_SERVERS = 128  # of eight devices: 1,024
SERVER = 8  # devices
# What a fault does to a server; any other takes it out. The parts of the speed are assumed.
LINKS = {"NIC Link Speed low": 0.5, "GPU PCI link width low": 0.5, "NIC PCI link Width low": 0.5,
         "GPU P2P Bandwidth Low": 0.5}
SPEEDS = {"GPU Temperature High": 0.8}
SEED = 0


def read(path: Path) -> History:
    """The history that a published file tells."""
    text = path.read_text(encoding="utf-8")
    first = text.lstrip()[:400]
    try:
        if "bitrate_Bps" in first:
            return day(rates(text), path.name)
        if first.startswith('[{') or first.startswith("[\n"):
            rows = json.loads(text)
            return _faults(rows, path.name) if "node_id" in rows[0] else _counts(
                [(float(r["Time"]), int(r["GPUs"])) for r in rows], path.name)
        if first.startswith("["):
            return _named(_parcae(text), path.name)
        if ",add," in first or ",remove," in first:
            lines = [line.split(",") for line in text.split()]
            return _named([(float(ms) / 1e3, what, node) for ms, what, node in lines], path.name)
        return _counts(list(_dated(text)), path.name)
    except (ValueError, LookupError, TypeError) as error:
        raise FileError(f"of no known form: {type(error).__name__}: {error}", where=str(path),
                        fix="see profiling/changing/traces.py") from error


def _dated(text: str) -> Iterator[tuple[float, int]]:
    start = None
    for line in filter(None, text.splitlines()):
        date, clock, count = line.split(", ")
        at = datetime.datetime.fromisoformat(f"{date} {clock}")
        start = start or at
        yield (at - start).total_seconds(), int(count)


def _parcae(text: str) -> Iterator[tuple[float, str, str]]:
    for line in filter(None, text.splitlines()):
        ms, what, more = json.loads(line)
        yield from ((ms / 1e3, what, node) for node in more["nodes"] or ["-"])


def _counts(rows: list[tuple[float, int]], source: str) -> History:
    most = max(count for _, count in rows)
    events, there = [], most
    for at_s, count in rows:
        events += [Incident(at_s, n, "lost") for n in range(count, there)]
        events += [Incident(at_s, n, "back") for n in range(there, count)]
        there = count
    return History(most, rows[-1][0] + MINUTE_S, tuple(events), source=source)


def _named(rows: Iterable[tuple[float, str, str]], source: str) -> History:
    """Nodes that come and go by name, each on the place of one that is gone."""
    changes: list[tuple[float, int, What]] = []
    place, free, most, last = dict[str, int](), set[int](), 0, 0.0
    for at_s, what, node in rows:
        last = at_s
        if what == "add" and node not in place:
            number = min(free, default=most)
            most, free = max(most, number + 1), free - {number}
            place[node] = number
            changes.append((at_s, number, "back"))
        elif what == "remove":
            number = place.pop(node)
            free.add(number)
            changes.append((at_s, number, "lost"))
    late = [n for n in range(most) if next(at for at, m, _ in changes if m == n) > 0]
    events = [Incident(0.0, n, "lost") for n in late]  # not there yet
    events += [Incident(at, n, what) for at, n, what in changes if at > 0 or what == "lost"]
    return History(most, last + MINUTE_S, tuple(events), source=source)


def _faults(rows: list[dict[str, Any]], source: str) -> History:
    """The servers with most faults; one is back when none of its faults lasts."""
    often = Counter(row["node_id"] for row in rows)
    number = {name: n for n, (name, _) in enumerate(sorted(
        often.items(), key=lambda own: (-own[1], own[0]))[:MOST_SERVERS])}
    lasting: Counter[tuple[int, str, float]] = Counter()
    events: list[Incident] = []
    for row in sorted((r for r in rows if r["node_id"] in number), key=lambda r: r["event_time"]):
        name, n = row["fault_type"]["Desc"], number[row["node_id"]]
        what = "link" if name in LINKS else "speed" if name in SPEEDS else "lost"
        factor = LINKS.get(name, SPEEDS.get(name, 0.0))
        lasting[n, what, factor] += 1 if row["event_type"] == "fault_start" else -1
        events += _changed(events, lasting, n, what, row["event_time"] * DAY_S)
    return History(len(number), events[-1].at_s + DAY_S, tuple(events), SERVER, source)


def _changed(events: list[Incident], lasting: Counter[tuple[int, str, float]], node: int, what: str,
             at_s: float) -> list[Incident]:
    """What a fault that begins or ends changes for its node."""
    worst = min((f for (n, w, f), count in lasting.items()
                 if n == node and w == what and count > 0), default=1.0)
    own = [e for e in events if e.node == node and e.what in
           ((what,) if what != "lost" else ("lost", "back"))]
    if what != "lost":
        return [] if (own[-1].factor if own else 1.0) == worst else [
            Incident(at_s, node, what, worst)]  # type: ignore[arg-type]
    is_lost = bool(own) and own[-1].what == "lost"
    return [] if is_lost == (worst < 1) else [Incident(at_s, node, "back" if is_lost else "lost")]


# --- composed -------------------------------------------------------------------------------------


def rates(text: str) -> list[float]:
    """Bytes per second of pairs of regions."""
    return sorted(float(row["bitrate_Bps"]) for row in csv.DictReader(text.splitlines()))


def day(levels: list[float], source: str, num_nodes: int = MOST_SERVERS,
        seed: int = SEED) -> History:
    """A composed day: groups of eight nodes share a link. Its level, beside the median pair of
    regions, changes some times a day, and jumps by 10 to 30 % within minutes. A device is slow for
    ten minutes, about as often as faults are; nodes are lost for minutes to hours."""
    draw, events = random.Random(seed), list[Incident]()
    median = levels[len(levels) // 2]
    for group in range(0, num_nodes, 8):
        own = range(group, min(group + 8, num_nodes))
        at_s, level = 0.0, 1.0
        while (at_s := at_s + draw.expovariate(1 / 2400)) < DAY_S:
            if draw.random() < 0.1:
                level = min(1.0, max(0.1, draw.choice(levels) / median))
            jump = round(level * draw.choice([1.0, draw.uniform(0.7, 0.9)]), 3)
            events += [Incident(at_s, n, "link", jump) for n in own]
    for _ in range(48):
        at_s, node = draw.uniform(0, DAY_S), draw.randrange(num_nodes)
        events += [Incident(at_s, node, "speed", round(draw.uniform(0.6, 0.95), 2)),
                   Incident(min(DAY_S, at_s + draw.expovariate(1 / 600)), node, "speed")]
    for node in draw.sample(range(num_nodes), num_nodes // 8):
        at_s = draw.uniform(0, DAY_S)
        events += [Incident(at_s, node, "lost"),
                   Incident(min(DAY_S, at_s + draw.lognormvariate(7.5, 1.2)), node, "back")]
    return History(num_nodes, DAY_S, tuple(sorted(events, key=lambda e: e.at_s)), SERVER,
                   f"composed, levels from {source}")


def noise(num_nodes: int = MOST_SERVERS, seed: int = SEED) -> History:
    """Two hours in which, every other minute, some node is slower for a minute, by 10 to 30 %."""
    draw, events = random.Random(seed), list[Incident]()
    for k in range(60):
        node, what = draw.randrange(num_nodes), draw.choice(SLOW)
        events += [Incident(2 * k * MINUTE_S, node, what, round(draw.uniform(0.7, 0.9), 3)),
                   Incident((2 * k + 1) * MINUTE_S, node, what)]
    return History(num_nodes, 7200.0, tuple(events), SERVER, "composed: minutes of 10 to 30 %")

"""Linears in rings on n x n ranks: the index tables, the messages, and the numbers of one process.

The paper's tables are written down here once more, block by block; the code under test moves real
blocks, between threads for the tables and between processes for everything else.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, fx, nn

import oracle
import zoo
from autopar_torch import files
from autopar_torch.cluster import CPU_CORE, Device, Link
from autopar_torch.plan import Plan, fit
from autopar_torch.run import shardings
from autopar_torch.shard import solve, spatial
from autopar_torch.shard.eliminate import Table
from autopar_torch.shard.estimate import estimate
from autopar_torch.shard.layout import (
    Split,
    Square,
    cuts,
    layout_text,
    parse_layout,
    side,
)
from autopar_torch.shard.parts import join, piece
from autopar_torch.shard.price import Prices, ring_waits
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart

# --- the tables --------------------------------------------------------------------------------


Place = tuple[int, int]
Mail = defaultdict[tuple[Place, Place, int], "queue.Queue[Tensor]"]  # (to, from, which block)


class ThreadRing:
    """The ring of one device, played by a thread; writes down what it holds."""

    def __init__(self, n: int, r: int, c: int, mail: Mail) -> None:
        self.n, self.r, self.c, self.mail = n, r, c, mail
        self.held: list[list[Tensor]] = []
        self.num_sent = 0

    def start(self, blocks: Sequence[Tensor], shifts: Sequence[tuple[int, int]]) -> Any:
        for k, (block, shift) in enumerate(zip(blocks, shifts, strict=True)):
            self.mail[self._at(shift, -1), (self.r, self.c), k].put(block.clone())
        self.held.append(list(blocks))
        self.num_sent += len(blocks)

        def land() -> list[Tensor]:
            came = [self.mail[(self.r, self.c), self._at(shift, 1), k].get(timeout=20)
                    for k, shift in enumerate(shifts)]
            self.held.append(came)
            return came

        return land

    def _at(self, shift: tuple[int, int], sign: int) -> tuple[int, int]:
        return (self.r + sign * shift[0]) % self.n, (self.c + sign * shift[1]) % self.n

    def steps(self) -> list[list[Tensor]]:
        """What was held at steps 0 .. n - 1: at a start, and after the last landing."""
        return [*self.held[: 2 * self.n - 2 : 2], self.held[2 * self.n - 3]]


def on_square(n: int, run: Callable[[ThreadRing], Any]) -> dict[tuple[int, int], Any]:
    """(r, c) -> what `run` returned there, all devices at once."""
    places = list(itertools.product(range(n), repeat=2))
    mail: Mail = defaultdict(queue.Queue)
    for to, come, k in itertools.product(places, places, (0, 1)):
        mail[to, come, k]  # made before threads ask for it at once
    results: dict[tuple[int, int], Any] = {}

    def work(r: int, c: int) -> None:
        results[r, c] = run(ThreadRing(n, r, c, mail))

    threads = [threading.Thread(target=work, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(results) == set(places), "a device waits for a block that nobody sends"
    return results


def block(x: np.ndarray, n: int, i: int, j: int) -> Tensor:
    rows, cols = x.shape[0] // n, x.shape[1] // n
    i, j = i % n, j % n
    return torch.tensor(x[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_blocks_in_rings_give_the_dense_results_at_their_places(n: int, transposed: bool) -> None:
    rng = np.random.default_rng(n)
    x, w, dy = (rng.standard_normal(size) for size in ((2 * n, 3 * n), (3 * n, 5 * n),
                                                        (2 * n, 5 * n)))

    def run(ring: ThreadRing) -> tuple[Any, ...]:
        r, c = ring.r, ring.c
        own = block(w, n, r + c, c)
        own = own.t().contiguous() if transposed else own
        y, end = spatial.forward(ring, block(x, n, r, r + c), own, transposed)
        sent = [ring.num_sent]
        dx, dy_end = spatial.backward(ring, block(dy, n, r, c), own, transposed)
        sent.append(ring.num_sent)
        dw = spatial.gradient(ring, end, dy_end, transposed)
        return y, dx, dw.t() if transposed else dw, [*sent, ring.num_sent]

    for (r, c), (y, dx, dw, sent) in on_square(n, run).items():
        assert torch.allclose(y, block(x @ w, n, r, c))
        assert torch.allclose(dx, block(dy @ w.T, n, r, r + c))
        assert torch.allclose(dw, block(x.T @ dy, n, r + c, c))
        assert np.diff([0, *sent]).tolist() == [2 * (n - 1), 2 * (n - 1), 2 * n - 1]


Phase = dict[tuple[int, int], list[tuple[int, ...]]]  # device -> the two blocks of every step


def labelled(n: int) -> dict[str, Phase]:
    """Run with blocks that carry their own place: what every device holds at every step."""
    names = torch.arange(n * n, dtype=torch.float64).view(n, n).numpy()

    def phases(ring: ThreadRing) -> dict[str, list[tuple[int, ...]]]:
        r, c = ring.r, ring.c
        x, w, dy = (block(names, n, *at) for at in ((r, r + c), (r + c, c), (r, c)))
        found = {}
        for name, run in {
            "F": lambda: spatial.forward(ring, x, w, False),
            "B": lambda: spatial.backward(ring, dy, w, False),
            "G": lambda: spatial.gradient(ring, found["F"][1], found["B"][1], False),
        }.items():
            ring.held = []
            result = run()
            found[name] = (ring.steps(), result[1] if name != "G" else None)
        return {name: [tuple(divmod(int(b), n)[k] for b in step for k in (0, 1)) for step in steps]
                for name, (steps, _) in found.items()}

    devices = on_square(n, phases)
    return {name: {place: held[name] for place, held in devices.items()} for name in "FBG"}


def paper(n: int, phase: str, r: int, c: int, t: int) -> tuple[int, ...]:
    """Equations 4 to 6: (M, N, K) of the product of device (r, c) at step t."""
    last = t == n - 1
    return {
        "F": (r, (r + c + t) % n, c),
        "B": (r, (r + c - 1) % n, (c + t) % n),
        "G": ((r + t) % n, (r + c - 1 + last) % n, (c - 1 + last) % n),
    }[phase]


@pytest.mark.parametrize("n", [2, 4])
def test_every_device_holds_what_the_tables_of_the_paper_say(n: int) -> None:
    held = labelled(n)
    for r, c, t in itertools.product(range(n), repeat=3):
        m, i, k = paper(n, "F", r, c, t)
        assert held["F"][r, c][t] == (m, i, i, k)
        m, i, k = paper(n, "G", r, c, t)
        assert held["G"][r, c][t] == (m, i, m, k)
        m, i, k = paper(n, "B", r, c, t)
        i = (i + 1) % n  # weights stay home, so the backward starts one block further
        assert held["B"][r, c][t] == (m, k, i, k)


@pytest.mark.parametrize("n", [2, 4])
def test_no_two_devices_ever_hold_the_same_block(n: int) -> None:
    for phase in labelled(n).values():
        for t in range(n):
            for operand in (slice(0, 2), slice(2, 4)):
                assert len({steps[t][operand] for steps in phase.values()}) == n * n


def test_the_worked_example_of_the_paper_on_16_devices() -> None:
    held = labelled(4)
    assert held["F"][1, 2][0] == (1, 3, 3, 2)  # O12 += I13 W32
    assert held["G"][0, 0][0] == (0, 3, 0, 3)  # dW33 += I03' dO03
    assert held["G"][0, 0][3][1::2] == (0, 0)  # the last step is one of dW00
    assert (0, 0, 3, 0) in held["B"][0, 3]  # dI03 += dO00 W03', at the device that has dI03 here


# --- layouts -----------------------------------------------------------------------------------

SQUARES = [Square(Split(a), Split(b), skew) for a, b in ((0, 1), (1, 0)) for skew in "oiw"]
FUSED = [Square(Split(0), Split(1, 3), "o"), Square(Split(0, 2), Split(1), "i")]
COLUMN = Square(None, Split(0), "o")


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4),
       st.sampled_from("oiw"), st.booleans())
def test_squares_read_back_from_their_text(a: int, x: int, b: int, y: int, skew: str,
                                           column: bool) -> None:
    layout = Square(None if column else Split(a, x), Split(b, y), skew)
    assert parse_layout(layout_text(layout)) == layout


@pytest.mark.parametrize("layout", [*SQUARES, *FUSED, COLUMN], ids=layout_text)
@pytest.mark.parametrize("parts", [4, 16])
def test_the_pieces_of_a_square_make_up_the_whole(layout: Square, parts: int) -> None:
    whole = torch.arange(48 * 48).view(48, 48)
    pieces = [piece(whole, layout, parts, j) for j in range(parts)]
    distinct = {tuple(cuts(layout, parts, j)) for j in range(parts)}
    assert len(distinct) == (parts if layout.row else side(parts))
    assert {p.numel() for p in pieces} == {whole.numel() // len(distinct)}
    assert torch.equal(join(pieces, layout), whole)


# --- the solver --------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Two linears over a sequence."""

    def __init__(self, bias: bool = True, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias), nn.Linear(2 * width, width, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(nn.functional.gelu(self.up(x))), y)


def _tiny_batch(rows: int, seed: int, pad: bool) -> zoo.Batch:
    gen = torch.Generator().manual_seed(seed)
    return {key: torch.randn(rows, 16, 16, generator=gen) for key in "xy"}


zoo.OWN["tiny"] = (Tiny, _tiny_batch)
MANY_ROWS = 100_000  # of a batch in prices: bytes count, latency does not


class Pair(nn.Module):
    """Two linears in a row: a block small enough to try every assignment on two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, False), nn.Linear(32, 16, False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.up(x)))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


SLOW = Device("slow", 1e6, 1e12, 2**30)  # rings are hidden under its matmuls


@functools.cache
def pair() -> fx.Graph:
    traced = trace(Pairs(), take_apart((), _tiny_batch(4, 0, False))[0])
    return traced.programs[traced.graph.blocks[1].kind]


def brute_force(sizes: dict[str, int], tables: list[Table], keep: Sequence[str]) -> np.ndarray:
    """Every assignment of every variable: the least total for each of the kept ones."""
    names = [*keep, *(name for name in sizes if name not in keep)]
    total = np.zeros([sizes[name] for name in names])
    for own, table in tables:
        order = [name for name in names if name in own]
        shape = [sizes[name] if name in own else 1 for name in names]
        total += table.transpose([own.index(name) for name in order]).reshape(shape)
    return total.min(tuple(range(len(keep), len(names))))


def solved_and_tried(mesh: tuple[int, ...], prices: Prices) -> tuple[solve.KindTable, np.ndarray]:
    """What the solver found over the forms at the borders, and what trying everything finds."""
    with mock.patch.object(solve, "eliminate", side_effect=solve.eliminate) as seen:
        table = solve.tabulate(pair(), mesh, prices)
    sizes, tables, _ = seen.call_args.args
    return table, brute_force(sizes, tables, tuple(table.borders))


@st.composite
def priced(draw: st.DrawFn) -> Prices:
    links = [Link(draw(st.sampled_from([0.0, 1e-5])), draw(st.sampled_from([1e7, 1e10])))
             for _ in range(2)]
    device = draw(st.sampled_from([CPU_CORE, SLOW]))
    worth = draw(st.sampled_from([0.0, 1e-10, 1e-7]))
    rows, hides = draw(st.sampled_from([1, 100_000])), draw(st.sampled_from([0.0, 1.0]))
    return Prices(device, tuple(links), worth, rows, hides)


@pytest.mark.parametrize("mesh", [(4,), (2, 4), (4, 2), (4, 4)])
@settings(max_examples=8, deadline=None)
@given(priced())
def test_elimination_equals_brute_force_with_rings(mesh: tuple[int, ...], prices: Prices) -> None:
    """Rings on any axis of four beside an axis of two, or beside another that could have them."""
    table, tried = solved_and_tried(mesh, prices._replace(links=prices.links[: len(mesh)]))
    axes = {c.ring for options in table.choices.values() for c in options}
    assert axes == {None, *(axis for axis, parts in enumerate(mesh) if parts == 4)}
    ((_, found),) = table.solution.tables
    assert found == pytest.approx(tried)


@pytest.mark.parametrize("mesh", [(2, 4), (4, 4)])
def test_brute_force_too_finds_a_ring_beside_an_ordinary_cut(mesh: tuple[int, ...]) -> None:
    """Where bytes are dear and what travels in rings is hidden under a slow matmul."""
    table, tried = solved_and_tried(mesh, Prices(SLOW, (Link(0.0, 1e7),) * 2, 1e-7))
    places = np.unravel_index(tried.argmin(), tried.shape)
    best = solve.read_out(table, "pair", dict(zip(table.borders, map(int, places), strict=True)))
    assert best.ops["linear_3"] == "S2,S1>P;S1x2i,S1x0w>S1x2o"


def test_a_ring_waits_for_what_computation_does_not_hide() -> None:
    """Steps of 10 s; under one of the forward 8 bytes travel, then 5, 5 and 4, at 4 s a byte."""
    blocks = {"i": 4.0, "w": 4.0, "o": 1.0}
    assert ring_waits(20.0, 2, blocks, Link(0.0, 0.25), 1.0) == (22, 10 + 10 + 6)
    assert ring_waits(20.0, 2, blocks, Link(0.0, 0.25), 0.0) == (32, 20 + 20 + 16)


def test_a_block_in_rings_is_estimated_with_what_it_waits_for() -> None:
    traced = trace(Tiny(), take_apart((), _tiny_batch(4, 0, False))[0])
    block = traced.graph.blocks[0]
    table = solve.tabulate(traced.programs[block.kind], (4,), Prices(), spatial="always")
    sharding = solve.read_out(table, block.kind, dict.fromkeys(table.borders, 0))
    slow, fast = (estimate(traced.programs[block.kind], sharding, Prices(links=(link,)))
                  for link in (Link(1.0, 1e9), Link(0.0, 1e9)))
    assert slow.comm_forward_s - fast.comm_forward_s == pytest.approx(1 + 1)  # and to gather y
    assert slow.comm_backward_s - fast.comm_backward_s == pytest.approx(3)


def _traced(name: str) -> Any:
    return trace(zoo.build(name), take_apart((), zoo.batch(name, oracle.ROWS, pad=True))[0])


def ring_plan(name: str, degrees: dict[str, Any], pins: shardings.Pins | None = None,
              rows: int = MANY_ROWS) -> Plan:
    """A plan whose linears all run in rings, through its file."""
    traced = _traced(name)
    plan = fit(Plan.uniform(**degrees), traced.graph)
    plan = shardings.complete(plan, traced, rows, pins, spatial="always")
    return files.decode(files.encode(plan), Plan)


def rings(plan: Plan) -> list[str]:
    """The linears that run in rings."""
    texts = (text for sharding in plan.shardings for text in sharding.ops.values())
    return [text for text in texts if "w" in text]


def test_rings_are_chosen_where_they_are_cheapest_and_never_where_forbidden() -> None:
    """Matmuls that take longer than their blocks travel, weights too big to be had whole."""
    with torch.device("meta"):
        example = {key: torch.zeros(1, 4096, 4096) for key in "xy"}
        traced = trace(Tiny(width=4096), take_apart((), example)[0])
    plan = fit(Plan.uniform(tp=4), traced.graph)
    found = {how: shardings.complete(plan, traced, 1, None, {(4,): Prices()}, how)
             for how in ("free", "never", "always")}
    assert rings(found["free"]) and not rings(found["never"])
    cost = {how: sum(s.cost_s for s in plan.shardings) for how, plan in found.items()}
    assert cost["free"] < cost["never"] and cost["free"] <= cost["always"]

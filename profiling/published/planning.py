"""What Sailor's planner reads (seconds and sizes of layers, fits of links) as a problem of ours."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from autopar_torch.cluster import Cluster, Device, Link
from autopar_torch.datasheets import hardware
from autopar_torch.errors import ProfileError
from autopar_torch.model import ROWS, Block, Kind, ModelGraph, ParamInfo, TensorInfo
from autopar_torch.plan import Sharding
from autopar_torch.profile import BlockCost, BlockCosts, Curve, Overheads, Profile, sharding_key
from autopar_torch.search.space import Option
from autopar_torch.simulate.network import AssumedLookup

HERE = Path(__file__).resolve().parent / "planning"
FLOAT_BYTES = 4
FIXED_BYTES, TENSOR_BYTES = 2e9, 1e9  # beside the model, and more of it in tensor groups
COPIES = 2  # of every parameter, beside weights, gradients and Adam's: 24 bytes in all
PER_NODE = 4
SMALLEST_MB = 0.125  # below it fits may turn negative, so bandwidth is taken to be constant
FILES = ("layer_times.json", "layer_sizes.json", "network_coeffs_all_homo.json")


class Fit(NamedTuple):
    """GB/s over the logarithm of a message's MB, and the most bytes per second."""

    coefficients: tuple[float, float, float]
    most: float

    def seconds(self, num_bytes: float) -> float:
        size = math.log2(max(num_bytes / 1e6, SMALLEST_MB))
        a, b, c = self.coefficients
        return num_bytes / 1e9 / (c + b * size + a * size * size)

    def ring(self, num_bytes: float, count: int) -> float:
        """A ring all-reduce of one bucket."""
        return 2 * (count - 1) * self.seconds(num_bytes / count) if num_bytes else 0.0


class Data(NamedTuple):
    """The files of a folder: [device][rows][tensor degree][layer], [degree][layer], fits."""

    times: dict[str, Any]
    sizes: dict[str, Any]
    fits: dict[tuple[str, int], Fit]

    @property
    def num_layers(self) -> int:
        return len(self.sizes["1"])

    def seconds(self, device: str, rows: int, degree: int, layer: int) -> tuple[float, ...]:
        """Forward, backward and update."""
        try:
            return tuple(self.times[device][str(rows)][str(degree)][str(layer)])
        except KeyError:
            raise ProfileError(
                f"no seconds of {rows} rows of layer {layer} on {degree} x {device}",
                where="layer_times.json", fix="price plans of what was measured") from None

    def size(self, degree: int, layer: int, what: str) -> int:
        return int(self.sizes[str(degree)][str(layer)][what])

    def slower(self, a: tuple[str, int], b: tuple[str, int]) -> Fit:
        """Between so many devices of one kind and of another: as quick as the slower of both."""
        return min(self.fits[a], self.fits[b], key=lambda fit: fit.most)


def read(folder: Path = HERE, model: str = "OPT-350") -> Data:
    for name in FILES:
        if not (folder / name).exists():
            raise ProfileError(f"{folder} has no {name}", where="--planning",
                               fix="name a folder with " + ", ".join(FILES))
    times, sizes, links = (json.loads((folder / name).read_text(encoding="utf-8"))
                           for name in FILES)
    fits = {(device, int(count)): Fit(tuple(fit), most)
            for device, own in links["inter"].items() for count, (fit, most) in own.items()}
    return Data(times[model], sizes[model], fits)


# --- a model of equal blocks, and ways to split it ------------------------------------------------


def kind_of(data: Data, layer: int) -> str:
    """Layers of one kind take equally long: all but the ends and the first of the others."""
    return {0: "embedding", 1: "first", data.num_layers - 1: "head"}.get(layer, "block")


def _parts(data: Data, layer: int) -> dict[str, int]:
    """Elements that a tensor group cuts, and that each of it holds whole, by the first degrees."""
    one, two = (data.size(degree, layer, "params_floats") for degree in (1, 2))
    return {"cut": 2 * (one - two), "whole": 2 * two - one}


def graph(data: Data) -> ModelGraph:
    """A chain; what crosses it has the size that a layer returns."""
    width = data.size(1, 1, "act_output_floats")
    value = TensorInfo((ROWS, width), "float32", True)
    kinds: dict[str, Kind] = {}
    blocks, params = [], {}
    for layer in range(data.num_layers):
        name, slots = kind_of(data, layer), {}
        for slot, size in _parts(data, layer).items():
            slots[slot] = TensorInfo((size,), "float32", True)
            slots[f"{slot} copies"] = TensorInfo((COPIES * size,), "float32")
        names = {slot: f"{layer} {slot}" for slot in slots}
        params |= {names[slot]: ParamInfo(info.shape, "float32", info.grad, not info.grad)
                   for slot, info in slots.items()}
        inputs, outputs = {"x0": value} if layer else {}, {"y0": value}
        kinds.setdefault(name, Kind(name, inputs, {}, slots, outputs, 1, 1.0))
        blocks.append(Block(f"layer {layer}", name, {"x0": f"v{layer - 1}"} if layer else {}, {},
                            names, {"y0": f"v{layer}"}))
    return ModelGraph(kinds, tuple(blocks), params, {"loss": f"v{data.num_layers - 1}"})


def options(data: Data) -> list[Option]:
    """Every tensor degree; each rank of a group sends its part of a message."""
    names = [kind_of(data, layer) for layer in range(data.num_layers)]
    found = [Option((), (None,) * len(names))]
    forms = {"cut": "S0|S0", "whole": "R|R", "cut copies": "S0|S0", "whole copies": "R|R",
             "x0": "S1|S1", "y0": "S1|S1"}
    for degree in sorted(int(d) for d in data.sizes if 1 < int(d) <= PER_NODE):
        own = {name: Sharding(name, (degree,), {"o": "S0"}, forms) for name in set(names)}
        found.append(Option((degree,), tuple(own[name] for name in names)))
    return found


# --- prices ---------------------------------------------------------------------------------------


def profile(data: Data, pool: dict[str, int]) -> Profile:
    """Nodes of four devices, the quicker kind first; what was measured is all there is."""
    cluster = _cluster(data, pool)
    layers = {kind_of(data, layer): layer for layer in range(data.num_layers)}
    cells = tuple(
        BlockCosts(kind, sharding_key(option.shardings[layer]), pieces, "measured", number)
        for number, device in enumerate(cluster.classes) for option in options(data)
        for kind, layer in layers.items()
        if (pieces := _pieces(data, device.name, option.degree, layer)))
    overheads = tuple(Overheads(step_s=data.seconds(device.name, 1, 1, 1)[2],
                                fixed_bytes=FIXED_BYTES) for device in cluster.classes)
    return Profile(cluster, cells, overheads=overheads, assumed=True)


def _pieces(data: Data, device: str, degree: int, layer: int) -> tuple[BlockCost, ...]:
    known = sorted(int(rows) for rows, own in data.times[device].items() if str(degree) in own)
    return tuple(_piece(data, device, degree, layer, rows) for rows in known)


def _piece(data: Data, device: str, degree: int, layer: int, rows: int) -> BlockCost:
    forward, backward, _ = data.seconds(device, rows, degree, layer)
    kept, out = (rows * FLOAT_BYTES * float(data.size(degree, layer, what))
                 for what in ("act_mem_floats", "act_output_floats"))
    working = TENSOR_BYTES if degree > 1 else 0.0
    return BlockCost(rows, forward, backward, backward, out_bytes=out, kept_bytes=kept,
                     forward_bytes=working, backward_bytes=working)


def _cluster(data: Data, pool: dict[str, int]) -> Cluster:
    nodes: list[tuple[Device, ...]] = []
    for name, count in pool.items():
        nodes += [(hardware(name).device,) * PER_NODE] * (count // PER_NODE)
    slowest = Link(0.0, min(data.fits[name, 1].most for name in pool))
    return Cluster(tuple(nodes), slowest, slowest)


class Line(NamedTuple):
    """A curve by the fit of its slowest link."""

    op: str
    fit: Fit
    count: int
    core: float = 0.0
    held: float = 0.0
    beside: float = 1.0

    def seconds(self, num_bytes: float) -> float:
        if self.op == "send":
            return self.fit.seconds(num_bytes)
        return self.fit.ring(num_bytes, self.count) / (1 if self.op == "sum" else 2)


class Fitted(AssumedLookup):
    """A profile whose links are these fits."""

    def __init__(self, own: Profile, data: Data) -> None:
        super().__init__(own)
        self.data = data
        self._lines: dict[tuple[str, int, frozenset[int]], Line] = {}

    @cached_property
    def _names(self) -> list[str]:
        return [device.name for device in self.profile.cluster.classes]

    def curve(self, op: str, ranks: Sequence[int]) -> Curve:
        class_of = self.profile.cluster.class_of
        key = (op, len(ranks), frozenset(class_of[rank] for rank in ranks))
        if key not in self._lines:
            fit = min((self.data.fits[self._names[k], 1] for k in key[2]), key=lambda f: f.most)
            self._lines[key] = Line(op, fit, len(ranks))
        return self._lines[key]  # type: ignore[return-value]

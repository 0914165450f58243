"""Plan and simulate for machines that are not here: datasheets instead of measurements."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from .. import files, progress
from ..cluster import Cluster, Device
from ..datasheets import named
from ..errors import PlanError, ProfileError
from ..plan import Plan, Precision, check, fit
from ..profile import BlockCosts, BlockNeed, Overheads, Profile, few, merged
from ..run import shardings
from ..search.space import Constraints, Option, candidates, divisors
from ..shard.estimate import Again, estimate
from ..shard.price import Prices
from ..simulate.to_measure import block_needs
from ..trace import Traced
from . import ways
from .measuring import MOST_TP, Known, digest, tell_stale

log = logging.getLogger("autopar_torch")

Where = Cluster | Known | str | os.PathLike[str]
MOST_ROWS = 8  # numbers of rows that are estimated; between them lie straight lines
ADAM_PASSES, ADD_PASSES, COPY_PASSES = 7, 3, 2  # reads and writes of every byte
HALF = 0.5  # bytes of a bfloat16 leaf per byte of its float32 master


def place_of(where: Where, network: str = "") -> Cluster | Known:
    """Machines as they are, by name (`16x8xH100`), or from a file: described, or measured. A name
    may be told a `network`: `400Gb/s` for every device, or by name."""
    if network and not (isinstance(where, str) and Path(where).suffix != ".json"):
        raise PlanError("only machines that are named take a network", where="network",
                        fix="leave it out: a description has its own links")
    if isinstance(where, (Cluster, Known)):
        return files.checked(where, type(where), "cluster")
    if not isinstance(where, (str, os.PathLike)):
        raise PlanError(f"{type(where).__name__} is no cluster", where="cluster",
                        fix="give a Cluster, a name like 16x8xH100, or a JSON file")
    path = Path(where)
    if path.suffix == ".json":
        measured = b'"options"' in files.read(path)
        return files.load(path, Known) if measured else files.load(path, Cluster)
    return named(str(where), network)


def known_of(traced: Traced, num_rows: int, where: Where, limits: Constraints) -> Known:
    """What was measured, or what datasheets say."""
    place = place_of(where)
    if isinstance(place, Known):
        return _of_this(place, traced)
    return assumed(traced, num_rows, place, limits)


def _of_this(known: Known, traced: Traced) -> Known:
    """The measured profile, refused if it is of another model."""
    if known.model and known.model != digest(traced.graph):
        raise ProfileError(
            "another model was measured, or this one in another precision", where="cluster",
            fix="measure this one (autopar measure, with the same --precision)",
        )
    tell_stale(known)
    return known


def profile_for(plan: Plan, traced: Traced, num_rows: int, where: Where) -> tuple[Plan, Profile]:
    """The plan with everything written down, and a profile that prices it."""
    place = place_of(where)
    cluster = place.profile.cluster if isinstance(place, Known) else place
    check(plan, cluster.num_devices, "the cluster has")
    whole = fit(plan, traced.graph)
    if num_rows < (parts := sum(replica.num_micro_batches for replica in plan.replicas)):
        log.warning("the batch has %d row(s) for %d micro-batches of the plan, so some do nothing: "
                    "say global_batch_size=", num_rows, parts)
    rows = max(1, num_rows // whole.num_micro_batches)
    if isinstance(place, Known):
        whole = shardings.complete(whole, traced, rows)
        shardings.check(whole, traced)
        return whole, _of_this(place, traced).profile
    groups: dict[tuple[int, ...], set[tuple[int, ...]]] = {(): set()}  # by mesh
    for stage in (stage for replica in whole.replicas for stage in replica.stages):
        groups.setdefault(stage.axes if len(stage.devices) > 1 else (), set()).add(stage.devices)
    whole = shardings.complete(whole, traced, rows, priced={
        mesh: _slowest_prices(place, mesh, own)._replace(rows=rows)
        for mesh, own in groups.items() if mesh})
    shardings.check(whole, traced)
    needs = dict.fromkeys(block_needs(whole, traced.graph, num_rows))
    by_class = {mesh: _prices(place, mesh, own) for mesh, own in groups.items()}
    costs = [_costs(need, traced, k, by_class[need.sharding.mesh if need.sharding else ()][k])
             for need in needs for k in range(len(place.classes))]
    return whole, Profile(place, merged(costs), assumed=True,
                          overheads=tuple(overheads(d, plan.precision) for d in place.classes))


def _costs(need: BlockNeed, traced: Traced, number: int, prices: Prices) -> BlockCosts:
    """Of the class with this number, at its prices."""
    cost = estimate(traced.programs[need.kind], need.sharding, prices._replace(rows=need.rows))
    cost = Again(traced.programs[need.kind], need.sharding, prices)(cost, need.recompute)
    return BlockCosts(need.kind, need.key, (cost,), "datasheet", number)


def assumed(traced: Traced, num_rows: int, cluster: Cluster, limits: Constraints) -> Known:
    """Every way to split the model on the cluster, with what its datasheets say about each."""
    groups = {mesh: ways.neighbours(cluster, mesh)
              for mesh in ways.meshes(cluster, MOST_TP, limits)}
    options = tuple(ways.option(traced, mesh, _slowest_prices(cluster, mesh, own), limits.rings)
                    for mesh, own in progress.counted("splitting blocks", groups.items()))
    return Known(options, priced(traced, num_rows, cluster, limits, options))


def priced(traced: Traced, num_rows: int, cluster: Cluster, limits: Constraints,
           options: Sequence[Option]) -> Profile:
    """What the datasheets of a cluster say about ways to split the model."""
    groups = {option.mesh: ways.neighbours(cluster, option.mesh) for option in options}
    found = candidates(options, traced.graph, cluster.num_devices, num_rows, limits)
    rows = few(sorted({c.rows(num_rows) for c in found}) or divisors(num_rows), MOST_ROWS)
    prices = {mesh: _prices(cluster, mesh, own) for mesh, own in groups.items()}
    costs = ways.estimated(traced, options, rows, prices)
    return Profile(cluster, tuple(costs), assumed=True,
                   overheads=tuple(overheads(d, limits.precision) for d in cluster.classes))


def slowest(cluster: Cluster) -> Device:
    """The slowest device: with equal shares, all others wait for it."""
    return min(set(cluster.devices), key=lambda d: (d.flops_per_s, d.memory_bytes_per_s, d.name))


def overheads(device: Device, precision: Precision) -> Overheads:
    """What a step costs beside its blocks: passes over memory."""
    byte_s = 1 / (device.memory_bytes_per_s * device.memory_efficiency)
    leaf = HALF if precision == "bfloat16" else 0.0
    return Overheads(
        update_s_per_byte=(ADAM_PASSES + leaf) * byte_s, add_s_per_byte=ADD_PASSES * byte_s,
        copy_s_per_byte=COPY_PASSES * byte_s, cut_s_per_byte=COPY_PASSES * byte_s,
        fill_s_per_byte=COPY_PASSES * byte_s, fixed_bytes=float(device.fixed_bytes),
    )


def _slowest_prices(cluster: Cluster, mesh: Sequence[int],
                    groups: Collection[tuple[int, ...]]) -> Prices:
    """For all tensor groups alike: they run one program."""
    return Prices(slowest(cluster), ways.links(cluster, mesh, groups))


def _prices(cluster: Cluster, mesh: Sequence[int],
            groups: Collection[tuple[int, ...]]) -> list[Prices]:
    """Per class of devices: with the links of the tensor groups that it is in (of all, if none)."""
    in_group = [{cluster.class_of[rank] for rank in group} for group in groups]
    own = [[g for g, there in zip(groups, in_group, strict=True) if k in there]
           for k in range(len(cluster.classes))]
    return [Prices(device, ways.links(cluster, mesh, some or groups))
            for device, some in zip(cluster.classes, own, strict=True)]


__all__ = ["Where", "assumed", "known_of", "place_of", "profile_for"]

"""Unequal machines: zones, what their devices share, the names of clusters and networks."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from autopar_torch import Plan, api, files
from autopar_torch.cluster import Cluster, Device, Link, Zone, ZoneLink, slowest_of
from autopar_torch.datasheets import hardware, known, named, networks
from autopar_torch.errors import FileError, NounError, PlanError
from autopar_torch.find import ways
from autopar_torch.find.offline import place_of, profile_for
from autopar_torch.profile import Curve, Profile
from autopar_torch.simulate import simulate
from autopar_torch.simulate.equal_ranks import representatives
from autopar_torch.simulate.network import assumed, lookup
from autopar_torch.trace import trace
from autopar_torch.trace.call import take_apart
from slow import slowly
from zoo import NanoGPT

FAST, SLOW = Device("fast", 2e12, 2e11, 2**30), Device("slow", 1e12, 1e11, 2**30)
NEAR, FAR = Link(1e-5, 1e10), Link(2e-5, 1e9)
OPS = ("sum", "scatter", "gather", "send")
MANY = settings(deadline=None, max_examples=150)
seeds = st.integers(0, 10**6)


def unequal(seed: int) -> Cluster:
    """Up to five nodes of up to four devices in up to three zones."""
    draw = random.Random(seed)
    nodes = [tuple(draw.choices((FAST, SLOW), k=draw.randint(1, 4)))
             for _ in range(draw.randint(1, 5))]
    zone_of = [draw.randrange(3) for _ in nodes]
    order = sorted(set(zone_of))

    def link() -> Link:
        return Link(draw.choice((1e-5, 3e-5)), draw.choice((1e8, 1e9, 5e9)))

    def maybe() -> Link | None:
        return draw.choice((link(), None))

    zones = tuple(Zone(tuple(n for n, z in enumerate(zone_of) if z == own), maybe(), maybe(),
                       draw.randrange(3), draw.randrange(3)) for own in order)
    pairs = [(b, a) for b in range(len(order)) for a in range(b) if draw.random() < 0.7]
    links = tuple(ZoneLink(pair, link()) for pair in pairs)
    return Cluster(tuple(nodes), link(), link(), zones=zones, links=links or msgspec.UNSET)


def groups(cluster: Cluster, seed: int, count: int = 12) -> list[tuple[int, ...]]:
    draw, world = random.Random(seed), range(cluster.num_devices)
    return [tuple(draw.sample(world, draw.randint(1, len(world)))) for _ in range(count)]


def pairs(cluster: Cluster, seed: int) -> list[tuple[int, ...]]:
    return [g[:2] for g in groups(cluster, seed) if len(g) > 1]


# --- groups of ranks ------------------------------------------------------------------------------


@given(seeds)
@MANY
def test_groups_with_the_same_text_take_equal_times(seed: int) -> None:
    cluster = unequal(seed)
    seen: dict[tuple[str, str], set[tuple[float, ...]]] = {}
    for op in OPS:
        for ranks in (pairs if op == "send" else groups)(cluster, seed):
            found = assumed(op, ranks, cluster)
            text = Curve(op, cluster.place(ranks), ((1.0, 1.0),)).group
            seen.setdefault((op, text), set()).add((found.seconds(8.0), found.seconds(1e6)))
    assert all(len(times) == 1 for times in seen.values()), seen


@given(seeds)
@MANY
def test_groups_of_other_classes_have_other_texts(seed: int) -> None:
    cluster = unequal(seed)
    by_text: dict[str, set[tuple[int, ...]]] = {}
    for ranks in groups(cluster, seed):
        classes = tuple(sorted(cluster.class_of[rank] for rank in ranks))
        by_text.setdefault(cluster.place(ranks), set()).add(classes)
    assert all(len(classes) == 1 for classes in by_text.values())


@given(st.integers(1, 4), st.integers(1, 4), seeds)
@MANY
def test_equal_clusters_keep_their_texts_and_files(nodes: int, per_node: int, seed: int) -> None:
    cluster = Cluster(((FAST,) * per_node,) * nodes, NEAR, FAR)
    for ranks in groups(cluster, seed):
        counts = Counter(rank // per_node for rank in ranks)
        assert cluster.place(ranks) == (
            "+".join(map(str, sorted(counts.values()))) + f" on {len(ranks)}")
        assert cluster.link(ranks) == (NEAR if len(counts) == 1 else FAR)
    fields = msgspec.to_builtins(cluster).keys()
    assert fields == {"nodes", "inside", "across", "changes", "cores"}


@given(seeds)
@MANY
def test_a_link_that_was_looked_up_before_is_that_of_the_group(seed: int) -> None:
    """Whether its ranks lie at equal distances or not."""
    cluster = unequal(seed)
    found, world = lookup(Profile(cluster, (), assumed=True)), cluster.num_devices
    steps = [tuple(range(a, world, step)) for a in range(world) for step in (1, 2, 3)]
    for ranks in (*steps, *groups(cluster, seed)):
        assert found.curve("sum", ranks) == assumed("sum", ranks, cluster)


def test_a_group_is_named_by_its_classes() -> None:
    cluster = named("1x2xH100 + 2xV100")
    assert cluster.place((0, 2)) == cluster.place((3, 1)) == "1+1 on 2 of 0+1"
    assert cluster.place((0, 1)) == "2 on 2 of 0"
    mixed = Cluster(((FAST, SLOW, SLOW),), NEAR, FAR)
    assert mixed.place((0, 1, 2)) == "3 on 3 of 0.1.1"
    shared = Cluster(((FAST,) * 4,) * 2, NEAR, FAR, zones=(Zone((0, 1), cards=2),))
    assert shared.place((0, 1, 4, 6)) == "2+2 on 4 by 1.1+1.2"


def test_a_group_takes_the_slowest_of_the_links_between_its_zones() -> None:
    zones = (Zone((0, 1), across=Link(1e-6, 8e9)), Zone((2,)), Zone((3,)))
    links = (ZoneLink((0, 1), Link(1e-6, 4e9)), ZoneLink((2, 0), Link(1e-6, 2e9)))
    cluster = Cluster(((FAST,),) * 4, NEAR, FAR, zones=zones, links=links)
    rates = [cluster.link(ranks).bytes_per_s for ranks in ((0, 1), (1, 2), (0, 1, 3), (0, 2, 3))]
    assert rates == [8e9, 4e9, 2e9, FAR.bytes_per_s]


def test_the_node_with_the_fewest_ranks_holds_up_the_others() -> None:
    cluster = Cluster(((FAST,) * 4, (FAST,)), Link(0.0, 1e30), Link(0.0, 1e9))
    assert assumed("gather", range(5), cluster).seconds(1e9) == pytest.approx(0.5)
    even = Cluster(((FAST,) * 4,) * 2, Link(0.0, 1e30), Link(0.0, 1e9))
    assert assumed("gather", range(8), even).seconds(1e9) == pytest.approx(0.125)


@given(seeds, st.integers(1, 6))
@MANY
def test_links_of_a_mesh_are_the_slowest_of_all_tensor_groups(seed: int, size: int) -> None:
    cluster = unequal(seed)
    world = cluster.num_devices
    every = [tuple(range(a, a + size)) for a in range(0, world - size + 1, size)]
    if size > 1 and every:
        found = ways.links(cluster, (size,), ways.neighbours(cluster, (size,)))
        assert found == (slowest_of(cluster.link(group) for group in every),)


def test_tensor_groups_are_as_wide_as_the_largest_node() -> None:
    cluster = named("1x2xV100 + 1x4xH100 + 1x2xV100")
    assert (2, 4) in ways.meshes(cluster, 8, api.Constraints())


# --- what is shared -------------------------------------------------------------------------------


def step_s(cluster: Cluster, **degrees: int) -> float:
    model = NanoGPT(256, 512, 8, 2, 64)
    call, _ = take_apart((), {n: torch.zeros(8, 64, dtype=torch.int64) for n in ("idx", "targets")})
    plan = Plan.uniform(**degrees, bucket_bytes=2**30)  # type: ignore[arg-type]
    whole, profile = profile_for(plan, traced := trace(model, call), 8, cluster)
    return simulate(whole, traced.graph, profile, 8).step_s


def two_nodes(across_rate: float, **zone: Any) -> Cluster:
    zones = (Zone((0, 1), **zone),) if zone else msgspec.UNSET
    return Cluster(((FAST,) * 4,) * 2, Link(0.0, 1e10), Link(0.0, across_rate), zones=zones)


@pytest.mark.parametrize("cards", [2, *slowly(1, 4, 9)])
@pytest.mark.parametrize("degrees", [{"tp": 4, "dp": 2}, {"dp": 8}])
def test_a_card_for_several_devices_is_as_slow_as_its_part_for_each(
    cards: int, degrees: dict[str, int]
) -> None:
    """Four teams that sum at once share it in the engine, one team of all devices in its curve."""
    sharing = 4 // min(cards, 4)
    assert step_s(two_nodes(1e9, cards=cards), **degrees) == pytest.approx(
        step_s(two_nodes(1e9 / sharing), **degrees), rel=1e-6)


def test_a_device_that_sends_alone_has_the_whole_card() -> None:
    shared, own = (assumed("sum", (0, 4), two_nodes(1e9, **zone)).seconds(1e6)
                   for zone in ({"cards": 1}, {}))
    assert shared == own


def test_what_leaves_a_node_goes_over_its_bus_too() -> None:
    """Four ranks on one bus of 1e10 have a quarter of it each, however fast their cards."""
    cluster = two_nodes(1e10, buses=1)
    assert assumed("gather", range(4), cluster).inside.bytes_per_s == 2.5e9
    assert assumed("gather", range(8), cluster).num_ways == 1
    assert cluster.link((0, 1)).bytes_per_s == 5e9, "two of them, if they are alone"
    assert cluster.link((0, 1), range(4)).bytes_per_s == 2.5e9
    assert cluster.link((0, 4), range(8)).bytes_per_s == 2.5e9
    own = lookup(Profile(two_nodes(5e9, buses=2), (), assumed=True))
    assert own.ways(1, (1, 5), True) == {"link 0 of 1": 1.0, "bus 0": 0.5}
    assert own.ways(3, (2, 3), False) == {"bus 2": 1.0}


def test_neighbours_share_a_card() -> None:
    cluster = Cluster(((FAST,) * 3, (FAST,) * 5), NEAR, FAR, zones=(Zone((0, 1), cards=2),))
    assert [cluster.card(rank) for rank in range(8)] == [0, 0, 2, 3, 3, 3, 6, 6]


def test_replicas_in_other_zones_are_not_equal() -> None:
    model = NanoGPT(64, 32, 2, 2, 16)
    call, _ = take_apart((), {n: torch.zeros(4, 16, dtype=torch.int64) for n in ("idx", "targets")})
    traced = trace(model, call)

    def leaders(cluster: Cluster) -> int:
        whole, profile = profile_for(Plan.uniform(dp=4), traced, 4, cluster)
        return len(set(representatives(whole, profile, 4).values()))

    equal = Cluster(((FAST,) * 2,) * 2, NEAR, FAR)
    assert leaders(equal) == 1
    assert leaders(replace(equal, zones=(Zone((0,), NEAR), Zone((1,), FAR)))) == 2
    assert leaders(replace(equal, zones=(Zone((0, 1), cards=1),))) == 4


def test_each_class_pays_for_its_own_links() -> None:
    model = NanoGPT(256, 512, 8, 2, 64)
    call, _ = take_apart((), {n: torch.zeros(8, 64, dtype=torch.int64) for n in ("idx", "targets")})
    traced, alike = trace(model, call), Cluster(((FAST,) * 2,) * 2, NEAR, FAR)
    mixed = replace(alike, zones=(Zone((0,)), Zone((1,), Link(1e-5, 1e8))))
    assert mixed.classes == (FAST, FAST)
    _, profile = profile_for(Plan.uniform(tp=2, dp=2), traced, 8, mixed)
    cost = {(c.kind, c.device): c.pieces[0].comm_forward_s for c in profile.cells if c.sharding}
    kinds = {kind for kind, _ in cost}
    assert any(cost[kind, 0] < 0.5 * cost[kind, 1] for kind in kinds)
    assert all(cost[kind, 0] <= cost[kind, 1] for kind in kinds)


# --- names ----------------------------------------------------------------------------------------

DEVICES = st.sampled_from(["H100", "A100-80", "V100"])
sizes = st.integers(1, 4)


@given(DEVICES, st.lists(sizes, min_size=1, max_size=4), sizes)
@MANY
def test_parts_that_are_equal_are_one_cluster(device: str, counts: list[int], size: int) -> None:
    parts = " + ".join(f"{count}x{size}x{device}" for count in counts)
    assert files.encode(named(parts)) == files.encode(named(f"{sum(counts)}x{size}x{device}"))


@given(st.lists(st.tuples(sizes, sizes, DEVICES), min_size=1, max_size=4))
@MANY
def test_each_part_has_the_links_that_it_has_alone(parts: list[tuple[int, int, str]]) -> None:
    texts = [f"{n}x{size}x{device}" for n, size, device in parts]
    cluster, start = named("+".join(texts)), 0
    assert files.decode(files.encode(cluster), Cluster) == cluster
    for text in texts:
        alone = named(text)
        own = tuple(range(start, start + alone.num_devices))
        assert cluster.link(own) == alone.link(range(alone.num_devices))
        assert cluster.devices[start : start + len(own)] == alone.devices
        start += len(own)


def test_between_parts_lies_the_slower_network_or_the_one_that_was_given() -> None:
    def between(text: str, given: str = "") -> float:
        cluster = named(text, given)
        return cluster.link((0, cluster.num_devices - 1)).bytes_per_s

    fabrics = {name: found.across.bytes_per_s for name, found in networks().items()}
    assert between("8xH100 + 8xV100") == fabrics["ib50"]
    assert between("2x8xH100@ib400 + 8xV100@efa") == fabrics["efa"]
    assert between("2x8xH100@ib400 + 8xV100", "roce100") == fabrics["roce100"]
    assert between("8xH100 + 8xV100", "400Gb/s") == 50e9 * 0.285  # what either reaches, the lesser


def test_a_network_is_told_apart_from_the_device() -> None:
    usual, other = named("2x8xH100"), named("2x8xH100@EFA")
    assert (other.nodes, other.inside) == (usual.nodes, usual.inside)
    assert other.across == networks()["efa"].across == named("2x8xH100", "efa").across
    reached = hardware("H100").fabric.reached
    for text in ("50GB/s", "400Gb/s", "400 Gb/s", "0.4Tb/s", "400000Mb/s"):
        assert named("2x8xH100", text).across.bytes_per_s == pytest.approx(50e9 * reached)
    assert named("2x8xH100@400Gb/s") == usual == named("2x8xH100@ib400")
    assert place_of("2x8xH100", "efa") == other


def test_a_device_names_a_network_that_there_is() -> None:
    assert {found.network for found in known().values()} <= networks().keys()


@pytest.mark.parametrize("text", [
    "8xH100 +", "+ 8xH100", "8xH100 ++ 8xH100", "8xH100@", "8xH100@ ib400", "8xH100@ib401",
    "8xH100@400", "8xH100@400gb/s", "8xH100@400Gbps", "8xH100@0Gb/s", "8xH100@-1Gb/s",
    "8xH100@ib400@efa", "131072xH100 + 1xH100", "8xH100 + 0x8xH100", "8xH100, 8xV100",
])
def test_a_name_that_makes_no_sense_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(PlanError, match="fix:"):
        named(text)


def test_only_what_is_named_takes_a_network(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    files.save(named("8xH100 + 8xV100"), path)
    assert place_of(path) == named("8xH100 + 8xV100")
    for where in (path, str(path), named("8xH100")):
        with pytest.raises(PlanError, match="own links"):
            place_of(where, "400Gb/s")
    with pytest.raises(PlanError, match="is no network"):
        place_of("8xH100", "fast")


# --- doors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [
    {"zones": (Zone((0,)),)}, {"zones": (Zone((0, 1, 2)),)}, {"zones": (Zone((0,)), Zone((0, 1)))},
    {"zones": (Zone((0, 0, 1)),)}, {"links": (ZoneLink((0, 1), FAR),)},
    {"zones": (Zone((0, 1)),), "links": (ZoneLink((0, 0), FAR),)},
    {"zones": (Zone((0,)), Zone((1,))), "links": (ZoneLink((0, 2), FAR),)},
    {"zones": (Zone((0,)), Zone((1,))), "links": (ZoneLink((0, 1), FAR), ZoneLink((1, 0), FAR))},
])
def test_zones_that_contradict_the_nodes_are_not_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(NounError):
        Cluster(((FAST,),) * 2, NEAR, FAR, **wrong)


@pytest.mark.parametrize(("old", "new"), [
    ('"zones":[{', '"zones":[],"x":[{'), ('"nodes":[0]', '"nodes":[]'),
    ('"nodes":[0]', '"nodes":[-1]'), ('"cards":1', '"cards":-1'), ('"zones":[0,1]', '"zones":[0]'),
    ('"cards":1', '"speed":1'),
])
def test_a_file_of_zones_that_is_wrong_is_refused(old: str, new: str) -> None:
    cluster = Cluster(((FAST,),) * 2, NEAR, FAR, zones=(Zone((0,), cards=1), Zone((1,))),
                      links=(ZoneLink((0, 1), FAR),))
    text = files.encode(cluster).decode()
    assert files.decode(text.encode(), Cluster) == cluster and old in text
    with pytest.raises(FileError, match=r"^Cluster: "):
        files.decode(text.replace(old, new, 1).encode(), Cluster)


@given(seeds)
@settings(deadline=None, max_examples=20)
def test_a_network_twice_as_fast_is_so_everywhere(seed: int) -> None:
    cluster = unequal(seed)
    twice = cluster.with_network(2.0)
    assert twice.with_network(0.5) == cluster
    for ranks in pairs(cluster, seed):
        away = len({cluster.node_of[rank] for rank in ranks}) > 1
        found, before = (c.far(c.parts(ranks)) for c in (twice, cluster))
        assert found.bytes_per_s == (2 * before.bytes_per_s)
        assert away or twice.link(ranks) == cluster.link(ranks)

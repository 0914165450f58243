"""Claims about tracing: blocks, kinds, every batch size from one trace, clear refusals."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

import autopar_torch as ap
import zoo
from autopar_torch.errors import AutoparError, TraceError
from autopar_torch.model import ROWS, at_rows
from autopar_torch.run import tracing
from autopar_torch.trace import Traced, serialize, trace
from autopar_torch.trace.call import take_apart
from slow import slowly


def traced(model: nn.Module, **batch: Tensor) -> Traced:
    return trace(model, take_apart((), batch)[0])


FEW = ("gpt2", "nanogpt", "resnet")
ZOO = [*FEW, *slowly(*(name for name in zoo.MODELS if name not in FEW))]


@pytest.mark.parametrize("name", ["gpt2", "nanogpt", *slowly("llama", "bert", "encoder")])
def test_equal_layers_share_a_kind(name: str) -> None:
    graph = traced(zoo.build(name), **zoo.batch(name, 2)).graph
    assert (len(graph.blocks), len(graph.kinds)) == (6, 3)


@pytest.mark.parametrize("name", ZOO)
def test_every_op_of_the_zoo_has_a_rule_and_rows_are_independent(name: str) -> None:
    graph = traced(zoo.build(name), **zoo.batch(name, 2)).graph
    assert graph.replicated_ops == ()
    coupled = {op for kind in graph.kinds.values() for op in kind.couples_rows}
    assert coupled == ({"batch_norm"} if name == "resnet" else set())


@pytest.mark.parametrize("name", ZOO)
def test_every_trainable_parameter_is_in_the_chain(name: str) -> None:
    model = zoo.build(name)
    graph = traced(model, **zoo.batch(name, 2)).graph
    used = {n for block in graph.blocks for n in block.params.values()}
    assert used >= {n for n, _ in model.named_parameters()} or name == "bert"


def _llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=96,
                                      num_hidden_layers=layers, num_attention_heads=4)
    return transformers.LlamaForCausalLM(config)


class _Deep(nn.Module):
    """Six layers, and something that three of them would not tell."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.head = way, nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:
            x = layer(x) * (len(self.layers) if self.way == "counted" else 1)
            seen.append(x)
        return self.head(sum(seen) if self.way == "kept" else x).square().mean()


@pytest.mark.parametrize("way", ["plain", "kept", "counted"])
def test_layers_are_all_traced_where_forward_counts_them_or_keeps_what_each_gives(way: str) -> None:
    model = _Deep(way)
    found = traced(model, x=torch.randn(4, 8))
    last, ops = found.graph.blocks[-1], [n for g in found.programs.values() for n in g.nodes]
    factors = {n.args[1] for n in ops if n.name.startswith("mul")}
    assert (len(last.inputs), factors) == (6 if way == "kept" else 1,
                                           {6} if way == "counted" else {1})
    assert (type(model.layers), len(model.layers)) == (nn.ModuleList, 6)


def test_a_long_stack_is_traced_once_and_repeated() -> None:
    batch = zoo.batch("llama", 2)
    long, short = traced(_llama(12), **batch).graph, traced(_llama(4), **batch).graph
    assert [b.name for b in long.blocks[1:-1]] == [f"model.layers.{i}" for i in range(12)]
    assert [k.num_ops for k in long.kinds.values()] == [k.num_ops for k in short.kinds.values()]
    for i, block in enumerate(long.blocks[1:-1]):
        assert all(f".layers.{i}." in name for name in block.params.values())
        assert list(block.inputs.values()) == [long.blocks[i].outputs["y0"]]


class UsesItsIndex(nn.Module):
    """Layers that look alike but scale by their own index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
        for index, layer in enumerate(self.layers):
            layer.index = index

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (layer.index + 1.0)
        return x.square().mean()


def test_layers_that_use_their_index_are_traced_in_full() -> None:
    graph = traced(UsesItsIndex(), x=torch.zeros(2, 4)).graph
    assert len({block.kind for block in graph.blocks}) >= 8


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Looped(nn.Module):
    """A stack that runs more than once, or that something else reads, too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.way = nn.ModuleList([_Residual() for _ in range(8)]), way

    def forward(self, x: Tensor) -> Tensor:
        penalty = x.new_zeros(())
        for turn in range(2 if self.way != "read too" else 1):
            with torch.set_grad_enabled(turn > 0 or self.way != "with gradients once"):
                for layer in self.layers:
                    x = layer(x)
        if self.way == "read too":
            penalty = sum((p.square().sum() for p in self.layers.parameters()), penalty)
        return x.square().mean() + 0.1 * penalty


@pytest.mark.parametrize("way", ["twice", "with gradients once", "read too"])
def test_a_stack_is_repeated_only_where_it_runs_once_and_alone(way: str) -> None:
    model, x = Looped(way), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plan = ap.Plan.uniform(num_micro_batches=1)
    split = ap.parallelize(Looped(way), plan=plan, guards={"first_step": False})
    loss, want = split(x), model(x)
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss.detach(), want.detach())
    for own, plain in zip(split.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, plain.grad)


class _Twice(nn.Module):
    """Its layers stand under two names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.layers, self.first = nn.ModuleList([layer] * 3), layer[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.first(x) + layer(x)
        return x


def test_modules_may_stand_under_several_names() -> None:
    assert len(traced(_Twice(), x=torch.zeros(4, 8)).graph.params) == 2


def test_sizes_follow_the_rows() -> None:
    assert [at_rows(size, 3) for size in (0, 7, ROWS, 4 * ROWS)] == [0, 7, 3, 12]


def _shown(graph: fx.Graph) -> list[str]:
    return [f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {n.meta['info']}" if n.op != "output"
            else str(n.args) for n in graph.nodes]


@pytest.mark.parametrize("name", ZOO)
def test_who_reads_a_trace_has_what_the_tracing_rank_found(name: str) -> None:
    found = traced(zoo.build(name), **zoo.batch(name, 2))
    read = serialize.unpack(serialize.pack(found))
    assert isinstance(read, Traced)
    assert (read.graph, read.sources, read.outputs, read.rowless) == (
        found.graph, found.sources, found.outputs, found.rowless)
    assert {kind: _shown(own) for kind, own in read.programs.items()} == {
        kind: _shown(own) for kind, own in found.programs.items()}
    assert _shown(read.prologue) == _shown(found.prologue)


class Scaled(nn.Module):
    """A plain tensor on a module, and a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norm.eval()
        self.scale = torch.full((4,), 2.0, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).sum()


class Chancy(Scaled):
    """Chance outside of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def test_constants_travel_with_a_trace() -> None:
    found = traced(Scaled(), x=torch.ones(2, 4))
    read = serialize.unpack(serialize.pack(found))
    assert isinstance(read, Traced) and read.consts
    assert read.consts.keys() == found.consts.keys()
    assert all(torch.equal(read.consts[name], own) for name, own in found.consts.items())


def test_tracing_leaves_modes_and_random_numbers_as_they_were() -> None:
    model, cpu = Chancy(), torch.device("cpu")
    random.seed(0)
    expected = random.Random(0).random()
    own = tracing.tracer(model, cpu, lambda out: out, "float32", False)
    with pytest.raises(TraceError, match="random numbers from Python"):
        own(take_apart((torch.ones(2, 4),), {})[0], True, None)
    assert random.random() == expected
    assert (model.training, model.norm.training) == (True, False)


@pytest.mark.parametrize("error", [KeyError("x"), TraceError("no loss", where="forward")])
def test_whatever_stops_the_tracing_rank_stops_all_with_an_error_of_ours(error: Exception) -> None:
    told: list[bytes] = []
    first: Any = SimpleNamespace(
        size=2, rank=0, doing=nullcontext, agree=lambda own: told.append(own) or own
    )
    other: Any = SimpleNamespace(size=2, rank=1, doing=nullcontext, agree=lambda _: told[0])

    def stops(*_: Any) -> Traced:
        raise error

    for place in (first, other):
        with pytest.raises(AutoparError, match=r"no loss|tracing stopped: KeyError"):
            own = tracing.once(stops, place, nn.Identity())
            own(take_apart((), {"x": torch.ones(2)})[0], True, None)


def test_calls_with_nameless_objects_are_one_call_on_every_rank() -> None:
    things = object(), object()
    one, other = (take_apart((torch.ones(2), thing), {})[0].key for thing in things)
    assert one == other


def test_what_stops_the_tracing_rank_stops_the_others_with_the_same_words() -> None:
    error = TraceError("no loss", where="forward", fix="return one")
    read = serialize.unpack(serialize.pack(error))
    assert (type(read), str(read)) == (TraceError, str(error))
    assert isinstance(read, TraceError) and (read.where, read.fix) == (error.where, error.fix)


def test_data_dependent_code_is_refused_with_the_users_line() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum() if self.a(x).sum() > 0 else self.a(-x).sum()

    with pytest.raises(TraceError, match=r"test_trace.py:\d+: return self.a\(x\)"):
        traced(Branch(), x=torch.zeros(2, 4))


def test_a_model_without_a_loss_is_traced_up_to_its_outputs() -> None:
    assert traced(nn.Linear(4, 4), input=torch.zeros(2, 4)).outputs == ("output",)


class _Settled(nn.Module):
    """Fills in a setting, as classifiers of transformers do, or counts in one."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.head, self.counts = nn.Linear(4, 2), counts
        self.config = SimpleNamespace(problem_type=None, calls=0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.config.problem_type is None:
            self.config.problem_type = "single_label_classification"
        self.config.calls += self.counts
        return nn.functional.cross_entropy(self.head(x), y)


def test_a_setting_that_forward_fills_in_is_as_it_was_after_a_trace() -> None:
    given = {"x": torch.randn(4, 4), "y": torch.arange(4) % 2}
    model = _Settled(counts=False)
    traced(model, **given)
    assert model.config.problem_type is None
    with pytest.raises(TraceError, match=r"config\.calls"):
        traced(_Settled(counts=True), **given)


class _Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.mean()


def test_a_model_of_few_stages_is_cut_inside_of_them() -> None:
    graph = traced(_Stages(), x=torch.randn(2, 4)).graph
    assert [block.name for block in graph.blocks[:4]] == [
        "stages.0.0", "stages.0.1", "stages.0.2", "stages.1.0"]

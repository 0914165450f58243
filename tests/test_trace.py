"""Claims about tracing: blocks, kinds, every batch size from one trace, clear refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import zoo
from autopar_torch.errors import TraceError
from autopar_torch.model import ROWS, at_rows
from autopar_torch.trace import Traced, trace
from autopar_torch.trace.call import take_apart


def traced(model: nn.Module, **batch: Tensor) -> Traced:
    return trace(model, take_apart((), batch)[0])


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "nanogpt", "encoder"])
def test_equal_layers_share_a_kind(name: str) -> None:
    graph = traced(zoo.build(name), **zoo.batch(name, 2)).graph
    assert (len(graph.blocks), len(graph.kinds)) == (6, 3)


@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_every_op_of_the_zoo_has_a_rule_and_rows_are_independent(name: str) -> None:
    graph = traced(zoo.build(name), **zoo.batch(name, 2)).graph
    assert graph.replicated_ops == ()
    coupled = {op for kind in graph.kinds.values() for op in kind.couples_rows}
    assert coupled == ({"batch_norm"} if name == "resnet" else set())


@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_every_trainable_parameter_is_in_the_chain(name: str) -> None:
    model = zoo.build(name)
    graph = traced(model, **zoo.batch(name, 2)).graph
    used = {n for block in graph.blocks for n in block.params.values()}
    assert used >= {n for n, _ in model.named_parameters()} or name == "bert"


def _llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=96,
                                      num_hidden_layers=layers, num_attention_heads=4)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


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


def test_sizes_follow_the_rows() -> None:
    assert [at_rows(size, 3) for size in (0, 7, ROWS, 4 * ROWS)] == [0, 7, 3, 12]


def test_no_loss_is_refused_with_the_way_out() -> None:
    with pytest.raises(TraceError, match="loss_fn"):
        traced(nn.Linear(4, 4), input=torch.zeros(2, 4))


def test_data_dependent_code_is_refused_with_the_users_line() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum() if x.sum() > 0 else self.a(-x).sum()

    with pytest.raises(TraceError, match=r"test_trace.py:\d+: return self.a\(x\)"):
        traced(Branch(), x=torch.zeros(2, 4))

"""Claims about attention: what a fused kernel needs survives tracing, and heads are still split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar_torch as ap
from autopar_torch.model import ROWS, TensorInfo, at_rows
from autopar_torch.shard.layout import Split
from autopar_torch.shard.parts import join, piece
from autopar_torch.shard.rules import op_name
from autopar_torch.shard.strategies import strategies
from autopar_torch.trace import Traced, masks, tiles, trace
from autopar_torch.trace.call import take_apart
from slow import slowly
from test_shard import _sharding

SEQ, VOCAB = 13, 64
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": ("Llama", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 8}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 4096}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop":
                      0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0,
                      "eos_token_id": 0}),
}


def build(name: str, **more: Any) -> nn.Module:
    kind, options = MODELS[name]
    end = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{kind}Config")(**{**options, **more})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}{end}")(config)


def batch(rows: int = 2, **more: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def traced(model: nn.Module, given: dict[str, Tensor]) -> Traced:
    return trace(model, take_apart((), given)[0])


def attentions(found: Traced) -> list[fx.Node]:
    return [node for graph in found.programs.values() for node in graph.nodes
            if op_name(node) == masks.ATTENTION]


def squares(found: Traced) -> list[fx.Node]:
    """Values as large as the square of the sequence."""
    return [node for graph in (*found.programs.values(), found.prologue) for node in graph.nodes
            if isinstance(info := node.meta.get("info"), TensorInfo)
            and list(info.shape).count(SEQ) == 2]


ONES = torch.ones(2, SEQ, dtype=torch.long)
PADDED = torch.tensor([[1] * SEQ, [1] * 9 + [0] * (SEQ - 9)])


@pytest.mark.parametrize("given", [{}, {"attention_mask": ONES}], ids=["no mask", "all ones"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2", *slowly("llama", "mistral")])
def test_causal_attention_is_traced_without_a_mask_and_without_repeated_keys(
        name: str, given: dict[str, Tensor]) -> None:
    found = traced(build(name), batch(**given))
    for node in attentions(found):
        assert (node.args[3], node.args[5]) == (None, True)
        assert bool(node.kwargs.get("enable_gqa")) == (name != "gpt2")
        assert node.args[1].meta["info"].shape[1] == (4 if name == "gpt2" else 2)
    assert attentions(found) and not squares(found)


@pytest.mark.parametrize("given, options", [
    ({"attention_mask": PADDED}, {}),
    ({"position_ids": torch.tensor([[*range(8), *range(SEQ - 8)]] * 2)},  # packed
     {"use_cache": False}),
    ({}, {"sliding_window": 4}),
], ids=["padding", "packed", "window"])
def test_a_mask_that_hides_more_stays(given: dict[str, Tensor], options: dict[str, int]) -> None:
    found = traced(build("mistral", **options), batch(**given))
    assert all(node.args[3] is not None and not node.kwargs.get("enable_gqa")
               for node in attentions(found))


def losses(model: Any, calls: list[dict[str, Tensor]]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for given in calls:
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("name", ["llama", *slowly("qwen3", "mistral", "gpt2")])
def test_losses_are_those_of_the_model_with_and_without_padding_in_turn(name: str) -> None:
    calls = [batch(), batch(attention_mask=ONES), batch(attention_mask=PADDED), batch(),
             batch(attention_mask=ONES)]
    model = ap.parallelize(build(name).double(), plan=ap.Plan.uniform())
    torch.testing.assert_close(losses(model, calls), losses(build(name).double(), calls),
                               rtol=1e-6, atol=0)


def test_positions_that_begin_again_part_a_row_only_where_no_cache_is_made() -> None:
    """As of sequences that are packed into one row; the default of a config is to make one."""
    again = torch.cat([torch.arange(7), torch.arange(6)])
    packed = batch(position_ids=torch.stack([torch.arange(SEQ), again]))
    model, plain = (build("llama").double() for _ in range(2))
    model = ap.parallelize(model, plan=ap.Plan.uniform())
    found = []
    for asked in ({}, {"use_cache": False}):
        for train in (True, False):
            with torch.set_grad_enabled(train):
                got, want = (own.train(train)(**packed, **asked).loss for own in (model, plain))
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        found.append(want)
    assert not torch.isclose(*found)


class Own(nn.Module):
    """A model that makes its own mask, a matrix of floats, and repeats keys as torchtitan does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.q, self.kv, self.at = nn.Linear(32, 32), nn.Linear(32, 16), at

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(-1, SEQ, 4, 8).transpose(1, 2)
        kv = self.kv(x).view(-1, SEQ, 2, 8)
        wide = kv[:, :, :, None, :].expand(-1, SEQ, 2, 2, 8).reshape(-1, SEQ, 4, 8).transpose(1, 2)
        mask = torch.full((SEQ, SEQ), float("-inf")).triu(self.at)
        return F.scaled_dot_product_attention(q, wide, wide, mask).square().mean()


@pytest.mark.parametrize("at, args", [(1, (None, True)), (SEQ, (None, False))])
def test_a_mask_of_floats_is_understood_too(at: int, args: tuple[object, ...]) -> None:
    model = Own(at)
    node, = attentions(trace(model, take_apart((torch.randn(2, SEQ, 32),), {})[0]))
    assert (node.args[3], node.args[5]) == args and node.kwargs == {"enable_gqa": True}
    x = torch.randn(3, SEQ, 32)
    torch.testing.assert_close(ap.parallelize(model, plan=ap.Plan.uniform())(x), Own.forward(
        model, x))


def test_a_mask_of_floats_that_hides_by_a_little_stays() -> None:
    assert attentions(trace(Own(2), take_apart((torch.randn(2, SEQ, 32),), {})[0]))[0].args[3]


@pytest.mark.parametrize("given, options, meaning", [
    ({}, {}, True), ({"attention_mask": ONES}, {}, True), ({}, {"sliding_window": SEQ}, True),
    ({}, {"sliding_window": SEQ - 1}, None), ({}, {"sliding_window": 4}, None),
    ({"position_ids": torch.tensor([[*range(8), *range(SEQ - 8)]] * 2)}, {"use_cache": False},
     None),
], ids=["no mask", "all ones", "wide window", "window", "narrow window", "packed"])
@pytest.mark.parametrize("size", [4, *slowly(3, 64)])
def test_a_long_mask_is_understood_by_its_tiles(
        monkeypatch: pytest.MonkeyPatch, size: int, given: dict[str, Tensor],
        options: dict[str, int], meaning: bool | None) -> None:
    monkeypatch.setattr(masks, "MOST_ELEMENTS", 64)
    monkeypatch.setattr(tiles, "SIZE", size)
    found = traced(build("mistral", **options), batch(**given))
    assert {node.args[5] if node.args[3] is None else None for node in attentions(found)} == {
        meaning}


def _grouped(heads: int, keys: int) -> fx.Node:
    graph = fx.Graph()
    places = [graph.placeholder(name) for name in "qkv"]
    for node, num in zip(places, (heads, keys, keys), strict=True):
        node.meta["info"] = TensorInfo((ROWS, num, SEQ, 8), "float32", True)
    made = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default,
                               (*places, None, 0.0, True), {"enable_gqa": True})
    made.meta["info"] = TensorInfo((ROWS, heads, SEQ, 8), "float32", True)
    return made


@pytest.mark.parametrize("heads, keys, parts, ways", [
    (8, 4, 2, {"S1,S1,S1>S1", "S1/4,R,R>S1/4"}), (8, 2, 4, {"S1/2,R,R>S1/2"}),
    (8, 1, 4, {"S1,R,R>S1"}),
])
def test_grouped_heads_may_be_split_in_these_ways(heads: int, keys: int, parts: int,
                                                  ways: set[str]) -> None:
    node = _grouped(heads, keys)
    options = [s for s in strategies(node.graph)[node] if s.is_split and Split(0) not in s.ins]
    assert {s.text for s in options} >= ways
    shapes = [[at_rows(n, 2) for n in own.meta["info"].shape] for own in (*node.args[:3],)]
    q, k, v = (torch.randn(shape) for shape in shapes)

    def attention(*given: Tensor) -> Tensor:
        return node.target(*given, *node.args[3:], **node.kwargs)

    for strategy in (s for s in options if s.text in ways):
        made = [attention(*(x if layout == "R" else piece(x, layout, parts, index)
                            for x, layout in zip((q, k, v), strategy.ins, strict=True)))
                for index in range(parts)]
        torch.testing.assert_close(join(made, strategy.out), attention(q, k, v))


@pytest.mark.parametrize("keys, parts, way", [(8, 8, "S1,S1,S1>S1"), (2, 4, "S1/2,R,R>S1/2")])
def test_heads_are_still_split_where_queries_share_keys(keys: int, parts: int, way: str) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
             "num_key_value_heads": keys, "num_hidden_layers": 3, "vocab_size": 32000}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        ids = torch.zeros(1, 4096, dtype=torch.long)
    found = _sharding(traced(model, {"input_ids": ids, "labels": ids}), mesh=(parts,))
    assert found.ops[masks.ATTENTION] == way

"""trace: model and call -> ModelGraph, with the fx graphs behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn

from ..errors import AutoparError, TraceError
from ..model import ROWS, Block, Kind, ModelGraph, ParamInfo, TensorInfo
from ..shard import loss_sums
from ..shard.layout import PARTIAL, Layout, Split
from ..shard.rows import row_flow, rows_dim
from ..shard.rules import is_random, op_name, writers
from ..shard.strategies import strategies
from . import draws, losses, masks, opaque, row_numbers, shares, tails
from .apart import count_alone, mixing, picks_too
from .blocks import TracedBlock, Traits, cut, given_nodes, mark_grads, split_main
from .burnt import Read
from .call import Call
from .capture import Captured, InputSource, capture, describe_params
from .clean import drop_no_ops, flatten, has_rows, info_of, part_reads
from .decisions import DECIDED
from .discover import note_factors
from .form import Form, LossFn
from .functional import functionalize
from .repeat import find_stacks, shortened
from .row_branches import Answers
from .tested import Surroundings, tested_traits
from .together import tangled


@dataclass(frozen=True)
class Traced:
    """The noun, and what torch needs to run it: a graph per kind and one of the prologue."""

    graph: ModelGraph
    programs: dict[str, fx.Graph]
    prologue: fx.Graph  # inputs, buffers and constants -> everything without parameters
    sources: dict[str, InputSource]
    consts: dict[str, Tensor]
    outputs: tuple[str, ...]
    rowless: frozenset[str]  # prologue nodes that are the same for every micro-batch
    mixed: dict[str, Split]  # prologue nodes made of the whole batch -> where they have rows
    form: Form  # the structure of what the model returns
    reads: frozenset[Read]  # attributes of modules that decided what was traced
    answers: Answers  # of the number of rows, that decided what was traced
    outers: dict[str, int]  # output -> in how many parts of its dim there are all rows
    decided: tuple[tuple[str, bool], ...]  # prologue nodes that forward asked for, and the answers


def trace(model: nn.Module, call: Call, *, device: torch.device | str = "cpu",
          loss_fn: LossFn | None = None, wanted: tuple[str, ...] | None = ("loss",),
          params: dict[str, ParamInfo] | None = None, dtype: torch.dtype | None = None,
          local: bool = False, placed: Collection[str] = (), in_order: bool = False) -> Traced:
    """Trace once for every batch size. `params`: true shapes where the model holds shards;
    `local`: what looks at the whole batch may look at the rows of a part; `placed`: buffers that
    not every rank has whole; `in_order`: numbers are drawn when forward does, else those that
    depend on no parameter before the rest, for the whole batch."""
    known = params or describe_params(model)
    options: dict[str, Any] = {"device": torch.device(device), "loss_fn": loss_fn,
                               "wanted": wanted, "shapes": known, "dtype": dtype}
    if stacks := find_stacks(model):
        # A shortened stack may break code that counts its layers; then all are traced.
        with contextlib.suppress(TraceError), _told():
            def few(rows: int = ROWS) -> Captured:
                with shortened(model, stacks):
                    return capture(model, call, rows=rows, **options)

            captured = few()
            if not captured.form.left and not captured.decided:  # each layer may have its own
                pieces, flat = _cut(captured, known, call, placed, few, in_order)
                inside = {node for piece in pieces for node in piece.nodes}
                drawn = any(map(is_random, {*flat.nodes} - inside))  # by each layer for itself
                if chain := not drawn and repeat(pieces, stacks):
                    return _assemble(chain, flat, captured, known, local)
    with _told():
        whole = partial(capture, model, call, **options, most_opaque=opaque.MOST)
        captured = whole()
        try:
            pieces, flat = _cut(captured, known, call, placed, whole, in_order)
            return _assemble(pieces, flat, captured, known, local)
        except TraceError as error:
            error.decided = captured.decided
            raise


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Whatever a pass over the graph stumbles on: the model cannot be traced."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TraceError(f"{last.name} stopped: {type(error).__name__}: {error}",
                         where=f"{last.filename}:{last.lineno}: {last.line}",
                         fix="leave plan= and constraints= out to train with data parallelism, and "
                         "report this") from error


def _cut(captured: Captured, known: dict[str, ParamInfo], call: Call, placed: Collection[str],
         again: Callable[..., Captured], in_order: bool) -> tuple[list[TracedBlock], fx.Graph]:
    flat = _plain(captured)
    odd = row_numbers.settle(flat, _consts(flat, captured), _batch(flat, captured),
                             partial(_other, again))
    functionalize(flat, captured.sources)
    draws.loosen(flat)
    masks.settle(flat, _known(flat, captured, call))
    drop_no_ops(flat)
    _merge_ties(flat, captured.sources)
    _read_once(flat, captured.sources, placed)
    losses.rewrite(flat, _batch(flat, captured))
    tails.straighten(flat)
    count_alone(flat)
    part_reads(flat)
    learning = {name for name, source in captured.sources.items()
                if source.kind == "param" and known[source.name].trainable}
    mark_grads(flat, learning | set(compress(_inputs(captured), call.requires_grad)))
    main = split_main(flat, captured.sources, placed, in_order)
    if not main:
        raise TraceError("nothing in forward depends on a parameter", where="forward")
    note_factors(main)
    pieces = [dataclasses.replace(piece, odd=frozenset(odd))
              for piece in cut(flat, main, captured.sources)]
    row_numbers.refuse_odd(pieces)
    return pieces, flat


def _plain(captured: Captured) -> fx.Graph:
    flat = flatten(captured)
    opaque.put_in(flat)
    drop_no_ops(flat)
    return flat


def _other(again: Callable[..., Captured]) -> tuple[fx.Graph, dict[fx.Node, Tensor]]:
    """The same for another number of rows, and its constants."""
    captured = again(rows=row_numbers.OTHER_ROWS)
    flat = _plain(captured)
    return flat, _consts(flat, captured)


def _consts(flat: fx.Graph, captured: Captured) -> dict[fx.Node, Tensor]:
    return {n: captured.consts[source.name] for n in flat.find_nodes(op="placeholder")
            if (source := captured.sources[n.name]).kind == "const"}


def _batch(flat: fx.Graph, captured: Captured) -> list[fx.Node]:
    """The inputs that have rows."""
    return [n for n in flat.find_nodes(op="placeholder")
            if captured.sources[n.name].kind == "input" and info_of(n).shape[:1] == (ROWS,)]


def _inputs(captured: Captured) -> list[str]:
    return [name for name, source in captured.sources.items() if source.kind == "input"]


def _known(flat: fx.Graph, captured: Captured, call: Call) -> masks.Fixed:
    """The placeholders whose values are the same for every batch that the trace is for."""
    ones = set(compress(_inputs(captured), call.ones))
    known = {}
    for node in flat.find_nodes(op="placeholder"):
        source = captured.sources[node.name]
        if node.name in ones:
            known[node] = masks.all_ones(node)
        elif source.kind == "const":
            known[node] = captured.consts[source.name].detach().cpu()
    return known


def _prologue(flat: fx.Graph, pieces: list[TracedBlock]) -> fx.Graph:
    """The flat graph without the nodes of the chain."""
    chain = {node for piece in pieces for node in piece.nodes}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in flat.nodes:
        if node not in chain and node.op != "output":
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].name = node.name
    return graph


def _read_once(graph: fx.Graph, sources: dict[str, InputSource], placed: Collection[str]) -> None:
    """Only the first block that reads a buffer has to be where it is; others get it from there."""
    for node in graph.find_nodes(op="placeholder"):
        if sources[node.name].name in placed and len(node.users) > 1 and not writers(node):
            first = next(n for n in graph.nodes if n in node.users)
            with graph.inserting_before(first):
                value = graph.call_function(torch.ops.aten.clone.default, (node,))
            value.meta = {"info": info_of(node), "module": first.meta.get("module", "")}
            node.replace_all_uses_with(value, lambda user, own=value: user is not own)


def _merge_ties(graph: fx.Graph, sources: dict[str, InputSource]) -> None:
    """One placeholder per parameter, however many names it has."""
    first: dict[tuple[str, str], fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        source = sources[node.name]
        kept = first.setdefault((source.kind, source.name), node)
        if kept is not node:
            node.replace_all_uses_with(kept)


def repeat(pieces: list[TracedBlock], stacks: dict[str, int]) -> list[TracedBlock] | None:
    """Children 0, 1, 2 of each stack become all of its children; None if they are not alike, or run
    more than once, or anything else reads their parameters."""
    for stack, count in stacks.items():
        pieces = [_renamed(p, f"{stack}.2", f"{stack}.{count - 1}") for p in pieces]
        kept = [f"{stack}.0", f"{stack}.1", f"{stack}.{count - 1}"]
        inside = [i for i, p in enumerate(pieces) if any(
            name.startswith(f"{stack}.") for name in (p.name, *p.params.values()))]
        if [pieces[i].name for i in inside] != kept:
            return None
        zero, one, last = inside
        if (one, last) != (zero + 1, zero + 2) or not _goes_on(pieces, one, last):
            return None
        pieces = [*pieces[:one], *_all_children(pieces[one], pieces[last], stack, count),
                  *pieces[last + 1 :]]
    return pieces


def _goes_on(pieces: list[TracedBlock], one: int, last: int) -> bool:
    """Whether only the last child reads what child 1 makes, as child 1 reads what is before it."""
    made = set(pieces[one].outputs.values())
    read = {value for i, p in enumerate(pieces) if i != last for value in p.inputs.values()}
    return pieces[one].signature == pieces[last].signature and not made & read and all(
        value in made or value == pieces[one].inputs[slot]
        for slot, value in pieces[last].inputs.items())


def _all_children(first: TracedBlock, last: TracedBlock, stack: str,
                  count: int) -> Iterator[TracedBlock]:
    """Children 1 .. count-1; an input that moves on between 1 and the last keeps moving on."""
    made = first
    yield first
    for child in range(2, count):
        inputs = {
            slot: value if last.inputs[slot] == value
            else f"{made.name}:{last.inputs[slot].rpartition(':')[2]}"
            for slot, value in first.inputs.items()
        }
        own = _renamed(first, f"{stack}.1", f"{stack}.{child}") if child < count - 1 else last
        made = dataclasses.replace(own, inputs=inputs)
        yield made


def _renamed(piece: TracedBlock, old: str, new: str) -> TracedBlock:
    """The piece with `old` replaced in the names of the block, its values and its parameters."""

    def fix(table: dict[str, str], end: str) -> dict[str, str]:
        return {slot: new + text[len(old) :] if text.startswith(old + end) else text
                for slot, text in table.items()}

    return dataclasses.replace(
        piece,
        name=new if piece.name == old else piece.name,
        inputs=fix(piece.inputs, ":"),
        params=fix(piece.params, "."),
        outputs=fix(piece.outputs, ":"),
    )


def _assemble(pieces: list[TracedBlock], flat: fx.Graph, captured: Captured,
              known: dict[str, ParamInfo], local: bool) -> Traced:
    names: dict[Any, str] = {}
    named: list[str] = []  # the kind of each piece
    kinds: dict[str, Kind] = {}
    programs: dict[str, fx.Graph] = {}
    unruled: set[str] = set()
    known_traits: dict[Any, tuple[Traits, fx.Graph]] = {}
    prologue = _prologue(flat, pieces)
    rows = _rows_of(prologue)  # where the rows of a value are, or P for a sum over them
    around = _surroundings(prologue, captured, local)
    for piece in pieces:
        filled = {**piece.inputs, **piece.context}.items()
        given = tuple((slot, rows[value]) for slot, value in filled if value in rows)
        made = [around.prologue[name] for name in piece.context.values()]
        key = (piece.signature, given, *((n.target if n.op == "call_function" else "",
                                         str(fx.node.map_arg(n.args, info_of))) for n in made))
        if key not in known_traits:
            known_traits[key] = tested_traits(piece, given, around)
        found, program = known_traits[key]
        like = (piece.signature, key if found.joined else ())
        name = names.setdefault(like, f"kind{len(names)}")
        named.append(name)
        programs.setdefault(name, program)
        if shares.SLOT in {str(n.target) for n in programs[name].nodes}:
            shares.fill(piece, around.num_rows)
        rows |= zip(piece.outputs.values(), found.rows, strict=True)
        kinds[name] = _kind(name, piece, found, kinds.get(name))
        unruled |= set(found.unruled)
    blocks = tuple(Block(p.name, name, p.inputs, p.context,
                         dict(zip(kinds[name].params, p.params.values(), strict=True)), p.outputs)
                   for p, name in zip(pieces, named, strict=True))
    outputs = _outputs(pieces, flat, captured)
    asked = [outputs.pop(name) for name in captured.outputs if name.startswith(DECIDED)]
    if not {*asked} <= {node.name for node in prologue.nodes}:
        raise TraceError("a branch depends on a buffer that forward writes, or that not every rank "
                         "has", where="forward", fix="ask it outside of forward, and set a flag")
    added = tuple(name for name, value in outputs.items() if rows.get(value) == PARTIAL)
    rowless = around.rowless
    if not any(shares.SLOT in piece.context for piece in pieces):
        prologue.erase_node(around.prologue[around.num_rows])
        rowless -= {around.num_rows}
    run = [(piece, programs[name]) for piece, name in zip(pieces, named, strict=True)]
    mixed = mixing(prologue, rowless, run, outputs.values(), captured.sources, captured.consts,
                   around.least_rows)
    places = {name: split for name in mixed if isinstance(split := rows.get(name), Split)}
    stuck = tangled(prologue, mixed, places, run, outputs.values())
    stuck += ("arange",) if picks_too(prologue, mixed, run) else ()
    graph = ModelGraph(kinds, blocks, known, outputs, tuple(sorted(unruled)), added, stuck,
                       {node.name: info_of(node) for node in given_nodes(flat, captured.sources)})
    outers = {name: layout.outer for name, value in outputs.items()
              if isinstance(layout := rows.get(value), Split)}
    return Traced(graph, programs, prologue, captured.sources, captured.consts, tuple(outputs),
                  rowless, places, captured.form, captured.reads, captured.answers, outers,
                  tuple(zip(asked, captured.decided, strict=True)))


def _surroundings(prologue: fx.Graph, captured: Captured, local: bool) -> Surroundings:
    """What blocks are tested with; the prologue counts the rows of the batch, too."""
    places = prologue.find_nodes(op="placeholder")
    consts = {n.name: value for n in places
              if (value := captured.consts.get(captured.sources[n.name].name)) is not None}
    batch = next((n for n in places if captured.sources[n.name].kind == "input"
                  and info_of(n).shape[:1] == (ROWS,)), None)
    num_rows = prologue.call_function(loss_sums.count_values, (batch, 1))
    num_rows.meta = {"info": TensorInfo((), "float32"), "module": ""}
    rowless = frozenset(n.name for n in prologue.nodes if not has_rows(info_of(n)))
    return Surroundings({n.name: n for n in prologue.nodes}, rowless, consts, num_rows.name,
                        local, batch is not None, captured.least_rows, {})


def _rows_of(prologue: fx.Graph) -> dict[str, Layout]:
    """Where the rows of its values are: not always in front, where a sequence comes first."""
    given = {n: rows_dim(info_of(n).shape) for n in prologue.find_nodes(op="placeholder")}
    flow, _ = row_flow(prologue, given, {}, strategies(prologue, given))
    for node, layout in flow.items():
        node.meta["rows"] = layout
    return {node.name: layout for node, layout in flow.items() if layout != PARTIAL}


def _kind(name: str, piece: TracedBlock, found: Traits, known: Kind | None) -> Kind:
    """The kind of a block; ops that couple rows in one block count for all blocks of its kind."""
    coupled = tuple(dict.fromkeys([*(known.couples_rows if known else ()),
                                   *map(op_name, found.coupled), *found.joined]))
    if known:
        return msgspec.structs.replace(known, couples_rows=coupled)
    inputs, context, params, outputs = (
        {slot: piece.infos[slot] for slot in table}
        for table in (piece.inputs, piece.context, piece.params, piece.outputs)
    )
    return Kind(name, inputs, context, params, outputs, len(piece.nodes), found.flops_per_row,
                coupled, found.tested, found.local, found.why, found.mutates, found.joined)


def _outputs(pieces: list[TracedBlock], flat: fx.Graph, captured: Captured) -> dict[str, str]:
    """Name of what the model returns -> value of the chain."""
    made: dict[str, str] = {}
    for piece in pieces:
        leaving = piece.graph.find_nodes(op="output")[0].args[0]
        for own, value in zip(leaving, piece.outputs.values(), strict=True):  # type: ignore[arg-type, call-overload]
            made.setdefault(own.meta["origin"].name, value)  # type: ignore[union-attr]
    results = next(n for n in flat.nodes if n.op == "output").args[0]
    named = zip(captured.outputs, results, strict=True)  # type: ignore[arg-type]
    return {name: made.get(node.name, node.name) for name, node in named}  # type: ignore[union-attr]


__all__ = ["Call", "Traced", "trace"]

"""What training scripts do with a ParallelModel: each claim runs on 2 ranks started once."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar_torch as ap
import claims
import nets
import oracle
import zoo
from autopar_torch.errors import PlanError, ShardingError
from autopar_torch.plan import Replica, Stage
from autopar_torch.report import phases
from autopar_torch.search.space import Constraints
from autopar_torch.shard import linear
from autopar_torch.timeline import COMM

TP2 = {"tp": 2}
PP2 = {"pp": 2, "num_micro_batches": 2}
ZERO3 = {"dp": 2, "zero": 3}


def _model(name: str, degrees: dict[str, Any]) -> Any:
    return ap.parallelize(zoo.build(name), plan=ap.Plan.uniform(**degrees))


def _near(a: Tensor | float, b: Tensor | float, tolerance: float = 1e-5) -> bool:
    a, b = torch.as_tensor(a).detach().double(), torch.as_tensor(b).detach().double()
    return float((a - b).abs().max()) <= tolerance * max(1e-3, float(b.abs().max()))


def claim_batch_size_may_change_between_steps() -> None:
    for degrees in (PP2, ZERO3, TP2):
        model, plain = _model("nanogpt", degrees), zoo.build("nanogpt")
        for rows in (8, 5, 3, 8):
            batch = zoo.batch("nanogpt", rows, pad=True)
            assert _near(float(model(**batch)), oracle.loss_of(plain(**batch))), (degrees, rows)


def slow_claim_replicas_stay_in_step_with_fewer_rows_than_micro_batches() -> None:
    plain = zoo.build("nanogpt")
    for zero in (0, 2, 3):
        model = _model("nanogpt", {"dp": 2, "num_micro_batches": 4, "zero": zero})
        for rows in (5, 3, 2):
            batch = zoo.batch("nanogpt", rows, pad=True)
            assert _near(float(model(**batch)), oracle.loss_of(plain(**batch))), (zero, rows)
        last = zoo.batch("nanogpt", 1)
        model(**last).backward()
        assert _near(oracle.loss_of(model.eval()(**last)), oracle.loss_of(plain(**last)))
        norm = model.clip_grad_norm_(1e9)
        plain.zero_grad()
        oracle.loss_of(plain(**last)).backward()
        assert _near(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e9)), zero


def slow_claim_messages_may_go_each_way_in_a_group_of_its_own() -> None:
    """As they do with NCCL."""
    plain, batch = zoo.build("nanogpt"), zoo.batch("nanogpt", 8, pad=True)
    for schedule in ("1f1b", "interleaved", "zero_bubble"):
        virtual = 2 if schedule == "interleaved" else 1
        model = _model("nanogpt", {"pp": 2, "num_micro_batches": 4, "schedule": schedule,
                                "virtual": virtual})
        model.world.open_channels()
        loss = model(**batch)
        loss.backward()
        assert None not in model.world.channels
        assert _near(float(loss), oracle.loss_of(plain(**batch))), schedule


def claim_gradients_accumulate_over_backwards() -> None:
    for degrees in (PP2, ZERO3, TP2):
        model, plain = _model("nanogpt", degrees), zoo.build("nanogpt")
        for seed in (1, 2):
            batch = zoo.batch("nanogpt", 8, seed, pad=True)
            (model(**batch) / 2).backward()
            (oracle.loss_of(plain(**batch)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert _near(model.clip_grad_norm_(1.0), norm), degrees


def claim_an_optimizer_made_before_the_first_batch_is_right() -> None:
    model = _model("nanogpt", TP2)
    before = list(model.parameters())
    opt = oracle.optimizer(before)
    model(**zoo.batch("nanogpt", 8)).backward()
    opt.step()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(s["exp_avg"].shape == p.shape for p, s in opt.state.items())


def slow_claim_eval_runs_forward_only_and_leaves_gradients_alone() -> None:
    for name, degrees in (("resnet", {"dp": 2}), ("resnet", TP2), ("bert", PP2)):
        model, plain = _model(name, degrees), zoo.build(name)
        model(**zoo.batch(name, 8))
        plain(**zoo.batch(name, 8))
        model.eval()
        plain.eval()
        with torch.no_grad():
            got, want = model(**zoo.batch(name, 6)), plain(**zoo.batch(name, 6))
        got = got if isinstance(got, Tensor) else got.loss
        assert _near(got, oracle.loss_of(want)), (name, degrees)
        assert all(p.grad is None for p in model.parameters())


def slow_claim_outputs_asked_for_are_those_of_the_whole_batch() -> None:
    for degrees in (PP2, TP2, {"dp": 2}):
        plan = ap.Plan.uniform(**degrees)
        model = ap.parallelize(zoo.build("gpt2"), plan=plan, outputs=("logits",))
        batch = zoo.batch("gpt2", 5)
        got, want = model(**batch), zoo.build("gpt2")(**batch)
        assert _near(got.logits, want.logits) and _near(got.loss, want.loss), degrees


class _Mean(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.abs().mean()


class _TwoMeans(nn.Module):
    """Another number of the batch beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.mean = _Mean()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"loss": y.square().sum() / (8 * y.shape[0]), "aux": y.abs().mean(),
                "half": 0.5 * self.mean(y), "rate": y.sum() * (1 / y.shape[0])}


def slow_claim_other_means_are_those_of_the_whole_batch_too() -> None:
    x = torch.arange(48.0).reshape(6, 8) / 48
    plain = _TwoMeans()
    want = plain(x)
    want["loss"].backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    for degrees in ({"pp": 2, "num_micro_batches": 3}, TP2, {"dp": 2, "num_micro_batches": 3}):
        model = ap.parallelize(_TwoMeans(), plan=ap.Plan.uniform(**degrees),
                               outputs=("aux", "half", "rate"))
        got = model(x=x)
        got.loss.backward()
        for name, value in want.items():
            assert _near(got[name], value), (degrees, name)
        assert _near(model.clip_grad_norm_(1e9), norm), degrees


def claim_state_dict_has_original_names_and_full_tensors() -> None:
    plain = zoo.build("nanogpt").state_dict()
    for degrees in (TP2, PP2, ZERO3):
        model = _model("nanogpt", degrees)
        model(**zoo.batch("nanogpt", 4))
        state = model.state_dict()
        assert list(state) == list(plain)
        assert all(torch.equal(state[k], plain[k]) for k in plain), degrees
        changed = {k: v + 1 for k, v in plain.items()}
        model.load_state_dict(changed)
        assert all(torch.equal(v, changed[k]) for k, v in model.state_dict().items()), degrees


def claim_loss_fn_serves_models_that_return_logits() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    x, y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4
    want = nn.functional.cross_entropy(build()(x), y)
    for degrees in (TP2, PP2, {"dp": 2}):
        loss_fn = nn.functional.cross_entropy
        model = ap.parallelize(build(), plan=ap.Plan.uniform(**degrees), loss_fn=loss_fn)
        assert _near(model(x, target=y), want), degrees


def slow_claim_labels_may_be_the_same_tensor_as_the_inputs() -> None:
    ids = zoo.batch("llama", 4)["input_ids"]
    model, plain = _model("llama", TP2), zoo.build("llama")
    assert _near(model(input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids).loss)


def claim_replicas_may_take_different_shares_and_borders() -> None:
    uneven = ap.Plan((Replica((Stage((0,)),), 3), Replica((Stage((1,)),), 1)))
    assert max(oracle.compare("gpt2", uneven, True).values()) <= oracle.TOLERANCE


def claim_gradients_of_large_weights_are_added_as_they_are_made() -> None:
    with unittest.mock.patch.object(linear, "LARGE", 0):
        for degrees in ({"tp": 2, "num_micro_batches": 4, "recompute": True},
                        {"dp": 2, "zero": 3, "num_micro_batches": 2}, {"pp": 2}):
            plan = ap.Plan.uniform(**degrees)
            assert max(oracle.compare("nanogpt", plan, False).values()) <= oracle.TOLERANCE


def claim_a_view_of_a_parameter_goes_from_block_to_block_under_zero_3() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.marks = nn.Parameter(torch.randn(1, 6, 8))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            marks = self.marks[:, :3].expand(len(x), -1, -1)
            for layer in self.layers:
                x = x + torch.tanh(layer(x) + marks)
            return x.square().mean()

    x, plain = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1)), Marked()
    model = ap.parallelize(Marked(), plan=ap.Plan.uniform(**ZERO3))
    for net in (model, plain):
        net(x).backward()
    grads = dict(plain.named_parameters())
    for name, param in model.module.named_parameters():
        assert _near(param.grad, grads[name].grad), name


def slow_claim_dropout_keeps_what_is_whole_equal_on_all_ranks() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.dropout(torch.relu(self.a(self.norm(x))), 0.5)
            return nn.functional.dropout(self.b(h), 0.5).square().mean()

    torch.manual_seed(dist.get_rank())
    model = ap.parallelize(Dropping(), plan=ap.Plan.uniform(**TP2))
    opt = oracle.optimizer(model.parameters())
    losses = _steps(model, opt, [{"x": torch.ones(4, 16)}] * 3)
    assert len(set(losses)) == 3
    for held in model.store.held.values():
        if not held.share.holding.cuts:
            assert torch.equal(_of_rank_0(held.tensor.detach()), held.tensor), held.name


def _of_rank_0(x: Tensor) -> Tensor:
    x = x.clone()
    dist.broadcast(x, 0)
    return x


def slow_claim_bfloat16_keeps_float32_master_weights() -> None:
    one = zoo.build("llama")
    model = _model("llama", {"tp": 2, "precision": "bfloat16"})
    opt = oracle.optimizer(model.parameters())
    for step in range(3):
        batch = zoo.batch("llama", 8, step, pad=True)
        loss, want = model(**batch), one(**batch).loss
        if step == 0:
            assert _near(loss, want, 2e-2)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def claim_what_does_not_fit_is_refused_on_every_rank() -> None:
    for degrees, words in (({"tp": 4}, "torchrun started 2"), ({"pp": 2, "virtual": 9}, "blocks")):
        try:
            model = _model("gpt2", degrees)
            model(**zoo.batch("gpt2", 4))
        except PlanError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{degrees} was accepted")


def slow_claim_a_sharding_that_is_illegal_is_refused_with_the_legal_ones() -> None:
    model = _model("gpt2", TP2)
    model(**zoo.batch("gpt2", 4))
    first = model.plan.shardings[1]
    broken = msgspec.structs.replace(first, ops={**first.ops, "addmm": "S1,R,R>S1"})
    shardings = (model.plan.shardings[0], broken, *model.plan.shardings[2:])
    plan = msgspec.structs.replace(model.plan, shardings=shardings)
    try:
        ap.parallelize(zoo.build("gpt2"), plan=plan)(**zoo.batch("gpt2", 4))
    except ShardingError as error:
        assert "legal are" in str(error)
    else:
        raise AssertionError("it was accepted")


def slow_claim_a_checkpoint_of_one_plan_continues_under_another() -> None:
    """Around in a circle, with tied embeddings."""
    _goes_on("nanogpt", lambda saved, loaded: loaded == (saved + 1) % len(KEPT))


def slow_claim_a_checkpoint_of_one_plan_continues_under_any_other() -> None:
    _goes_on("gpt2", lambda saved, loaded: True)


KEPT = (TP2, PP2, ZERO3, {"dp": 2, "zero": 1, "num_micro_batches": 2})


def _goes_on(name: str, asked: Callable[[int, int], bool]) -> None:
    folder = _shared_folder()
    batches = [zoo.batch(name, 8, seed, pad=True) for seed in range(4)]
    want: list[float] = []
    for index, degrees in enumerate(KEPT):
        model = _model(name, degrees)
        opt = oracle.optimizer(model.parameters())
        _steps(model, opt, batches[:2])
        model.save(folder / str(index), opt)
        want = _steps(model, opt, batches[2:])
    for saved, (loaded, degrees) in itertools.product(range(len(KEPT)), enumerate(KEPT)):
        if asked(saved, loaded):
            model = ap.parallelize(zoo.build(name, seed=9), batches[0],
                                   plan=ap.Plan.uniform(**degrees))
            opt = oracle.optimizer(model.parameters())
            model.load(folder / str(saved), opt)
            got = _steps(model, opt, batches[2:])
            assert all(_near(a, b) for a, b in zip(got, want, strict=True)), (saved, degrees)


def _shared_folder() -> Path:
    name = [tempfile.mkdtemp(prefix="ckpt-")]
    data = torch.zeros(256, dtype=torch.uint8)
    raw = name[0].encode()
    data[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return Path(bytes(data.numpy()).rstrip(b"\0").decode())


def _steps(model: Any, opt: torch.optim.Optimizer, batches: list[zoo.Batch]) -> list[float]:
    losses = []
    for batch in batches:
        loss = oracle.loss_of(model(**batch))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def slow_claim_a_model_on_meta_has_the_same_values_under_every_plan() -> None:
    states = []
    for degrees in (TP2, PP2, ZERO3):
        with torch.device("meta"):
            empty = zoo.build("llama")
        model = ap.parallelize(empty, zoo.batch("llama", 4), plan=ap.Plan.uniform(**degrees))
        before = list(model.parameters())
        model(**zoo.batch("llama", 4)).backward()
        assert any(p.grad is not None for p in before)
        states.append(model.state_dict())
    for state in states[1:]:
        assert all(torch.equal(v, states[0][k]) for k, v in state.items())


def claim_constraints_beside_a_plan_are_said_to_be_unused() -> None:
    given = ap.Plan.uniform(**TP2)
    with _warnings() as said:
        ap.parallelize(zoo.build("gpt2"), plan=given, constraints=Constraints())
        assert not said
        ap.parallelize(zoo.build("gpt2"), plan=given, constraints={"zero": 1}, confirm=2)
    assert said == ["not honoured, as a plan is given: zero, confirm"] * (dist.get_rank() == 0)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the library says inside."""
    said: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("autopar_torch")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def slow_claim_plans_travel_as_json() -> None:
    model = _model("gpt2", TP2)
    model(**zoo.batch("gpt2", 4))
    data = msgspec.json.encode(model.plan)
    assert msgspec.json.decode(data, type=ap.Plan) == model.plan
    again = ap.parallelize(zoo.build("gpt2"), plan=model.plan)
    assert _near(again(**zoo.batch("gpt2", 4)), model(**zoo.batch("gpt2", 4)))


def claim_a_measured_step_tells_apart_what_replicas_and_tensor_groups_exchange() -> None:
    for degrees, there, elsewhere in (({"dp": 2, "zero": 2}, phases.DATA, phases.TENSOR),
                                      ({"dp": 2, "zero": 3}, phases.DATA, phases.TENSOR),
                                      ({"tp": 2}, phases.TENSOR, "")):
        model, given = nets.parallel(degrees), nets.batch()
        loss = model(*given)
        loss.backward()
        timeline = model.measure(*given)
        found = {phases.phase(span) for span in timeline.spans if span.stream == COMM}
        assert there in found and elsewhere not in found, (degrees, found)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


ASKED = {"tp": 2, "num_micro_batches": 2, "recompute": True, "precision": "bfloat16"}


def test_one_process_does_what_constraints_ask_of_it(caplog: pytest.LogCaptureFixture) -> None:
    parallel = ap.parallelize(zoo.build("gpt2"), constraints=ASKED, confirm=8)
    batch = zoo.batch("gpt2", 4)
    assert _near(parallel(**batch), zoo.build("gpt2")(**batch).loss, 0.02)
    assert parallel.plan.num_micro_batches == 2
    assert parallel.plan.replicas[0].stages[0].recompute
    assert {held.leaf.dtype for held in parallel.store.held.values()} >= {torch.bfloat16}
    assert "not honoured, as there is one process: tp, confirm" in caplog.text


def test_what_is_no_sum_over_rows_is_refused_wherever_it_is_made() -> None:
    class Root(_TwoMeans):
        def forward(self, x: Tensor) -> Tensor:
            return self.mean(self.body(x)).sqrt()

    x = torch.ones(6, 8)
    assert _near(ap.parallelize(Root(), plan=ap.Plan.uniform())(x=x), Root()(x))
    with pytest.raises(PlanError, match=r"together\(sqrt\) uses statistics of the whole batch"):
        ap.parallelize(Root(), plan=ap.Plan.uniform(num_micro_batches=3))(x=x)


def test_outputs_that_are_not_there_are_refused() -> None:
    with pytest.raises(PlanError, match="returns no logit, only"):
        ap.parallelize(zoo.build("gpt2"), outputs=("logit",))(**zoo.batch("gpt2", 4))


def test_a_negative_number_of_plans_cannot_be_tried() -> None:
    with pytest.raises(PlanError, match="-1 plans cannot be tried"):
        ap.parallelize(zoo.build("gpt2"), confirm=-1)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_memory_that_was_freed_is_not_mapped_anew() -> None:
    """Once it has settled; in a process of its own, as it stays so."""
    code = """
import resource, torch
from autopar_torch.run import freed_pages
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def steps(count):
    before = faults()
    for _ in range(count):
        torch.ones(16 << 20)
    return faults() - before
unkept = steps(5)
freed_pages.keep_freed_pages()
steps(10)
print(unkept, steps(5))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True, timeout=300)
    unkept, kept = map(int, done.stdout.split())
    assert kept < unkept / 2

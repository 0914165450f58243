"""What training scripts do, under plans that are uneven or leave devices idle, on 3 ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar_torch as ap
import claims
import nets
import oracle
import zoo
from autopar_torch.datasheets import named
from autopar_torch.errors import PlanError
from autopar_torch.plan import Plan, Replica, Stage, check
from autopar_torch.run.sharded import local
from nets import near, refused
from test_uneven_ranks import DEPTHS, IDLE, WIDTHS, chain, plan

PLANS = {"idle": IDLE, "0 idles, ZeRO 3": plan(chain("1"), chain("2"), zero=3),
         "pp2 + pp1": DEPTHS, "tp2 + tp1": WIDTHS,
         "rows 5:2:1, ZeRO 3": plan(*(chain(f"{r}", rows=n, micro=2)
                                      for r, n in enumerate((5, 2, 1))), zero=3),
         "shares 2:1:1, ZeRO 2": plan(chain("0", micro=2), chain("1"), chain("2"), zero=2)}
SHARED = plan(chain("0", share=1), chain("1", share=1), chain("2", share=2), zero=2)
REPLICAS = [name for name, own in PLANS.items() if own not in (DEPTHS, WIDTHS)]


class Net(nn.Module):
    """A classifier, whose loss is in it if it is given labels."""

    def __init__(self, drop: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm, self.drop, self.head = norm(8), nn.Dropout(drop), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.drop(x)))
        logits = self.head(self.norm(x))
        return logits if y is None else F.cross_entropy(logits, y)


class Untraced(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(2 * x if float(x.sum()) > 1e9 else x, y)


def pairs(kind: Any = Net, names: Any = PLANS, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Under each plan: the parallelized model and a plain one."""
    for name in names:
        yield ap.parallelize(kind(), plan=PLANS[name], **options), kind()


def same(model: Any, plain: nn.Module) -> None:
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert near(state[name], value), (model.plan.describe(), name)


def slow_claim_evaluation_sees_all_rows_however_few() -> None:
    for model, plain in pairs(lambda: zoo.build("nanogpt")):
        for rows in (8, 3, 2, 1):
            batch = zoo.batch("nanogpt", rows, pad=True)
            want = plain(**batch)
            assert near(oracle.loss_of(model(**batch)), want[1])
            model.eval()
            with torch.no_grad():
                logits, loss = model(**batch)
            assert near(logits, want[0]) and near(loss, want[1]), model.plan.describe()
            model.train()


def claim_batches_of_few_rows_train_as_in_one_process() -> None:
    for model, plain in pairs():
        for rows in (8, 5, 3, 2, 1, 8):
            losses = [m(*nets.batch(rows, rows)) for m in (model, plain)]
            for loss, m in zip(losses, (model, plain), strict=True):
                loss.backward()
                _descend(m)
            assert near(*losses), (model.plan.describe(), rows)
        same(model, plain)


def _descend(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None


def slow_claim_losses_outside_accumulation_schedulers_and_torchs_clipping_are_right() -> None:
    weight = torch.arange(1.0, 5.0)
    for both in pairs():
        norms: list[list[Tensor]] = [[], []]
        for model, found in zip(both, norms, strict=True):
            opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
            for step, rows in enumerate((8, 6, 1, 8)):
                for part in range(2):
                    x, y = nets.batch(rows, 10 * step + part)
                    (F.cross_entropy(model(x), y, weight=weight) / 2).backward()
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                opt.step()
                opt.zero_grad()
                scheduler.step()
        assert near(torch.stack(norms[0]), torch.stack(norms[1]))
        same(*both)


def slow_claim_a_grad_scaler_and_an_optimizer_that_sees_whole_matrices_are_right() -> None:
    for both in pairs():
        for model in both:
            opt = torch.optim.Adafactor(model.parameters())
            scaler = torch.amp.GradScaler("cpu", 8.0)
            for step in range(2):
                x, y = nets.batch(8, step)
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        same(*both)


def slow_claim_averages_of_weights_and_states_of_optimizers_are_whole() -> None:
    for model, plain in pairs(example_inputs=nets.batch()):
        averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))
                    for m in (model, plain)]
        opts = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, plain)]
        for step in range(3):
            for m, opt, average in zip((model, plain), opts, averages, strict=True):
                m(*nets.batch(8, step)).backward()
                opt.step()
                opt.zero_grad()
                average.update_parameters(m)
            if step == 1:
                opts[0].load_state_dict(copy.deepcopy(opts[1].state_dict()))
        same(model, plain)
        for name, value in averages[1].module.state_dict().items():
            assert near(averages[0].module.state_dict()[name], value), name


def slow_claim_a_module_that_is_not_traced_takes_its_rows_by_shares() -> None:
    for model, plain in pairs(Untraced, REPLICAS):
        for step, rows in enumerate((8, 6, 3, 1)):
            x, y = nets.batch(rows, step)
            for inside in (True, False):
                losses = [m(x, y) if inside else F.cross_entropy(m(x), y) for m in (model, plain)]
                for loss, m in zip(losses, (model, plain), strict=True):
                    loss.backward()
                    _descend(m)
                assert near(*losses), (model.plan.describe(), rows)
        same(model, plain)


def slow_claim_dropout_gives_all_ranks_one_loss_and_equal_copies() -> None:
    for model, _ in pairs(lambda: Net(0.5), guards={"drift_every": 1}):
        opt, losses = oracle.optimizer(model.parameters()), []
        for _ in range(3):
            losses.append(model(*nets.batch()))
            losses[-1].backward()
            opt.step()
        found = torch.stack(losses).tolist()
        assert model.world.gather(found) == [found] * 3 and len(set(found)) == 3


def slow_claim_batch_statistics_need_a_row_in_every_replica_to_train_and_none_to_evaluate() -> None:
    names = [n for n, own in PLANS.items() if own.num_micro_batches == len(own.replicas)]
    for model, plain in pairs(lambda: Net(norm=nn.BatchNorm1d), names):
        x, y = nets.batch()
        assert near(model(x, y), plain(x, y))
        same(model, plain)
        assert "none for replica 1" in refused(lambda m=model: m(*nets.batch(1)))  # type: ignore[misc]
        model.eval()
        plain.eval()
        with torch.no_grad():
            assert near(model(x[:1]), plain(x[:1]))


def slow_claim_statistics_that_were_frozen_at_first_are_no_way_around() -> None:
    for name in ("idle", "pp2 + pp1"):
        frozen = Net(norm=lambda size: nn.BatchNorm1d(size, track_running_stats=True))  # type: ignore[arg-type]
        frozen.norm.eval()
        model = ap.parallelize(frozen, plan=PLANS[name])
        model(*nets.batch())
        model.norm.train()
        assert refused(lambda m=model: m(*nets.batch())).startswith(  # type: ignore[misc]
            "this call uses norm.num_batches_tracked")


def claim_an_idle_rank_holds_and_computes_nothing() -> None:
    model = ap.parallelize(Net(), plan=IDLE)
    loss = model(*nets.batch())
    loss.backward()
    if model.world.rank == 1:
        assert not model.store.held and not any(p.stages for own in model._programs.values()
                                                for p in own)
        assert not any(local(p).numel() for p in model.parameters())
        assert model.local_slice(8) == slice(0, 0) and not model.speaks
    assert len(set(model.world.gather(loss.item()))) == 1
    assert model.measure(*nets.batch()).ranks == [0, 1, 2]


def claim_pieces_are_as_large_as_their_shares() -> None:
    model = ap.parallelize(Net(), plan=SHARED)
    model(*nets.batch()).backward()
    kept = sum(local(p).numel() for p in model.parameters())
    parts = [own / sum(model.world.gather(kept)) for own in model.world.gather(kept)]
    assert near(parts, [0.25, 0.25, 0.5], 0.05)


def claim_an_output_with_the_batch_in_two_dims_is_right_where_one_replica_has_all_rows() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            z = self.b(torch.tanh(self.a(x)))
            return z @ z.T

    model = ap.parallelize(Products(), plan=plan(chain("2")))
    x = nets.batch()[0]
    assert near(model(x), Products()(x))


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_3_ranks(name: str) -> None:
    claims.hold(__name__, name, 3)


# --- without ranks --------------------------------------------------------------------------------


def test_a_device_that_is_not_there_is_refused_and_idle_ones_are_named() -> None:
    own = plan(chain("1", rows=3), chain("3", rows=1))
    check(own, 6)
    assert own.idle() == (0, 2) and "idle: 0, 2, 4-5" in own.describe(6)
    assert own.replica_of(3) == 1 and own.replica_of(0) is None
    with pytest.raises(PlanError, match=r"names 2 devices \(1, 3\), but torchrun started 3"):
        check(own, 3)


def simulated(own: Plan, num_devices: int) -> Any:
    cluster = named(f"1x{num_devices}xH100")
    return ap.simulate(own, zoo.build("nanogpt"), zoo.batch("nanogpt", 8), cluster)


def test_an_idle_device_is_priced_as_a_part_in_the_sum_of_the_loss() -> None:
    pair, quad = Plan.uniform(dp=2), plan(chain("1"), chain("3"))
    two, four = simulated(pair, 2), simulated(quad, 4)
    assert two.step_s < four.step_s < two.step_s + 1e-4
    assert [m.peak_bytes > m.fixed for m in four.memory] == [False, True, False, True]
    assert {span.name for span in four.of(0)} == {"loss"}


def test_pieces_are_priced_by_their_shares() -> None:
    first, second, third = (m.optimizer for m in simulated(SHARED, 3).memory)
    assert first == second and near(third, 2 * first, 0.05)
    with pytest.raises(PlanError, match="2 shares for 1 devices"):
        check(plan(Replica((Stage((0,), share=(1, 2)),))), 1)


def test_meshes_of_other_stages_are_priced_each_by_its_own_links() -> None:
    square, row = chain("0123", mesh=(2, 2)), chain("4567")
    for own in (plan(square, row), plan(chain("0123", "4567", mesh=(2, 2)))):
        assert simulated(own, 8).step_s > 0

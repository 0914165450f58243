"""What a call returns, in training and evaluation, and what may be done with the model."""

from __future__ import annotations

import copy
import dataclasses
import io
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar_torch as ap
import claims
import zoo
from autopar_torch.errors import PlanError, RunError
from autopar_torch.plan import Replica, Stage
from nets import ALL, DP2, PP2, TP2, Net, batch, near, net, parallel, refused, step_losses


def claim_logits_and_loss_unpack_in_training_and_eval() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        x, y = batch(6)
        logits, loss = model(x, y)
        out = model(x, y)
        assert isinstance(out, tuple) and near(out[1], loss) and near(out / 2, 0.5 * loss)
        assert near(loss, plain(x, y)[1]) and float(out) == out.item()
        said = refused(lambda z=logits: z.argmax(-1))
        assert "not gathered" in said and "outputs=('0',)" in said, said
        model.eval()
        plain.eval()
        with torch.no_grad():
            got, want = model(x, y), plain(x, y)
            assert type(got) is tuple and near(got[0], want[0]) and near(got[1], want[1]), degrees
            got, want = model(x), plain(x)
            assert near(got[0], want[0]) and got[1] is None, degrees


def slow_claim_outputs_asked_for_come_in_the_models_own_form() -> None:
    model, plain = parallel(PP2, outputs=("0",)), net()
    x, y = batch(6)
    logits, loss = model(x, y)
    want = plain(x, y)
    assert near(logits, want[0]) and near(loss, want[1])


def slow_claim_hugging_face_outputs_are_what_they_are() -> None:
    model, plain = ap.parallelize(zoo.build("gpt2"), plan=ap.Plan.uniform(**PP2)), zoo.build("gpt2")
    data = zoo.batch("gpt2", 4)
    out, want = model(**data), plain(**data)
    for loss in (out.loss, out["loss"], out[0], out):
        assert near(loss, want.loss)
    assert "not gathered" in refused(lambda: out.logits + 1)
    model.eval()
    plain.eval()
    with torch.no_grad():
        del data["labels"]
        got, want = model(**data), plain(**data)
        assert type(got) is type(want) and near(got.logits, want.logits) and got.loss is None
        got = model(**data, output_hidden_states=True)
        want = plain(**data, output_hidden_states=True)
        assert len(got.hidden_states) == len(want.hidden_states)
        assert all(near(a, b) for a, b in zip(got.hidden_states, want.hidden_states, strict=True))


@dataclasses.dataclass(frozen=True)
class Scores:
    logits: Tensor
    loss: Tensor | None
    hidden: list[Tensor]


class Scoring(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Scores:  # type: ignore[override]
        logits, loss = super().forward(x, y)
        return Scores(logits, loss, [logits.exp()])


def slow_claim_a_dataclass_comes_back_as_what_it_is() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees, Scoring), net(Scoring)
        x, y = batch(6)
        for out in (model(x, y), model(x, y).own):
            assert near(out.loss, plain(x, y).loss) and "not gathered" in refused(
                lambda o=out: o.logits + 1)
        inside, want = model(x), plain(x)  # the loss is made outside
        assert type(inside) is Scores and inside.loss is None
        for out in (inside, want):
            (out.logits.square().mean() + out.hidden[0].mean()).backward()
        assert near(*(dict(m.named_parameters())["head.weight"].grad for m in (model, plain)))
        with torch.no_grad():
            got = model.eval()(x, y)
            assert type(got) is Scores and near(got.hidden[0], plain.eval()(x, y).hidden[0])


class Opaque(Net):
    def forward(self, x: Tensor) -> object:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(x, None)[0])


def claim_a_class_that_hides_its_tensors_is_refused_with_what_to_return() -> None:
    for degrees in ALL:
        said = refused(lambda d=degrees: parallel(d, Opaque)(batch()[0]))
        assert "no tensor is found" in said and "dataclass" in said, said


class Mixing(nn.Module):
    """Takes how tokens are mixed with every call: no tensor of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mix: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.einsum("ij,bjd->bid", mix, x)))).square().mean()


def claim_a_batch_may_happen_to_be_as_large_as_a_tensor_without_rows() -> None:
    mix = torch.rand(6, 6, generator=torch.Generator().manual_seed(1))
    for degrees in ALL:
        model, plain = parallel(degrees, Mixing), net(Mixing)
        for rows in (8, 6, 4):
            x = torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(rows))
            assert near(model(x, mix), plain(x, mix)), (degrees, rows)


def slow_claim_the_first_call_may_be_an_evaluation() -> None:
    for degrees in ALL:
        model, plain = parallel(degrees), net()
        model.eval()
        plain.eval()
        with torch.no_grad():
            assert near(model(*batch())[1], plain(*batch())[1])
        model.train()
        plain.train()
        assert near(step_losses(model), step_losses(plain)), degrees
    model = parallel(TP2)
    model.eval()
    with torch.inference_mode():
        assert near(model(*batch())[1], net()(*batch())[1])
    model.train()
    assert near(step_losses(model), step_losses(net()))


class Dropped(nn.Module):
    """Its dropout layers are blocks of their own in training, and nothing in evaluation."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8),
                                     nn.Dropout(0.5), nn.Linear(8, 4)])
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        order = [3, 1, 0, 5] if self.turned and not self.training else range(6)
        for number in order:
            x = self.layers[number](x)
        return x


def slow_claim_layers_that_only_training_has_are_left_out_of_evaluation() -> None:
    alone = ap.Plan((Replica((Stage((0,), (0, 4)), Stage((1,), (4, 5)), Stage((0,), (5, 6)))),))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for plan in (alone, *(ap.Plan.uniform(**degrees) for degrees in ALL)):
        model, plain = ap.parallelize(Dropped(), plan=plan), Dropped().eval()
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            assert near(model(x), plain(x)), plan
    model = ap.parallelize(Dropped(turned=True), plan=ap.Plan.uniform(**PP2))
    model(x).sum().backward()
    model.eval()
    assert "where the first did not" in refused(lambda: model(x))


class Tasks(nn.Module):
    """Each call takes one of its heads; one has statistics of the batch, one a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleDict({
            "a": nn.Linear(16, 3), "b": nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 2)),
            "c": nn.Sequential(nn.Linear(16, 8).requires_grad_(False), nn.Linear(8, 1))})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.body(x)).square().mean()


def _trained_in_turn(model: Any, tasks: str = "abcba") -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for seed, task in enumerate(tasks):
        draw = torch.Generator().manual_seed(seed)
        model(torch.randn(8, 8, generator=draw, dtype=torch.float64), task).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


def claim_each_call_may_take_a_branch_of_its_own() -> None:
    replicas = [{"dp": 2, "zero": zero} for zero in range(4)]
    for tasks, plans in (("abcba", [*replicas, TP2]), ("cac", [PP2, TP2])):
        want = _trained_in_turn(Tasks().double(), tasks)
        for degrees in plans:
            plan = ap.Plan.uniform(**degrees)
            got = _trained_in_turn(ap.parallelize(Tasks().double(), plan=plan), tasks)
            assert all(near(a, b, 1e-9) for a, b in zip(got, want, strict=True)), degrees


def claim_buffers_that_only_another_branch_writes_are_refused_under_pipelines() -> None:
    model = ap.parallelize(Tasks(), plan=ap.Plan.uniform(pp=2))
    model(torch.ones(4, 8), "a")
    assert "or use replicas" in refused(lambda: model(torch.ones(4, 8), "b"))


class Taught(nn.Module):
    """A student and a frozen teacher that it goes along with, block by block by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8))
        self.teacher = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor | None]:
        out = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        return {"loss": None if y is None else (out - wanted).square().mean() + out.mean(),
                "out": out}


def claim_stages_keep_their_parameters_in_evaluation() -> None:
    plain, (x, y) = Taught(), batch()
    model = ap.parallelize(Taught(), plan=ap.Plan.uniform(**PP2))
    model(x, y)["loss"].backward()
    model.eval()
    with torch.no_grad():
        for given in ((x, y), (x,)):
            assert near(model(*given)["out"], plain(*given)["out"])


def claim_a_dict_is_one_in_training_too() -> None:
    model = ap.parallelize(Taught(), plan=ap.Plan.uniform(**DP2), outputs=["out"])
    out = model(*batch())
    assert isinstance(out, dict) and isinstance(out, Tensor) and out["out"].shape == (8, 8)
    assert near(out["loss"], Taught()(*batch())["loss"]) and type(type(out)({"a": 1})) is dict


def slow_claim_autocast_around_forward_is_as_in_one_process() -> None:
    for degrees in ALL:
        model, plain, exact = parallel(degrees), net(), net()
        x, y = batch()
        losses = []
        for m in (model, plain, exact):
            with torch.autocast("cpu", torch.bfloat16, enabled=m is not exact):
                losses.append(m(x, y)[1])
            losses[-1].backward()
        assert near(losses[0], losses[1], 1e-4) and not near(losses[0], losses[2], 1e-6), degrees
        without = model(x, y)[1]
        assert near(without, losses[2]), degrees


def claim_wrappers_around_it_are_refused() -> None:
    model = parallel(DP2)
    model(*batch())
    around = nn.parallel.DistributedDataParallel(nn.Sequential(model))
    for wrap in (lambda: nn.parallel.DistributedDataParallel(model), lambda: around(batch()[0])):
        said = refused(wrap)
        assert "DistributedDataParallel" in said, said
    from torch.distributed.fsdp import fully_shard

    def shard() -> None:
        other = parallel(DP2)
        other(*batch())
        fully_shard(other)(*batch())

    assert "fully_shard" in refused(shard)


def claim_models_that_something_else_splits_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.compile, fully_shard):
        said = refused(lambda w=wrap: ap.parallelize(w(net())))
        assert "parallelize: model" in said and "fix" in said, (wrap, said)


def claim_a_change_on_one_rank_is_seen_in_the_fingerprint() -> None:
    model = parallel(DP2)
    model(*batch())
    hashes: list[Any] = [None, None]
    dist.all_gather_object(hashes, model.fingerprint_hash())
    assert hashes[0] == hashes[1]
    if dist.get_rank():
        model.module.flip = True
    dist.all_gather_object(hashes, model.fingerprint_hash())
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)


class Out(NamedTuple):
    logits: Tensor
    loss: Tensor
    extra: Any
    rows: int


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits, loss = self.net(x, y)
        return Out(logits, loss, {"deep": [logits.sum(), None]}, x.shape[0])


def test_any_structure_comes_back_from_eval() -> None:
    model, plain = ap.parallelize(net(Odd)), net(Odd)
    assert near(model(*batch())[1], plain(*batch())[1])
    model.eval()
    with torch.no_grad():
        got = model(*batch(5))
    assert type(got) is Out and got.rows == 5 and got.extra["deep"][1] is None
    assert near(got.extra["deep"][0], plain(*batch(5))[2]["deep"][0])


def test_a_model_is_parallelized_once() -> None:
    module = net()
    model = ap.parallelize(module)
    with pytest.raises(PlanError, match="already in ParallelModel"):
        ap.parallelize(model)
    with pytest.raises(PlanError, match="already in ParallelModel"):
        ap.parallelize(nn.Sequential(model))
    model(*batch())
    with pytest.raises(PlanError, match="already parallelized"):
        ap.parallelize(module)


def test_models_may_share_what_has_no_parameters() -> None:
    """As the default argument `act=nn.SiLU()` is in all models of a class."""
    act = nn.SiLU()
    for _ in range(2):
        model = ap.parallelize(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 1)))
        model(torch.ones(2, 4)).sum().backward()


def test_copies_and_pickles_say_what_to_do() -> None:
    model = ap.parallelize(net())
    for attempt in (copy.copy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RunError, match="state_dict"):
            attempt(model)  # type: ignore[operator]


def test_moving_a_planned_model_is_refused_where_it_would_change_it() -> None:
    model = ap.parallelize(net())
    model(*batch())
    model.to("cpu").float().to(torch.float32)
    for move in (lambda: model.half(), lambda: model.bfloat16(), lambda: model.double(),
                 lambda: model.to("meta"), lambda: model.to(torch.float64)):
        with pytest.raises(RunError, match="before parallelize"):
            move()
    assert next(model.parameters()).dtype == torch.float32

"""What is saved under one plan and world size goes on under any other, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopar_torch as ap
import damage
import oracle
import zoo
from autopar_torch import files
from autopar_torch.errors import CheckpointError, RunError
from autopar_torch.plan import Replica, Stage
from autopar_torch.run import stored
from ranks import run_ranks

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "num_micro_batches": 2}),
    "zero3": (2, {"dp": 2, "zero": 3}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "num_micro_batches": 2}),
    "tp2|pp2": (4, {"unequal": True}),  # parameters that ranks cut differently
    "one": (1, {}),
}
UNEQUAL = ap.Plan((Replica((Stage((0, 1)),)), Replica((Stage((2,)), Stage((3,))), 2)))
NAME = "gpt2"


def _start(degrees: dict[str, Any], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    plan = UNEQUAL if "unequal" in degrees else ap.Plan.uniform(**degrees)
    model = ap.parallelize(zoo.build(NAME, seed), zoo.batch(NAME, 8), plan=plan)
    return model, oracle.optimizer(model.parameters())


def _steps(model: Any, opt: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(**zoo.batch(NAME, 8, seed, pad=True))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def save_all(names: list[str], folder: str) -> dict[str, list[float]]:
    """In a rank: two steps, save, two more; the losses of the last two."""
    losses = {}
    for name in names:
        model, opt = _start(PLANS[name][1], 0)
        _steps(model, opt, range(2))
        model.save(Path(folder) / name, opt)
        losses[name] = _steps(model, opt, range(2, 4))
    return losses


def load_all(names: list[str], saved: list[str], folder: str) -> dict[str, list[float]]:
    """In a rank: what was saved under each plan, gone on with under each of `names`."""
    losses = {}
    for name in names:
        for source in saved:
            model, opt = _start(PLANS[name][1], 9)
            model.load(Path(folder) / source, opt)
            losses[f"{source} -> {name}"] = _steps(model, opt, range(2, 4))
    return losses


def _of_size(num_ranks: int) -> list[str]:
    return [name for name, (size, _) in PLANS.items() if size == num_ranks]


@pytest.mark.slow
def test_training_goes_on_under_any_other_plan_as_if_nothing_had_happened(tmp_path: Path) -> None:
    saved: dict[str, list[float]] = {}
    for n in (1, 2, 4):
        saved |= run_ranks(n, "test_checkpoints:save_all", _of_size(n), str(tmp_path))[0]
    for n in (1, 2, 4):
        found = run_ranks(n, "test_checkpoints:load_all", _of_size(n), list(PLANS), str(tmp_path))
        for what, losses in found[0].items():
            assert losses == pytest.approx(saved["one"], rel=1e-5), what


def test_weights_of_another_model_are_refused_and_those_that_are_missing_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    path, state = tmp_path / "own.safetensors", {"weight": torch.ones(4, 4)}

    def start(tensors: dict[str, torch.Tensor]) -> Any:
        save_file(tensors, str(path))
        return ap.parallelize(Loss(4, 4), torch.zeros(2, 4), weights=path)

    with pytest.raises(CheckpointError, match="none of the 2 tensors of the model is there"):
        start({"other": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"weight is \(2, 4\) there, \(4, 4\) here"):
        start({"weight": torch.ones(2, 4)})
    assert torch.equal(start(state).state_dict()["weight"], state["weight"])
    assert "1 tensors of the model are not in" in caplog.text


def test_saving_needs_a_first_batch_and_groups_that_hold_the_same(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="before the first batch"):
        ap.parallelize(zoo.build("gpt2")).save(tmp_path)
    model, opt = _start({}, 0)
    model.save(tmp_path, opt)
    names = [name for name, _ in model.named_parameters()]
    halves = [[p for i, p in enumerate(model.parameters()) if i % 2 == k] for k in (0, 1)]
    with pytest.raises(CheckpointError, match=f"groups of {len(names)} parameters there"):
        model.load(tmp_path, torch.optim.AdamW([{"params": half} for half in halves]))


def test_what_is_no_checkpoint_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model, opt = _start({}, 0)
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        model.load(tmp_path / "nothing", opt)
    model.save(tmp_path / "gpt2")
    other = ap.parallelize(zoo.build("llama"), zoo.batch("llama", 4))
    with pytest.raises(CheckpointError, match="not in it"):
        other.load(tmp_path / "gpt2")


# --- bit by bit, and together ---------------------------------------------------------------------

BITWISE = [
    ("resnet", {"tp": 2}, {"dp": 2, "zero": 3}),
    ("nanogpt", {"dp": 2, "zero": 1}, {"pp": 2, "num_micro_batches": 2}),
    ("gpt2", {"tp": 2, "precision": "bfloat16"}, {"dp": 2, "zero": 2}),
    ("llama", {"pp": 2, "num_micro_batches": 2}, {"tp": 2}),
]


def _trained(name: str, degrees: dict[str, Any], seed: int, **options: Any) -> tuple[Any, Any]:
    """One step, with a parameter that is frozen."""
    built = zoo.build(name, seed)
    list(built.parameters())[1].requires_grad_(False)
    plan = ap.Plan.uniform(**degrees)
    model = ap.parallelize(built, zoo.batch(name, 8), plan=plan, **options)
    opt = oracle.optimizer(model.parameters())
    loss = model(**zoo.batch(name, 8))
    loss.backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def _contents(folder: Path) -> dict[str, torch.Tensor]:
    saved = stored.Checkpoint(folder, stored.read(folder))
    return {name: saved.whole(name) for name in saved.manifest.tensors}


def _same(a: Path, b: Path) -> None:
    here, there = _contents(a), _contents(b)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def _error(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was accepted")


@contextlib.contextmanager
def _no_room(rank: int) -> Iterator[None]:
    """On one rank files cannot grow beyond 4 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ.get("RANK", 0)) == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _Squared(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def _state_of_whole_tensors_goes_on(root: Path) -> None:
    """Adafactor keeps rows and columns of whole parameters, on every rank."""
    x, plans, losses = torch.linspace(-1, 1, 64).view(8, 8), ({"pp": 2}, {"tp": 2}, {"pp": 2}), []
    for index, degrees in enumerate(plans):
        torch.manual_seed(index)
        net = _Squared(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        model = ap.parallelize(net, x, plan=ap.Plan.uniform(**degrees))
        opt = torch.optim.Adafactor(model.parameters(), lr=0.1)
        if index:
            model.load(root / "whole", opt)
        for _ in range(2):
            loss = model(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            if not index and len(losses) == 1:
                model.save(root / "whole", opt)
    assert losses[2::2] == pytest.approx([losses[1]] * 2, rel=1e-5)
    assert losses[3] == pytest.approx(losses[5], rel=1e-5)


def claims_of_two(name: str) -> list[str]:
    """In a rank: what holds for every pair of plans, and when one of two ranks fails."""
    torch.set_num_threads(1)
    root, model, opt = Path(name), None, None
    _state_of_whole_tensors_goes_on(root)
    for index, (net, first, second) in enumerate(BITWISE):
        a, b, c = (root / f"{index}{way}" for way in "abc")
        model, opt = _trained(net, first, 0)
        model.save(a, opt)
        model, opt = _trained(net, second, 9)
        model.load(a, opt)
        model.save(b, opt)
        _same(a, b)
        with torch.device("meta"):
            empty = zoo.build(net)
        list(empty.parameters())[1].requires_grad_(False)
        ap.parallelize(empty, zoo.batch(net, 8), plan=ap.Plan.uniform(**first), weights=a).save(c)
        want, got = _contents(a), _contents(c)
        assert all(torch.equal(want[n], got[n]) for n in got if net != "resnet" or "num_" not in n)
    with _no_room(1):
        errors = [_error(lambda: model.save(a, opt))]
    model.load(a, opt)
    model.save(c, opt)
    _same(a, c)
    if os.environ["RANK"] == "0":
        damage.flip_header(damage.random.Random(0), b, a)
    torch.distributed.barrier()
    return [*errors, _error(lambda: model.load(b, opt)), *map(str, sorted(a.iterdir()))]


@pytest.mark.slow
def test_two_ranks_keep_every_bit_and_fail_together(tmp_path: Path) -> None:
    first, second = run_ranks(2, "test_checkpoints:claims_of_two", str(tmp_path))
    assert "cannot save: rank 1" in first[0]
    for full, damaged, *_ in (first, second):
        assert "File too large" in full and "fix:" in full
        assert "damaged" in damaged and "3b" in damaged
    assert len(first) == 2 + 3  # the manifest and a file of each rank: nothing is left over


# --- what is refused ------------------------------------------------------------------------------


def _refused(act: Callable[[], Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as found:
        act()
    assert found.value.where and found.value.fix


def test_only_an_optimizer_that_fits_is_filled_and_nothing_changes_otherwise(
    tmp_path: Path,
) -> None:
    model, opt = damage.start(0)
    model.save(tmp_path / "a", opt)
    model.save(tmp_path / "alone")
    other, fresh = damage.start(1)
    before = damage.content(other, fresh)
    sgd = torch.optim.SGD(other.parameters(), lr=1.0)
    _refused(lambda: other.load(tmp_path / "a", sgd), "state of 'AdamW', the optimizer is SGD")
    _refused(lambda: other.load(tmp_path / "alone", fresh), "without an optimizer")
    disguised = type("AdamW", (torch.optim.SGD,), {})(other.parameters())
    _refused(lambda: other.load(tmp_path / "a", disguised), "other settings there .*: dampening")
    double = ap.parallelize(damage.Small().double(), damage.X.double())
    _refused(lambda: double.load(tmp_path / "a"), "is F32 there, F64 here")
    longer = damage.Small()
    longer.body.append(nn.Linear(2, 2))
    _refused(lambda: ap.parallelize(longer, damage.X).load(tmp_path / "a"), "of the model are not")
    longer = damage.Small()
    longer.body.append(nn.Linear(2, 2))
    ap.parallelize(longer, damage.X).save(tmp_path / "longer")
    _refused(lambda: other.load(tmp_path / "longer"), "2 in it are not in the model")
    assert damage.content(other, fresh) == before
    other.load(tmp_path / "a", fresh)
    assert damage.content(other, fresh) == damage.content(model, opt)


def test_settings_that_are_no_plain_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    model, _ = damage.start(0)
    rate = torch.tensor(0.25)
    opt = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.5, 0.75))
    opt.param_groups[0] |= {"limit": float("inf"), "warm": [1, (2.5, None)]}
    model.save(tmp_path, opt)
    other = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    other.param_groups[0] |= {"limit": 1.0, "warm": []}
    held = other.param_groups[0]["lr"]
    model.load(tmp_path, other)
    found = other.param_groups[0]
    assert found["lr"] is held and float(held) == 0.25
    assert (found["betas"], found["limit"]) == ((0.5, 0.75), float("inf"))
    opt.param_groups[0]["act"] = print
    _refused(lambda: model.save(tmp_path, opt), "a builtin_function_or_method cannot be written")


def test_the_newest_steps_stay_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    model, opt = damage.start(0)
    for step in (1, 3, 20):
        model.save(tmp_path, opt, step=step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-20", "step-3"]
    model.save(tmp_path, opt, step=2, keep=1)  # back in time: what was just saved stays
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]
    model.save(tmp_path, opt, step=5)
    assert (model.load(tmp_path, opt), model.load(tmp_path / "step-2")) == (5, 2)
    next((tmp_path / "step-5").glob("*.safetensors")).write_bytes(b"")
    _refused(lambda: model.load(tmp_path, opt), "0 bytes")
    with pytest.raises(CheckpointError, match="step-2 is whole"):
        model.load(tmp_path, opt)
    _refused(lambda: model.save(tmp_path, opt), "checkpoints by step")
    for wrong in ({"step": -1}, {"step": True}, {"keep": 1}, {"step": 1, "keep": 0}):
        _refused(lambda wrong=wrong: model.save(tmp_path, opt, **wrong), "keep|step")
    model.save(tmp_path / "plain", opt)
    _refused(lambda: model.save(tmp_path / "plain", opt, step=1), "without a step")


def test_folders_that_cannot_be_written_or_are_of_others_are_refused(tmp_path: Path) -> None:
    model, opt = damage.start(0)
    (tmp_path / "file").touch()
    _refused(lambda: model.save(tmp_path / "file", opt), "cannot save")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "manifest.json").write_text("{}")
    _refused(lambda: model.save(tmp_path / "theirs", opt), "of something else")
    model.save(tmp_path / "own", opt)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    assert model.load(tmp_path / "link", opt) is None
    _refused(lambda: model.save(tmp_path / "own" / "\0", opt), "null byte")


def test_damage_is_found_and_never_runs() -> None:
    counts = damage.attempts(150)
    assert counts.keys() <= {"refused", "loaded, right"}, counts
    counts = damage.plain_attempts(50)
    assert counts.keys() <= {"refused", "loaded"}, counts


def test_the_old_form_is_refused_and_goes_on_as_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import save

    monkeypatch.chdir(tmp_path)
    model, opt = damage.start(0)
    named = dict(model.named_parameters())
    state = {f"model.{n}": t for n, t in model.state_dict().items()}
    state |= {f"optim.{n}.{k}": v for n, p in named.items() for k, v in opt.state[p].items()}
    save(state, checkpoint_id="old", no_dist=True)
    group = {k: v for k, v in opt.param_groups[0].items() if k != "params" and v is not None}
    files.save({"groups": [group], "names": [list(named)]}, "old/optimizer.json")
    other, fresh = damage.start(1)
    _refused(lambda: other.load("old", fresh), "old form")
    _refused(lambda: ap.parallelize(damage.Small(), damage.X, weights="old"), "old form")
    text = (Path(__file__).parent.parent / "docs" / "guide" / "save_and_load.md").read_text()
    lines = text[text.index("**Earlier versions**") :].split("```")[1].removeprefix("python")
    exec(lines, {"model": other, "opt": fresh})
    other, fresh = damage.start(2)
    other.load("new", fresh)
    assert damage.content(other, fresh) == damage.content(model, opt)


@pytest.mark.slow
def test_kills_during_saving_leave_the_last_step_whole() -> None:
    command = [sys.executable, str(Path(__file__).parent / "kills.py"), "12"]
    with tempfile.TemporaryFile("w+") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=800)
        out.seek(0)
        assert done.returncode == 0, out.read()


@pytest.mark.slow
def test_two_thousand_damaged_checkpoints_are_refused() -> None:
    counts = damage.attempts(2000, seed=1)
    assert counts.keys() <= {"refused", "loaded, right"}, counts


def beside(folder: str) -> list[Any]:
    """What is saved beside training is what the model was then, not what it has become."""
    model, opt = _start({"dp": 2, "zero": 1}, 0)
    _steps(model, opt, range(1, 2))
    model.save(f"{folder}/now", opt)
    model.save(f"{folder}/beside", opt, step=1, background=True)
    _steps(model, opt, range(2, 3))
    model.save(f"{folder}/beside", opt, step=2, keep=1, background=True)
    model.load(f"{folder}/beside", opt)  # waits for it
    again = _steps(model, opt, range(3, 4))
    model.save(f"{folder}/beside", opt, step=3, background=True)
    done = model.resume(f"{folder}/beside", opt)
    other, other_opt = _start({"pp": 2, "num_micro_batches": 2}, 1)
    none = other.resume(f"{folder}/nothing", other_opt)
    other.load(f"{folder}/now", other_opt)
    steps = [*_steps(other, other_opt, range(2, 4))]
    model.save(f"{folder}/refused", opt, background=True)
    model._finish_writing()
    Path(f"{folder}/refused/manifest.json").write_text("{}")
    with _no_room(1):
        model.save(f"{folder}/full", opt, background=True)
        said = _error(model._finish_writing)
    return [done, none, again, steps, said, os.listdir(f"{folder}/beside")]


@pytest.mark.slow
def test_a_checkpoint_written_beside_training_is_of_its_step(tmp_path: Path) -> None:
    for done, none, again, steps, said, left in run_ranks(2, "test_checkpoints:beside",
                                                          str(tmp_path)):
        assert (done, none) == (3, None)
        assert again == pytest.approx(steps[1:], rel=1e-6)
        assert "File too large" in said or "has not written" in said
        assert sorted(left) == ["step-2", "step-3"]
    found = {p.suffix for p in (tmp_path / "beside" / "step-3").iterdir()}
    assert found == {".safetensors", ".json"}
    assert len(list((tmp_path / "beside" / "step-3").glob("*.json"))) == 1  # no note is left

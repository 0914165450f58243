"""The scripts under examples/: the same numbers as in one process without the library."""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar_torch as ap
import claims
import nets
from autopar_torch.run.model import ParallelModel

FOLDER = Path(__file__).resolve().parent.parent / "examples"
PLANS = {"dp2": nets.DP2, "tp2": nets.TP2, "pp2": nets.PP2, "zero3": nets.ZERO3}


def numbers(name: str, *flags: str, plan: dict[str, int] | None = None,
            plain: bool = False) -> list[float]:
    """What the `main` of an example returns, under a plan."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        if plan is not None:
            file = Path(folder, "plan.json")
            ap.Plan.uniform(**plan).save(file)
            patch.setenv("AUTOPAR_PLAN", str(file))
        main = importlib.import_module(name).main
        return [float(x) for x in main([*flags, *["--plain"] * plain])]


def same(name: str, *flags: str, plans: tuple[str, ...] = ("dp2", "tp2", "pp2"),
         saves: bool = False) -> None:
    """Numbers as in one process without the library; `saves`: into a folder that all ranks know."""
    with alone(), tempfile.TemporaryDirectory() as own:
        want = numbers(name, *flags, *["--folder", own] * saves, plain=True)
    for plan in plans:
        folders: list[str | None] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        got = numbers(name, *flags, *["--folder", str(folders[0])] * saves, plan=PLANS[plan])
        worst = max(abs(a - b) / max(1, abs(b)) for a, b in zip(got, want, strict=True))
        assert worst <= 1e-6, f"{name} under {plan}: {worst:.1e}"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """As without torchrun: trainers look at what that has set."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(variable)
        patch.setattr(dist, "is_initialized", lambda: False)
        yield


def claim_mnist() -> None:
    same("mnist", "--dropout", "0", "--rows", "130", "--epochs", "1")


def claim_nanogpt() -> None:
    same("nanogpt", "--steps", "6", plans=("pp2",))


def slow_claim_trainer() -> None:
    same("hf_trainer", plans=("zero3", "dp2", "tp2", "pp2"), saves=True)


def slow_claim_nanogpt() -> None:
    same("nanogpt")


def slow_claim_accelerate() -> None:
    same("run_clm", plans=("dp2", "tp2", "pp2"), saves=True)


def slow_claim_plans_that_are_found() -> None:
    for name, *flags in (["mnist", "--dropout", "0", "--rows", "130"], ["nanogpt"]):
        want, got = numbers(name, *flags, plain=True), numbers(name, *flags)
        assert all(abs(a - b) <= 1e-6 * max(1, abs(b)) for a, b in zip(got, want, strict=True))


def slow_claim_moe() -> None:
    same("moe", plans=("dp2", "tp2"))


@pytest.mark.slow
def test_a_plan_for_1024_devices_comes_with_a_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert numbers("plan_1024", "--out", str(out))[0] > 0
    assert "1,024 device(s)" in out.read_text()


@pytest.mark.slow
def test_no_wish_makes_a_plan_faster() -> None:
    free, *others = numbers("constraints")
    assert all(step_s >= free for step_s in others) and max(others) > free


@pytest.mark.slow
def test_more_machines_that_differ_make_no_step_longer() -> None:
    *apart, together = numbers("mixed_cluster")
    assert together <= min(apart)


def test_no_policy_does_better_than_one_who_knows_the_future() -> None:
    *others, oracle = numbers("changing_network")
    assert all(share <= oracle for share in others) and others[0] < oracle


@pytest.mark.slow
def test_the_same_tokens_in_longer_sequences_take_longer() -> None:
    steps = numbers("long_sequences")
    assert len(steps) == 4 and steps == sorted(steps)


def test_what_was_measured_once_is_planned_for_anywhere(tmp_path: Path) -> None:
    known = str(tmp_path / "known.json")
    assert numbers("measure_cluster", "--out", known, "--seconds", "0.1")[0] > 0
    assert numbers("measure_cluster", "--known", known)[0] > 0


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_begins_with_the_command_that_runs_it(path: Path) -> None:
    head = path.read_text().split('"""')[1]
    assert re.search(rf"^    (python|torchrun|autopar) .*examples/{path.name}", head, re.M)


def test_a_model_of_peft_is_one_for_a_trainer() -> None:
    """Which shifts labels, and saves, by what it is."""
    peft = pytest.importorskip("peft")
    from autopar_torch.integrations.alone import taken_up

    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = taken_up(peft.get_peft_model(net, peft.LoraConfig(target_modules=["0"])))
    assert isinstance(model, peft.PeftModel) and isinstance(model, ParallelModel)


@pytest.mark.parametrize("name", claims.names(__name__))
def test_on_2_ranks(name: str) -> None:
    claims.hold(__name__, name)

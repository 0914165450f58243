"""env, doctor, measure: the machine that this runs on."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from tempfile import TemporaryFile

from ..errors import PlanError
from .options import asked, lines, model_of, save, show

PACKAGES = ("autopar_torch", "torch", "numpy", "msgspec", "safetensors", "transformers",
            "accelerate", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
SETTINGS = ("AUTOPAR", "NCCL", "CUDA", "GLOO", "TORCH", "OMP", "MASTER", "RANK", "WORLD_SIZE",
            "LOCAL_RANK", "XDG_CACHE_HOME")
PROBE = """
import sys, torch, torch.distributed as dist
from autopar_torch.run import world
(rank, size), values = world.start(), torch.ones(2**20, device=world.device())
size > 1 and dist.all_reduce(values)
sys.exit(0 if float(values.sum()) == 2**20 * size else "the sum is wrong")
"""


def env(options: argparse.Namespace) -> int:
    """A block to copy into an issue."""
    found = dict(_environment())
    return show(found) if options.json else lines([f"{k:20} {v}" for k, v in found.items()])


def _environment() -> list[tuple[str, str]]:
    import torch

    from ..measure import nvml

    rows = [("python", platform.python_version()), ("system", platform.platform())]
    there = {package.name: package.version for package in metadata.distributions()}
    rows += [(name, there[name]) for name in PACKAGES if name in there]
    rows += [("cuda of torch", str(torch.version.cuda)), ("CPU cores", str(os.cpu_count()))]
    rows += [("GPU", line) for line in nvml.lines()]
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True,
                              timeout=60, check=False)
        rows.append(("links", "\n" + done.stdout))
    return rows + sorted((n, v) for n, v in os.environ.items() if n.startswith(SETTINGS))


def doctor(options: argparse.Namespace) -> int:
    """Whether ranks can be started here, reach each other, and keep what was measured."""
    checks = (("files can be kept", _cache, "set AUTOPAR_CACHE to a folder that you can write to"),
              (f"{options.ranks} ranks sum right", lambda: _ranks(options.ranks, options.timeout),
               "read what they said above; is GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME right?"))
    bad = 0
    for name, run, fix in checks:
        said = run()
        more = [f"        {said}", f"        fix: {fix}"] if said else []
        lines([f"{'FAILED' if said else 'ok':>6}  {name}", *more])
        bad += bool(said)
    lines(["not ready" if bad else "You are ready."])
    return 6 if bad else 0


def _cache() -> str:
    """Whether the folder of profiles can be written."""
    from ..find.choose import cache_path

    folder = cache_path("").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error)


def _ranks(count: int, timeout_s: float) -> str:
    """Ranks that sum; what went wrong, if anything did."""
    code = (f"import sys; from autopar_torch.run.launcher import launch; launch(['--standalone', "
            f"'--nproc-per-node', '{count}', '--no-python', sys.executable, '-c', {PROBE!r}])")
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=where, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks with it
            return f"no answer within {timeout_s:.0f} s"
    return said.strip()[-1000:] if process.returncode else ""


def measure(options: argparse.Namespace) -> int:
    from .. import api

    if options.global_batch_size:
        raise PlanError("what is measured are steps of the inputs", where="--global-batch-size",
                        fix="make inputs of so many rows")
    known = api.measure(*model_of(options), constraints=asked(options)["constraints"],
                        precision=options.precision, seconds=options.seconds)
    if os.environ.get("RANK", "0") == "0":
        save(known, options)
        lines([f"{len(known.profile.cells)} programs, {len(known.profile.curves)} groups: "
               f"{options.out}"])
    return 0

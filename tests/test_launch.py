"""What starts ranks elsewhere: the files hold together, and what they start runs here."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ranks import ROOT

yaml = pytest.importorskip("yaml")
LAUNCH = ROOT / "launch"


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def sky() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    return found


def test_pods_meet_at_the_first_one_and_are_as_many_as_the_ranks_wait_for() -> None:
    service, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    own, count = pod["containers"][0], job["spec"]["completions"]
    port = service["spec"]["ports"][0]["port"]
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-0.{domain}:{port}" in own["args"]
    assert pod["subdomain"] == domain and job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    told = {entry["name"]: entry["value"] for entry in own["env"]}
    assert told["NUM_NODES"] == str(count) == str(job["spec"]["parallelism"])
    assert {mount["name"] for mount in own["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_manifest_is_one_for_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in kubernetes():
        validate.validate(document, validate.latest_version(), strict=True)


def test_every_way_to_start_ranks_is_told_of() -> None:
    told = (LAUNCH / "README.md").read_text()
    assert all(path.name in told for path in LAUNCH.iterdir() if path.name != "README.md")


# --- with real ranks ------------------------------------------------------------------------------


def free_port() -> str:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return str(own.getsockname()[1])


def trained(command: list[str], folder: Path, **told: str) -> None:
    """Two ranks make all steps of examples/elastic.py."""
    given = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "AUTOPAR_CACHE": str(folder / "cache"),
             "PYTHONPATH": str(ROOT), **told}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2 loss" in done.stdout and "ranks 2" in done.stdout


def script(folder: Path) -> list[str]:
    return ["examples/elastic.py", "--folder", str(folder / "out"), "--steps", "3"]


@pytest.mark.slow
def test_what_a_pod_starts_trains(tmp_path: Path) -> None:
    own = kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry["value"] for entry in own["env"]} | {"NUM_NODES": "1"}
    args = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], arg) for arg in own["args"][:-1]]
    here = {"autopar-0.autopar:29400": f"127.0.0.1:{free_port()}", "node=auto": "node=2"}
    for there, mine in here.items():
        args = [arg.replace(there, mine) for arg in args]
    given["AUTOPAR_CACHE"] = str(tmp_path / "cache")
    trained([*own["command"], *args, *script(tmp_path)], tmp_path, **given)


@pytest.mark.slow
def test_what_skypilot_starts_trains(tmp_path: Path) -> None:
    run = sky()["run"].replace(":29400", f":{free_port()}")
    trained(["bash", "-euc", run], tmp_path, SCRIPT=" ".join(script(tmp_path)),
            SKYPILOT_NUM_NODES="1", SKYPILOT_NUM_GPUS_PER_NODE="2", SKYPILOT_TASK_ID="task",
            SKYPILOT_NODE_IPS="127.0.0.1\n")


@pytest.mark.slow
def test_what_slurm_starts_trains(tmp_path: Path) -> None:
    for name, does in (("scontrol", "echo localhost"), ("srun", 'shift; exec "$@"')):
        tool = tmp_path / name
        tool.write_text(f"#!/usr/bin/env bash\n{does}\n")
        tool.chmod(0o755)
    trained(["bash", str(LAUNCH / "slurm.sbatch"), *script(tmp_path)], tmp_path,
            PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="node", SLURM_JOB_ID="7",
            SLURM_JOB_NUM_NODES="1", SLURM_SUBMIT_DIR=str(ROOT), RANKS_PER_NODE="2")

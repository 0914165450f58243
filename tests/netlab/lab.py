"""The lab: builds nodes and network, runs commands in them, changes them, takes all away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from netlab.groups import groups
from netlab.layout import Layout, Link, Node, check_rate, check_share, usable_cores
from netlab.namespaces import Box, held
from netlab.network import Network, address, hosts
from netlab.processes import JOIN, WAIT, Ended, Running, signal_group, watch
from netlab.refusal import check_machine

PORT = 29500
JOIN_POLL_S = 0.001


class Lab:
    """Nodes, and links between them, for the time of a `with`.

    `weight` (1 to 100) is how much the lab counts against the machine's other work.
    """

    def __init__(self, nodes: Sequence[Node], links: Sequence[Link] = (), weight: int = 1) -> None:
        self.layout = Layout(tuple(nodes), tuple(links))
        self.weight = weight
        self._nodes = {node.name: node for node in nodes}
        self._boxes: dict[str, Box] = {}
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        check_machine()
        with contextlib.ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _build(self, stack: contextlib.ExitStack) -> None:
        names = self.layout.names
        self._groups = stack.enter_context(groups(names))
        self._groups.set_weight(self.weight)
        stack.callback(self._end_all)
        known = hosts(names)
        fabric = stack.enter_context(held("fabric", known))
        self._boxes = {name: stack.enter_context(held(name, known)) for name in names}
        self._network = Network(self.layout, self._boxes, fabric)
        for node in self.layout.nodes:
            self.set_cpu_share(node.name, node.cpu_share)

    def _end_all(self) -> None:
        for _, process in self._started:
            signal_group(process, signal.SIGKILL)
            process.wait()

    # ---- changes, also while something runs

    def set_rate(self, *ends: str, rate_mbps: float | None) -> None:
        """Of a node's card ("a"), a trunk ("s0", "s1") or a pair ("a", "b") that has a limit."""
        check_rate(rate_mbps)
        self._network.set_rate(ends, rate_mbps)

    def set_link(self, name: str, *, up: bool) -> None:
        """Cut a node off from the others, or join it to them again."""
        self._network.set_up(name, up)

    def set_cpu_share(self, name: str, share: float) -> None:
        check_share(share)
        self._groups.set_share(name, share, len(usable_cores(self._nodes[name])))

    def kill(self, name: str) -> None:
        """The node fails: all that runs in it is gone at once. It can be used again."""
        self._signal(name, signal.SIGKILL)

    def pause(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        """To all in the node, and to what waits outside for it or is on its way in."""
        for node, process in self._started:
            if node == name:
                signal_group(process, number)
        self._boxes[name].signal(number)

    # ---- running

    def node_of(self, rank: int, num_ranks: int) -> str:
        """Ranks fill the nodes in order, each with the same number."""
        per_node, rest = divmod(num_ranks, len(self._nodes))
        if rest or not per_node:
            raise ValueError(f"{num_ranks} ranks cannot fill {len(self._nodes)} nodes evenly")
        return self.layout.names[rank // per_node]

    def environment(self, rank: int, num_ranks: int) -> dict[str, str]:
        """What torchrun would tell this rank, and how to use the lab's network."""
        per_node = num_ranks // len(self._nodes)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "GROUP_RANK": str(rank // per_node),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_WORLD_SIZE": str(len(self._nodes)),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """`subprocess.Popen` in a node. It ends with the lab at the latest."""
        node = self._nodes[name]
        limit = "unlimited" if node.memory_bytes is None else str(node.memory_bytes // 1024)
        cores = ",".join(map(str, usable_cores(node)))
        limits = [str(self._groups.procs(name)), limit, cores]
        wait = ["--no-fork", "sh", "-c", WAIT, "sh", os.getcwd(), *command]
        join = ["sh", "-c", JOIN, "sh", *limits, *self._boxes[name].enter(wait)]
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        process = subprocess.Popen(join, **options)
        self._started.append((name, process))
        while process.poll() is None and process.pid not in self._groups.members(name):
            time.sleep(JOIN_POLL_S)  # from now on it is removed with the group
        return process

    def run(
        self, command: Sequence[str], *, timeout_s: float, ranks_per_node: int = 1,
        grace_s: float = 20, env: Mapping[str, str] | None = None, echo: bool = False,
    ) -> list[Ended]:
        """Run a command once per rank and wait for all; TimeoutError at the time limit.

        When a rank fails, the others have `grace_s` seconds. Then, as at the limit, everything that
        runs in the nodes is killed.
        """
        num_ranks = ranks_per_node * len(self._nodes)
        running = []
        try:
            for rank in range(num_ranks):
                name = self.node_of(rank, num_ranks)
                environment = {**os.environ, **self.environment(rank, num_ranks), **(env or {})}
                process = self.popen(
                    name, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                running.append(Running(process, f"{rank} {name}" if echo else ""))
            watch(running, timeout_s, grace_s)
        finally:
            if any(each.process.poll() != 0 for each in running):
                for name in self._nodes:
                    self.kill(name)
        return [each.ended() for each in running]

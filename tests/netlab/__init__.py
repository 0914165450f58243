"""A small cluster on one Linux machine: nodes with cores, a CPU share and limited links.

    nodes = [Node("a", cores=(0,), rate_mbps=1000), Node("b", cores=(1,), cpu_share=0.5)]
    with Lab(nodes, [Link("a", "b", 200)]) as lab:
        ended = lab.run(["python", "train.py"], ranks_per_node=1, timeout_s=60)
        lab.set_rate("a", rate_mbps=100)
    results = run_ranks(2, "module:function", lab=lab)         # tests/ranks.py, inside the `with`

Every node has namespaces of its own (network, processes, mounts, names), and no route leads out of
the lab. However the program ends, even by kill -9, nothing stays. Needs root, iproute2 and
util-linux; where a lab cannot be built `NotPermitted` says why, and pytest skips the test.

    python -m netlab check                                     # in tests/: can a lab be built here?
    python -m netlab run lab.json --ranks-per-node 2 -- python train.py
"""

from netlab.lab import Lab
from netlab.layout import Layout, Link, Node
from netlab.processes import Ended
from netlab.refusal import NotPermitted

__all__ = ["Ended", "Lab", "Layout", "Link", "Node", "NotPermitted"]

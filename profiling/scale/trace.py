"""How long does tracing a Llama of 70B take, and how much memory?

    python profiling trace [--layers 80] [--seq 4096] [--json FILE]

80 layers, hidden 8192, on meta tensors. Ends with one line of figures; exits 0 only under 15 s,
under 1 GiB of memory (peak of the process), with 3 or 4 kinds, and with every parameter of the
model in the chain.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    import torch
    import transformers

    from autopar_torch.trace import trace
    from autopar_torch.trace.call import take_apart

    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=options.layers,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=32000,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(1, options.seq, dtype=torch.long)
    call, _ = take_apart((), {"input_ids": ids, "labels": ids})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    graph = trace(model, call).graph
    seconds = time.perf_counter() - start
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    used = {name for block in graph.blocks for name in block.params.values()}
    elements = sum(graph.params[name].num_elements for name in used)
    whole = used >= {name for name, _ in model.named_parameters()}
    figures = {
        "seconds": seconds, "peak_mib": mib, "added_mib": mib - before / 1024,
        "blocks": len(graph.blocks), "kinds": len(graph.kinds), "params": elements,
        "ops": sum(graph.kind_of(i).num_ops for i in range(len(graph.blocks))),
    }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                   for k, v in figures.items()))
    return 0 if seconds < 15 and mib < 1024 and len(graph.kinds) in (3, 4) and whole else 1

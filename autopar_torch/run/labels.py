"""Which labels a loss of an untraced model takes, and which it leaves out."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..trace.effects import refuse_messages


class Labels(TorchDispatchMode):
    """Sees the labels of cross-entropies, and what is looked up in tables."""

    def __init__(self) -> None:
        super().__init__()
        self.targets, self.indices, self.ignored = list[Tensor](), list[Tensor](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_messages(func)
        name = func.overloadpacket.__name__
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            self.targets.append(args[1].detach().clone())
            self.ignored.add(int(args[4]))
        elif name == "embedding":
            self.indices.append(args[1].detach().clone())
        return func(*args, **(kwargs or {}))

"""autopar_torch: one line, and the model trains on whatever machines it was started on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import AutoparError
from .plan import Plan, load_plan

if TYPE_CHECKING:
    from .api import parallelize

__all__ = ["AutoparError", "Plan", "load_plan", "parallelize"]


def __getattr__(name: str) -> Any:
    """`parallelize` needs torch; the nouns do not, so torch is imported when it is asked for."""
    if name == "parallelize":
        from .api import parallelize

        return parallelize
    raise AttributeError(f"module 'autopar_torch' has no attribute {name!r}")

"""autopar_torch: one line, and the model trains on whatever machines it was started on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cluster import Cluster
from .errors import AutoparError
from .guards import Guards
from .plan import Plan, load_plan

VERBS = ("TrainingLog", "measure", "parallelize", "plan", "report", "simulate")
for room in ("measure", "plan", "report", "simulate"):  # now, so that they never hide a verb later
    import_module(f"{__name__}.{room}")
    del globals()[room]

if TYPE_CHECKING:
    from .api import TrainingLog, measure, parallelize, plan, report, simulate

__all__ = ["AutoparError", "Cluster", "Guards", "Plan", "TrainingLog", "load_plan", "measure",
           "parallelize", "plan", "report", "simulate"]


def __getattr__(name: str) -> Any:
    """The verbs need torch, the nouns do not, so torch is imported when a verb is asked for."""
    if name in VERBS:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module 'autopar_torch' has no attribute {name!r}")

"""The one tree of errors: every message says what, where, and what to do about it."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of everything this package raises on purpose."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        parts = [what]
        if where:
            parts.append(f"  where: {where}")
        if fix:
            parts.append(f"  fix:   {fix}")
        super().__init__("\n".join(parts))


class TraceError(AutoparError, RuntimeError):
    """The model could not be turned into a chain of blocks; torch raises RuntimeError then."""

    decided: tuple[bool, ...] = ()  # the ways that it went where values of the batch decide


class PlanError(AutoparError):
    """A plan does not fit the model, the machines, or itself."""


class NounError(PlanError, ValueError):
    """What a noun was made of contradicts itself."""


class ShardingError(AutoparError):
    """A sharding cannot be applied to a block."""


class ScheduleError(AutoparError):
    """An action list is incomplete, out of order, or deadlocks."""


class ProfileError(AutoparError):
    """Something was not measured, or too noisily to be used."""


class SearchError(AutoparError):
    """No plan fits."""


class FileError(AutoparError):
    """A file is missing, malformed, too large, or of another version."""


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint does not hold what the model needs; torch raises RuntimeError then."""


class RunError(AutoparError, RuntimeError):
    """Something went wrong while training; torch raises RuntimeError then."""

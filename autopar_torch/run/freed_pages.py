"""The C library's memory: what was freed stays mapped, for the next step."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
_NEVER, _NONE = -1, 0


def keep_freed_pages() -> None:
    """A page that is mapped anew costs microseconds, and the buckets of a step are thousands."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, others need not
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_MAX, _NONE)

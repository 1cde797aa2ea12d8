"""Keeping freed memory: a step allocates the same buffers again and again, and fresh pages cost more than the work."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory(limit: int = 1 << 30) -> bool:
    """Ask glibc to keep up to ``limit`` freed bytes for this process. False where the C library has no such setting.

    Nothing is mapped apart, as glibc does with every tensor of 32 MiB or more: its pages would be new at each step, and
    steps of wide models would spend more time on pages than on products. All threads share one heap, since those of
    other threads than the main one hold 64 MiB at most. Call it before threads are started.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, limit), (_M_TOP_PAD, 1 << 24))
    return all(mallopt(name, value) == 1 for name, value in settings)

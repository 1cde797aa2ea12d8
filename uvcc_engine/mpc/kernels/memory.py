"""Keeping freed memory: a step allocates the same buffers again and again, and fresh pages cost more than the work."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory(limit: int = 1 << 30) -> bool:
    """Ask glibc to keep up to ``limit`` freed bytes for this process. False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 25), (_M_TRIM_THRESHOLD, limit), (_M_TOP_PAD, 1 << 24))
    return all(mallopt(name, value) == 1 for name, value in settings)

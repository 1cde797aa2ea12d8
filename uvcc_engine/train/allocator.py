"""glibc's memory allocator gives freed memory back to the kernel, and a training step asks for it again at once.

The page faults of that cost a small model on a CPU some 4 to 8 % of its time. Here the heap only grows.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_MAX: Final = -4


def keep_memory(top_pad: int = 64 << 20) -> bool:
    """Tell the allocator of this process to keep what is freed; False where it is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return False
    wanted = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, top_pad))
    return all(libc.mallopt(name, value) == 1 for name, value in wanted)

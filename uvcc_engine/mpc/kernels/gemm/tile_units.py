"""Whether this process may use tile registers for 8-bit integers (AMX), and the loops compiled for them.

The processor must have them, the compiler must know that it has, and Linux must have been asked: their state is large,
and a process that never asked for them is ended where it uses them. What is asked for is inherited by forks.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import Final

from uvcc_engine.contract.machine.compiler_units import compiler_knows

log = logging.getLogger(__name__)
_ARCH_PRCTL: Final = 158  # the system call's number on x86-64
_ASK_PERMISSION: Final = 0x1023  # ARCH_REQ_XCOMP_PERM
_TILE_DATA: Final = 18  # the feature's number
_FEATURES: Final = ("+amx-int8", "+amx-tile", "+avx512bw")


def loops() -> ModuleType | None:
    """The loops of ``gemm.tile_loops``, or None where they cannot run."""
    return of_process(os.getpid())


@lru_cache(maxsize=1)
def of_process(_process: int) -> ModuleType | None:
    """What ``loops`` finds in this process; a fork asks the system again."""
    if sys.platform != "linux" or not (compiler_knows(_FEATURES) and _are_permitted()):
        return None
    return importlib.import_module("uvcc_engine.mpc.kernels.gemm.tile_loops")


def _are_permitted() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA) == 0:
        return True
    log.info("the system does not let this process use tile registers: %s", os.strerror(ctypes.get_errno()))
    return False

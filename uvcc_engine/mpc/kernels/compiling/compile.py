"""``python -m uvcc_engine.mpc.kernels.compiling.compile``: all loops into numba's cache; measure; leave the mark."""

from __future__ import annotations

import fcntl
import os
import sys

from uvcc_engine.mpc.kernels.compiling.loops import mark, take_over


def main() -> int:
    """0 when the loops are compiled, by this process or another one that it waited for. OSError if they cannot be kept.

    ImportError without numba.
    """
    path = mark()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return 0
        take_over()
        os.nice(5)  # the work that waits for these loops goes on meanwhile
        # only now: whoever merely waits must not fill the memory with what this needs
        from uvcc_engine.mpc.kernels import jit as jit
        from uvcc_engine.mpc.kernels.compiling.warm import warm
        from uvcc_engine.mpc.kernels.cpu import CpuKernels
        from uvcc_engine.mpc.kernels.gemm import gemm_rates

        warm(CpuKernels())
        gemm_rates.known(loops=True)
        path.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())

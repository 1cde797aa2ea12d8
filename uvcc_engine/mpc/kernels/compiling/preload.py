"""The compiled loops, loaded once by a process that is about to fork workers: each of them would take long for it."""

from __future__ import annotations

import torch

from uvcc_engine.mpc.kernels.compiling.loops import LOOPS, mark
from uvcc_engine.mpc.kernels.gemm import gemm_paths, ifma_units, tile_units


def load_for_children() -> bool:
    """Load what is compiled; returns whether nothing is left to load (False while nothing is compiled yet)."""
    if LOOPS.found is None and not mark().exists():
        return False
    if LOOPS.get() is not None:
        matrix = torch.zeros((32, 32), dtype=torch.int64)
        units = [name for name, of in (("tiles", tile_units), ("ifma", ifma_units)) if of.loops() is not None]
        for path in ("wide", *units):
            gemm_paths.prepared(path, [matrix, matrix])([matrix, matrix])  # numba builds its tables at the first call
    return True

"""Matrix products modulo 2^64 on CPUs: several ways to the same bits, and which of them this machine is fastest with.

The ways are those of ``gemm.gemm_paths``.

``tiles``: tile registers for 8-bit integers (``gemm.tile_loops``); ``bytes``: torch's 8-bit products
(``gemm.limbs``); ``ifma``: units that multiply 52 bits and add (``gemm.ifma_loops``); ``wide`` and ``halves``: compiled
loops (``gemm.gemm_loops``); ``floats``: double precision (``gemm.floats``); ``torch``: torch's own integer product.
UVCC_GEMM names one to be taken wherever it can be; otherwise what was measured on this machine decides
(``gemm.gemm_rates``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.gemm import gemm_rates, ifma_units, limbs, tile_units
from uvcc_engine.mpc.kernels.gemm.gemm_paths import LOOP_KINDS, PATHS, prepared
from uvcc_engine.mpc.kernels.layout import broadcast_shape
from uvcc_engine.mpc.kernels.plain import PlainKernels

VARIABLE: Final = "UVCC_GEMM"
SMALL: Final = 1 << 14  # multiplications below which torch has the least to prepare
LOAD_FROM: Final = 1 << 18  # multiplications that repay loading the compiled code
FLOATS_FROM: Final = 1 << 16
BYTES_FROM: Final = (64, 128, 64)  # rows, inner size, columns from which torch's 8-bit products repay their digits
TILES_FROM: Final = (16, 64, 16)  # and those from which tiles are full enough
IFMA_FROM: Final = (4, 16, 9)  # fewer columns leave most of a tile of 16 empty
_PLAIN: Final = PlainKernels()


def right_factor(ys: Sequence[Tensor], rows: int, forced: str | None = None) -> RightFactor:
    """See ``Kernels.right_factor``. ``forced``: one of ``PATHS``, else what UVCC_GEMM says, else the fastest.

    ``ys``: [k, n] each.
    """
    forced = forced or from_environment()
    shape = ys[0].shape
    if len(shape) == 2 and rows > 0:
        inner = shape[0] if len(ys) == 1 else shape[0] + ys[1].shape[0]
        if forced is None and rows * inner * shape[1] < SMALL:
            return _PLAIN.right_factor(ys, rows)
        return prepared(choose(rows, inner, shape[1], 1, forced), ys)

    def apply(xs: Sequence[Tensor]) -> Tensor:
        x, y = xs[0], ys[0]
        if x.dim() < 2 or y.dim() < 2:
            return prepared("torch", ys)(xs)
        batch = math.prod(broadcast_shape(x.shape[:-2], y.shape[:-2]))
        inner = sum(one.shape[-2] for one in ys)
        return prepared(choose(x.shape[-2], inner, y.shape[-1], batch, forced), ys)(xs)

    return apply


def from_environment() -> str | None:
    """What UVCC_GEMM says. ConfigError if that is no path."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in PATHS:
        raise ConfigError(f"{VARIABLE}={name}", f"one of {', '.join(PATHS)}, or nothing for the fastest")
    return name


def choose(rows: int, inner: int, n: int, batch: int = 1, forced: str | None = None) -> str:
    """The path for products of that shape. Raises ConfigError if UVCC_GEMM forces one that is not installed."""
    work = batch * rows * inner * n
    if work == 0 or (work < SMALL and forced is None):
        return "torch"
    if forced is not None:
        if forced in LOOP_KINDS and LOOPS.get() is None:
            raise ConfigError(f"{VARIABLE}={forced} needs numba", "install the extra kernels, or choose another path")
        return forced if _is_able(forced, rows, inner, n, batch) else "torch"
    there = (LOOPS.found if work < LOAD_FROM else LOOPS.get()) is not None
    by_tiles = there and _repaid(TILES_FROM, rows, inner, n) and tile_units.loops() is not None
    by_bytes = there and _repaid(BYTES_FROM, rows, inner, n) and _bytes_fit(rows, inner, n, batch)
    by_ifma = there and _repaid(IFMA_FROM, rows, inner, n) and ifma_units.loops() is not None
    return ranked(gemm_rates.size_class(work), there, by_tiles, by_bytes, by_ifma, work >= FLOATS_FROM)


def _is_able(path: str, rows: int, inner: int, n: int, batch: int) -> bool:
    """Whether this machine has what a path needs, for products of that shape."""
    if path == "tiles":
        return tile_units.loops() is not None
    if path == "ifma":
        return ifma_units.loops() is not None
    return path != "bytes" or _bytes_fit(rows, inner, n, batch)


def _repaid(least: tuple[int, int, int], rows: int, inner: int, n: int) -> bool:
    return rows >= least[0] and inner >= least[1] and n >= least[2]


def _bytes_fit(rows: int, inner: int, n: int, batch: int) -> bool:
    """Whether 8-bit units can be used: one product, and within what is exact."""
    fits = batch == 1 and min(rows, inner, n) > 0 and inner <= limbs.MAX_INNER
    return fits and limbs.has_fast_bytes(torch.device("cpu")) and LOOPS.get() is not None


@lru_cache(maxsize=128)
def ranked(at: int, loops: bool, by_tiles: bool, by_bytes: bool, by_ifma: bool, by_floats: bool) -> str:
    """The fastest of what can be had: as measured at the size ``at``, or as the processor's kind suggests while nothing
    is."""
    rates = gemm_rates.known(loops)
    able = {
        "tiles": by_tiles, "bytes": by_bytes, "ifma": by_ifma, "wide": loops, "halves": loops, "floats": by_floats,
        "torch": True,
    }  # fmt: skip
    return max((name for name in PATHS if able[name] and name in rates), key=lambda name: rates[name][at])

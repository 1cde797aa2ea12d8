"""Whether this machine has units that multiply 52 bits and add (AVX-512 IFMA), and the loops compiled for them."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Final

from uvcc_engine.contract.machine.compiler_units import compiler_knows

_FEATURES: Final = ("+avx512f", "+avx512ifma", "+avx512vnni")


@lru_cache(maxsize=1)
def loops() -> ModuleType | None:
    """The loops of ``gemm.ifma_loops``, or None where they cannot run."""
    return importlib.import_module("uvcc_engine.mpc.kernels.gemm.ifma_loops") if compiler_knows(_FEATURES) else None

"""What the kernels on the CPU have in common: when a compiled loop is taken, and the arrays that it works on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.plain import PlainKernels

COMPILE_FROM = 1 << 14  # elements; below, loading the compiled code would cost more than it saves
_WORDS = COMPILE_FROM // 64
_BITS_FROM = 1  # words from which loops that are there already beat a dozen torch operations
_FIELD_FROM = 1 << 12  # elements of a binary field from which the compiled product is worth its loading
_SUMS_FROM = 1 << 11  # elements, for sums and shifts


class CompiledKernels(PlainKernels):
    """Kernels whose large tensors go through compiled loops."""

    @property
    def _jit(self) -> Any:
        """The compiled loops, or None while there are none."""
        return LOOPS.get()

    def _fast(self, size: int, enough: int, once_there: int, *tensors: Tensor) -> bool:
        """Whether to take a compiled loop: from ``enough`` on, and from ``once_there`` on if they are loaded."""
        if size < once_there or (size < enough and LOOPS.found is None):
            return False
        return all(t.is_contiguous() for t in tensors) and self._jit is not None

    def _sums(self, size: int, *tensors: Tensor) -> bool:
        return self._fast(size, COMPILE_FROM, _SUMS_FROM, *tensors)

    def _bits(self, words: int, *tensors: Tensor) -> bool:
        return self._fast(words, _WORDS, _BITS_FROM, *tensors)

    def _field(self, size: int, *tensors: Tensor) -> bool:
        return self._fast(size, _FIELD_FROM, _BITS_FROM, *tensors)


_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_flat(x: Tensor) -> Any:
    """The elements as a flat unsigned array on the same memory."""
    return x.numpy().reshape(-1).view(_UNSIGNED[x.element_size()])


def as_rows(x: Tensor) -> Any:
    """Rows ``[n, ..]`` as an unsigned array of two axes on the same memory."""
    return x.numpy().reshape(x.shape[0], -1).view(_UNSIGNED[x.element_size()])


def one_word(x: Any) -> Tensor:
    """An unsigned word as a tensor ``[1]``."""
    return torch.from_numpy(np.array([x], dtype=np.uint64).view(np.int64))


def as_elements(x: Tensor) -> Any:
    """``[n, d]`` unsigned words on the same memory."""
    return x.numpy().reshape(-1, x.shape[-1]).view(np.uint64)

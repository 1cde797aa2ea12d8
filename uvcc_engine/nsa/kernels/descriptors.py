"""What a GPU's own copying unit (TMA, from sm_90 on) is told of a tensor: descriptors, made on the host at a launch."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, Final

import triton
from torch import Tensor

ALIGNED: Final = 16  # bytes: what a tensor's beginning and all of its strides must be multiples of
SINCE: Final = 9  # the compute capability, its major number


@lru_cache(maxsize=1)
def _made() -> Any:
    """Triton's descriptor of a tensor; None before 3.4, which had none that a launch takes."""
    try:
        return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    except (ImportError, AttributeError):
        return None


def there_are() -> bool:
    """Whether this Triton has descriptors."""
    return _made() is not None


def fit(*tensors: Tensor) -> bool:
    """Whether the unit can copy tiles of these: [B, n, H, D] with elements of a head side by side."""
    return there_are() and all(
        x.data_ptr() % ALIGNED == 0
        and x.stride(-1) == 1
        and all(n > 0 and n * x.element_size() % ALIGNED == 0 for n in x.stride()[:-1])
        and all(x.shape)
        for x in tensors
    )


def rows_by(rows: int, *tensors: Tensor) -> list[Any]:
    """Descriptors of tensors [B, n, H, D] for tiles of ``rows`` rows of one head; D is padded to a power of two."""
    return [
        _made().from_tensor(x.transpose(1, 2), [1, 1, rows, max(16, triton.next_power_of_2(x.shape[-1]))])
        for x in tensors
    ]


def named(asked: bool, rows: int, *tensors: Tensor) -> tuple[list[Any], bool]:
    """What a kernel is given for these tensors, and whether that is descriptors: where they are asked for and fit."""
    if asked and fit(*tensors):
        return rows_by(rows, *tensors), True
    return list(tensors), False

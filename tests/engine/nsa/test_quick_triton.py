"""What tests hasten in Triton's interpreter gives what the interpreter gives."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import triton
import triton.language as tl
from quick_triton import Reduce, hastened
from triton.runtime import interpreter

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "numpys"), [(tl.int32, np.int32), (tl.int64, np.int64), (tl.int16, np.int16)])
def test_an_exclusive_or_over_an_axis(dtype: tl.dtype, numpys: type, axis: int, keep_dims: bool) -> None:
    edges = np.iinfo(numpys)
    data = RNG.integers(edges.min, edges.max, (4, 2, 8), dtype=numpys, endpoint=True)
    x = tl.core.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, [4, 2, 8]))
    scope = interpreter._patch_lang(tl.standard._xor_combine.fn)
    try:
        quick = Reduce(axis, tl.standard._xor_combine, keep_dims).apply(x)
        (slow,) = interpreter.ReduceOps(axis, tl.standard._xor_combine, keep_dims).generic_reduce((x,))
    finally:
        scope.restore()
    assert (quick.handle.data == slow.handle.data).all()
    assert quick.handle.data.dtype == slow.handle.data.dtype
    assert (quick.type, quick.shape) == (slow.type, slow.shape)


@triton.jit
def doubled(x):  # type: ignore[no-untyped-def]
    return x + tl.where(x > 0, x, x)


@triton.jit
def sorted_rows(x, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + row, doubled(tl.sort(tl.load(x + row))))


def replaced() -> dict[str, Any]:
    """All that stands in Triton's modules, by place and name."""
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    return {f"{place.__name__}.{name}": value for place in places for name, value in vars(place).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_kernel_that_sorts_and_calls_others(dtype: torch.dtype) -> None:
    x = torch.randint(-5, 6, (2, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    slow, quick, again = (torch.zeros_like(x) for _ in range(3))
    sorted_rows[(2,)](x, slow, 4)
    before = replaced()
    with hastened():
        sorted_rows[(2,)](x, quick, 4)
        between = replaced()
        sorted_rows[(2,)](x, again, 4)
    assert torch.equal(slow, x.sort(-1).values * 2)
    assert torch.equal(quick, slow)
    assert torch.equal(again, slow)
    builtins = {name for name, value in before.items() if tl.core.is_builtin(value)}
    assert builtins == {name for name, value in between.items() if tl.core.is_builtin(value)} != set()

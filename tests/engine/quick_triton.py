"""Triton's interpreter with less waste and the same results.

An exclusive or over an axis, which sorting is made of, is numpy's, as sums and maxima are in the interpreter itself;
there it calls the kernel's own function for every element. What the interpreter puts into Triton's modules for a
kernel is not looked for again in each function that the kernel calls, and types are told from a table made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

_plain_patch, _plain_dtype = interpreter._patch_builtin, interpreter._get_np_dtype
_patched: dict[Any, Any] = {}  # module or class -> by whom, as long as it has not been put back
_dtypes: dict[str, np.dtype] = {}


def _patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
    if pkg not in _patched:  # else all of it is replaced already
        _plain_patch(pkg, builder, scope)
        _patched[pkg] = scope


class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """What one kernel's call has replaced."""

    def restore(self) -> None:
        super().restore()
        for pkg in [pkg for pkg, scope in _patched.items() if scope is self]:
            del _patched[pkg]


def _get_np_dtype(dtype: Any) -> np.dtype:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if scalar.name not in _dtypes:
        _dtypes[scalar.name] = _plain_dtype(scalar)
    return _dtypes[scalar.name]


class Reduce(interpreter.ReduceOps):  # type: ignore[misc]
    """The interpreter's reductions."""

    def apply_impl(self, input: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return super().apply_impl(input)
        found = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, input[0].dtype)


@contextmanager
def hastened() -> Iterator[None]:
    """Within the block."""
    quick = {"_patch_builtin": _patch_builtin, "_LangPatchScope": Scope, "ReduceOps": Reduce}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**quick, "_get_np_dtype": _get_np_dtype}.items():
            patch.setattr(interpreter, name, value)
        yield

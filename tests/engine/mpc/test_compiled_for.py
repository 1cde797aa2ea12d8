"""Numba can be told to compile for another processor than this one: then no loop may use units that it would lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_engine.contract.machine.compiler_units import compiled_for, compiler_knows, is_x86
from uvcc_engine.mpc.kernels.gemm import gemm_rates

pytest.importorskip("numba", reason="numba is an extra: kernels")
NARROW = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
_CODE = """
import torch
from uvcc_engine.mpc.kernels.cpu import CpuKernels
kernels, at = CpuKernels(), torch.Generator().manual_seed(3)
def words(*shape): return torch.randint(-(2**63), 2**63 - 1, shape, generator=at)
x, y, places = words(4096), words(4096), words(64)
found = [kernels.binary_multiply(x, y), kernels.binary_inner(x, y).reshape(1), kernels.chosen_places(x, places, y),
         kernels.ternary_bits([x], [y], words(64)), kernels.turned_sums(x, words(64)),
         kernels.binary_columns(words(64, 64), places), kernels.weigh(words(64, 64), places, 52)]
print([int((one.double() / 2**40).sum()) for one in found])
"""


def _said(folder: Path, **changed: str) -> str:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder), **changed}
    done = subprocess.run([sys.executable, "-c", _CODE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci(__file__)
@pytest.mark.skipif(not is_x86(), reason="names an x86-64 processor")
def test_loops_for_a_plain_processor_give_the_same_numbers(tmp_path: Path) -> None:
    assert _said(tmp_path, **NARROW) == _said(tmp_path)


def test_what_numba_was_told_counts_and_not_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import registry

    generator = type(registry.cpu_target.target_context.codegen())
    monkeypatch.setattr(generator, "magic_tuple", lambda self: ("x86_64-unknown-linux-gnu", "some", "+sse2,-pclmul"))
    assert not compiler_knows(("+pclmul",))
    assert compiler_knows(("+sse2",)) == is_x86()


def test_rates_of_one_processor_are_not_taken_for_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    before = gemm_rates.path()
    assert compiled_for() == ""
    for name, value in NARROW.items():
        monkeypatch.setenv(name, value)
    assert compiled_for() == "NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES="
    assert gemm_rates.path() != before

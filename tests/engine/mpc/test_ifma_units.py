"""Units that multiply 52 bits and add are used where the compiler knows that the processor has them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from uvcc_engine.contract.machine import compiler_units
from uvcc_engine.mpc.kernels.gemm import gemm_paths, ifma_units

_KNOWN = "+sse2,+avx512f,+avx512ifma,+avx512vnni"
HAS_IFMA = ifma_units.loops() is not None


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    ifma_units.loops.cache_clear()
    yield
    ifma_units.loops.cache_clear()


@pytest.mark.parametrize("missing", _KNOWN.split(",")[1:])
def test_a_processor_without_one_of_them_goes_another_way(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    registry = pytest.importorskip("numba.core.registry", reason="numba is an extra: kernels")
    generator = type(registry.cpu_target.target_context.codegen())
    features = _KNOWN.replace(missing, missing.replace("+", "-"))
    monkeypatch.setattr(generator, "magic_tuple", lambda self: ("x86_64-unknown-linux-gnu", "some", features))
    assert ifma_units.loops() is None


def test_another_processor_s_compiler_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_units.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(compiler_units.importlib, "import_module", lambda name: pytest.fail("asked"))
    assert ifma_units.loops() is None


if HAS_IFMA:  # what follows needs the units themselves

    @pytest.mark.ci(__file__)
    def test_a_process_that_was_compiled_for_without_the_units_goes_another_way() -> None:
        """Numba's own variable, as an operator may have set it: the processor would end the process."""
        code = """
from uvcc_engine.mpc.kernels.gemm import gemm, ifma_units
print(ifma_units.loops(), gemm.choose(64, 64, 64, forced="ifma"))
"""
        changed = {**os.environ, "NUMBA_CPU_NAME": "generic"}
        said = subprocess.run([sys.executable, "-c", code], env=changed, capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["None", "torch"]

    @pytest.mark.parametrize("inner", [1, 4097, 33_000])
    def test_sums_that_wrap_lose_nothing(inner: int) -> None:
        """Each of the three sums goes beyond its register where all bits are set: 52 bits after 4,096 products, the
        pairs' 32 after some hundred."""
        x, y = torch.full((6, inner), -1), torch.full((inner, 17), -1)
        y[:, 3], y[:, 4], x[2] = 2**52 - 1, -(2**52), 2**52 + 1
        assert torch.equal(gemm_paths.prepared("ifma", [y])([x]), x @ y)

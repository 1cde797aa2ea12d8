"""Tile registers are used where processor, compiler and system all agree, and nowhere else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from uvcc_engine.contract.machine import compiler_units
from uvcc_engine.mpc.kernels.gemm import gemm_paths, tile_units

HAS_TILES = tile_units.loops() is not None
_AMX = "+sse2,+avx512bw,+amx-int8,+amx-tile"


@pytest.fixture(autouse=True)
def _forget() -> Any:
    tile_units.of_process.cache_clear()
    yield
    tile_units.of_process.cache_clear()


def with_features(monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    registry = pytest.importorskip("numba.core.registry", reason="numba is an extra: kernels")
    generator = type(registry.cpu_target.target_context.codegen())
    monkeypatch.setattr(generator, "magic_tuple", lambda self: ("x86_64-unknown-linux-gnu", "some", features))


class Library:
    """A C library whose kernel answers so."""

    def __init__(self, answer: int) -> None:
        self.answer, self.asked = answer, []  # type: int, list[tuple[int, ...]]

    def syscall(self, *given: int) -> int:
        self.asked.append(given)
        return self.answer


@pytest.mark.parametrize("missing", _AMX.split(",")[1:])
def test_a_compiler_that_does_not_know_the_units_is_not_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    with_features(monkeypatch, _AMX.replace(missing, missing.replace("+", "-")))
    library = Library(0)
    monkeypatch.setattr(tile_units.ctypes, "CDLL", lambda *a, **k: library)
    assert tile_units.loops() is None
    assert library.asked == []  # the state that the system would reserve is large


def test_a_system_that_refuses_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_features(monkeypatch, _AMX)
    library = Library(-1)
    monkeypatch.setattr(tile_units.ctypes, "CDLL", lambda *a, **k: library)
    monkeypatch.setattr(compiler_units.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tile_units.sys, "platform", "linux")
    with caplog.at_level(logging.INFO):
        assert tile_units.loops() is None
    assert "does not let this process use tile registers" in caplog.text
    assert library.asked == [(158, 0x1023, 18)]


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "aarch64")])
def test_other_systems_and_processors_are_not_asked(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    with_features(monkeypatch, _AMX)
    monkeypatch.setattr(tile_units.sys, "platform", system)
    monkeypatch.setattr(compiler_units.platform, "machine", lambda: machine)
    monkeypatch.setattr(tile_units.ctypes, "CDLL", lambda *a, **k: pytest.fail("asked"))
    assert tile_units.loops() is None


if HAS_TILES:  # what follows needs the units themselves

    @pytest.mark.ci(__file__)
    def test_a_process_that_was_compiled_for_without_the_units_goes_another_way() -> None:
        """Numba's own variable, as an operator may have set it: the compiler would end the process."""
        code = """
from uvcc_engine.mpc.kernels.gemm import gemm, tile_units
print(tile_units.loops(), gemm.choose(64, 64, 64, forced="tiles"))
"""
        changed = {**os.environ, "NUMBA_CPU_NAME": "generic"}
        said = subprocess.run([sys.executable, "-c", code], env=changed, capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["None", "torch"]

    def test_extremes_of_the_longest_blocks_are_exact() -> None:
        """Sums of 32 bits come nearest to their bounds where all digits are extreme."""
        tiles = tile_units.loops()
        assert tiles is not None
        assert 4 * tiles.BLOCK * 2**14 < 2**31
        worst, other = -0x7F7F7F7F7F7F7F80, 0x7F7F7F7F7F7F7F7F  # digits of -128 (the top one of -127), and of 127
        for u in (worst, other):
            for v in (worst, other):
                x, y = torch.full((33, 2 * tiles.BLOCK + 1), u), torch.full((2 * tiles.BLOCK + 1, 17), v)
                assert torch.equal(gemm_paths.prepared("tiles", [y])([x]), x @ y)

    @pytest.mark.ci(__file__)
    def test_forked_processes_use_them_too() -> None:
        """Workers are forked after the loops have been loaded."""
        code = """
import os, torch
from uvcc_engine.mpc.kernels.gemm import gemm_paths
x = torch.arange(64 * 64).view(64, 64) * 0x5851F42D4C957F2D
expected = gemm_paths.prepared("tiles", [x])([x])
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(gemm_paths.prepared("tiles", [x])([x]), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(expected, x @ x))
"""
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["0", "True"]

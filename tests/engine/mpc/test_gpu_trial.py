"""What a pod tries before a private run on its GPU: every kernel, against the processor's; in Triton's interpreter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports it
pytest.importorskip("triton")

from uvcc_engine.mpc.kernels import choose, gpu_trial, triton_ops
from uvcc_engine.mpc.kernels.cuda import CudaKernels

CPU = torch.device("cpu")
WHOLE = 32


@pytest.fixture(autouse=True)
def _kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(choose.KERNELS_ENV, "triton")
    choose.kernels_for.cache_clear()
    yield
    choose.kernels_for.cache_clear()


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.ci(__file__)
def test_every_kernel_that_a_step_launches_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On lengths of both kinds; and none of them is wrong."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: set[str] = set()
    honest = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: object, **more: object) -> object:
        launched.add(self.fn.__name__)
        return honest(self, *args, **more)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr("uvcc_engine.mpc.kernels.cuda.LIMBS_FROM", WHOLE**3)
    monkeypatch.setattr("uvcc_engine.mpc.kernels.gemm.limbs.has_fast_bytes", lambda device: True)
    assert gpu_trial.wrong(CPU, WHOLE) == []
    helpers = {"_quarter", "_rotate", "_word", "_digit"}
    kernels = {name for name, fn in vars(triton_ops).items() if isinstance(fn, InterpretedFunction)}
    assert launched == kernels - helpers


def test_a_kernel_with_wrong_bits_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def off(self: CudaKernels, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        out = z * factor + plus - minus
        out[-1] += 1
        return out

    monkeypatch.setattr(CudaKernels, "blind", off)
    monkeypatch.setattr(gpu_trial, "LENGTHS", (16, 21))
    monkeypatch.setattr(gpu_trial, "SHIFTS", (16,))
    monkeypatch.setattr(gpu_trial, "key_stream_holds", lambda device: False)
    assert gpu_trial.wrong(CPU, 16) == ["blind 16", "blind 21", "key stream"]
    monkeypatch.setattr(choose, "device_for", lambda wanted: CPU)
    monkeypatch.setattr(gpu_trial, "wrong", lambda device: ["blind 16"])
    assert gpu_trial.main() == 1
    assert said(capsys) == {"ok": False, "error": "wrong bits from blind 16"}


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_trial.main() == 1
    assert "reaches no GPU here" in str(said(capsys)["error"])
    monkeypatch.setattr(choose, "device_for", lambda wanted: CPU)

    def broken(device: torch.device) -> list[str]:
        raise RuntimeError("ptxas: no such architecture")

    monkeypatch.setattr(gpu_trial, "wrong", broken)
    assert gpu_trial.main() == 1
    assert said(capsys)["error"] == "RuntimeError: ptxas: no such architecture"
    monkeypatch.setattr(gpu_trial, "wrong", lambda device: [])
    assert gpu_trial.main() == 0
    assert said(capsys).keys() == {"ok", "kernels_s"}

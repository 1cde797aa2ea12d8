"""Matrix products of 8-bit floats in the blocks' linear layers (Micikevicius et al. 2022), with torch's own product.

Inputs and weights are rounded to e4m3, gradients to e5m2, each tensor scaled so that its largest value is the type's.
The weights themselves, what is accumulated and what comes out stay wider: bf16 out, fp32 inside. Embedding, norms,
gates, compression and attention are computed as with ``bf16``, and so is everything in evaluations.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa.model import LanguageModel

OLDEST_GPU: Final = (8, 9)
"""The compute capability from which NVIDIA's tensor cores multiply 8-bit floats: Ada and Hopper."""
LAYERS: Final = ("attention.project_in", "attention.q", "attention.kv", "attention.out", "up", "down")
_INPUT, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST: Final = 1e-12


def check_device(precision: str, device: torch.device) -> None:
    """Refuse a device that has no such products; torch emulates them on CPUs, which takes far longer than 16 bits.

    Raises ConfigError.
    """
    if precision != "fp8":
        return
    hint = "a GPU of compute capability 8.9 or newer (L4, L40S, H100, B200), or runtime.precision: bf16"
    if device.type != "cuda":
        raise ConfigError(f"runtime.precision is fp8, and a {device.type} device has no such products", hint)
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST_GPU:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"runtime.precision is fp8, and {name} has compute capability {found[0]}.{found[1]}", hint)


def use_in(model: LanguageModel) -> None:
    """Have the linear layers of every block multiply 8-bit floats in training; their parameters stay as they are."""
    for block in model.blocks:
        for name, module in block.named_modules():
            if name in LAYERS:
                assert isinstance(module, nn.Linear)
                module.forward = _Product(module)  # type: ignore[method-assign, assignment]


class _Product:
    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        if not self._layer.training:
            return F.linear(x, self._layer.weight)
        made: Tensor = _Linear.apply(x.flatten(0, -2), self._layer.weight)  # type: ignore[no-untyped-call]
        return made.view(*x.shape[:-1], made.shape[-1])


def _rounded(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in 8 bits, what each of them is to be multiplied by). What is no number stays none."""
    scale = x.abs().amax().float().clamp_min(_LEAST) / torch.finfo(kind).max
    return (x / scale).to(kind), scale


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a [m, k] times the transpose of b [n, k], in bf16; both are stored row by row."""
    made: Tensor = torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16)
    return made


def _turned(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x[0].t().contiguous(), x[1]


class _Linear(torch.autograd.Function):
    """x [m, k], weight [n, k] -> [m, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = _rounded(x, _INPUT), _rounded(weight, _INPUT)
        ctx.save_for_backward(*x8, *w8)
        ctx.kinds = x.dtype, weight.dtype
        return _product(x8, w8)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        saved = ctx.saved_tensors  # once: recomputed blocks unpack each only once
        x8, w8 = saved[:2], saved[2:]
        g8 = _rounded(grad, _GRADIENT)
        of_x, of_weight = _product(g8, _turned(w8)), _product(_turned(g8), _turned(x8))
        return of_x.to(ctx.kinds[0]), of_weight.to(ctx.kinds[1])

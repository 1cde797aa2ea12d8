"""A training in 16 bits as a GPU does it: its autocast computes some operations in 32 bits that a CPU's does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.nsa.rope import rope_tables, rotate

# torch's manual, "Automatic Mixed Precision package": what CUDA's autocast computes in float32 (of what is used here)
IN_32_BITS = ("sum", "softmax", "log_softmax", "cross_entropy", "layer_norm", "exp", "log", "pow", "prod", "rsqrt")
SHAPE = ModelConfig(
    vocab=32,
    dim=48,
    n_layers=2,
    n_heads=6,
    n_kv_groups=2,
    d_k=8,
    d_v=8,
    nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=12),
)


class CudaAutocast(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in IN_32_BITS and torch.is_autocast_enabled("cpu"):
            args = tuple(x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in args)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _routes_by_itself() -> Iterator[None]:
    yield
    dispatch.force(None)


@pytest.mark.parametrize("path", ["masked", "chunked"])
def test_queries_keys_and_values_have_one_type_and_the_model_learns(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seen = dispatch.attend, []

    def noted(layout: Any, q: Tensor, keys: Any, values: Any) -> Any:
        seen.append({x.dtype for x in (q, *keys, *values) if x is not None})
        return honest(layout, q, keys, values)

    monkeypatch.setattr(dispatch, "attend", noted)
    dispatch.force(path)
    torch.manual_seed(0)
    model = LanguageModel(SHAPE)
    tokens = torch.randint(0, SHAPE.vocab, (2, 61))
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(4):
        with CudaAutocast(), torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], None, labels=tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert seen == [{torch.bfloat16}] * len(seen)
    assert len(seen) == 4 * SHAPE.n_layers
    assert losses[-1] < losses[0]


def test_far_positions_are_turned_by_more_than_sixteen_bits() -> None:
    torch.manual_seed(0)
    place, x = torch.tensor([60_001]), torch.randn(1, 64).to(torch.bfloat16)
    exact = rotate(x.double(), rope_tables(place, 64, base=1e4, scale=1.0, dtype=torch.float64))
    ours = rotate(x, rope_tables(place, 64, base=1e4, scale=1.0, dtype=torch.bfloat16))
    assert ours.dtype == torch.bfloat16
    assert bool(((ours.double() - exact).abs() <= exact.abs() * 2.0**-8).all())  # one rounding, at the end

"""The step that a CUDA graph can hold: what caches that grow give, by the same operations on the same shapes always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nsa_kit import ODD, SMALL
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import decode
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.cache import LayerCache
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.fixed_decode import FixedDecoder
from uvcc_engine.nsa.model import LanguageModel

LENGTH = 50
WIDE = NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=200)

torch.set_num_threads(1)


def model_of(nsa: NSAConfig, **over: Any) -> LanguageModel:
    torch.manual_seed(3)
    shape = {"dim": 24, "n_heads": 6, "n_kv_groups": 2, "d_k": 8, "d_v": 4, **over}
    model = LanguageModel(ModelConfig(vocab=16, n_layers=1, nsa=nsa, **shape)).double().eval()
    for p in model.parameters():  # far from the start, where every gate is a half and every bias nothing
        torch.nn.init.normal_(p, std=0.3)
    return model


def fixed_from(model: LanguageModel, prompt: Tensor, most: int = LENGTH) -> tuple[FixedDecoder, decode.DecodeState]:
    _, state = decode.prefill(model, prompt)
    return FixedDecoder(model, state, most), state


@pytest.mark.parametrize(
    "nsa", [SMALL, ODD, NSAConfig(l=4, d=2, l_sel=4, n_sel=3, w=200)], ids=["small", "odd", "wide"]
)
@pytest.mark.parametrize("prompt", [1, pytest.param(7, marks=pytest.mark.ci(__file__)), 41])
def test_it_gives_what_growing_caches_give(nsa: NSAConfig, prompt: int) -> None:
    model = model_of(nsa)
    tokens = torch.randint(0, 16, (2, prompt + LENGTH))
    fixed, growing = fixed_from(model, tokens[:, :prompt])
    for t in range(prompt, prompt + LENGTH):
        wanted = decode.step(model, growing, tokens[:, t])
        torch.testing.assert_close(fixed.step(tokens[:, t]), wanted, rtol=1e-9, atol=1e-9)
    with pytest.raises(ConfigError, match=f"a token behind place {prompt + LENGTH}"):
        fixed.step(tokens[:, 0])


def test_one_layer_alone_attends_as_the_step_does_and_stays_where_it_is() -> None:
    model = model_of(SMALL)
    fixed, growing = fixed_from(model, torch.randint(0, 16, (1, 21)))
    layer, cache, x = model.blocks[0].attention, growing.layers[0], torch.randn(1, 1, 24, dtype=torch.float64)
    assert isinstance(layer, NSAttention)
    assert isinstance(cache, LayerCache)
    with torch.no_grad():
        wanted = decode.attend(layer, x, cache, growing)
    for _ in range(2):
        torch.testing.assert_close(fixed.attention(0, x), wanted, rtol=1e-9, atol=1e-9)


class Noted(TorchDispatchMode):
    """Every operation with the shapes, strides and memory of what it takes that stays from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        shapes = [(tuple(x.shape), x.stride()) for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        plain = [x for x in tree_leaves((args, kwargs)) if isinstance(x, bool | int | float)]
        kinds = [x.device.type for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        self.seen.append((str(func), shapes, plain, kinds))
        return made


def noted(step: Callable[[], object]) -> list[Any]:
    with torch.no_grad(), Noted() as notes:
        step()
    return notes.seen


def test_every_step_is_the_same_list_of_operations_on_the_same_shapes() -> None:
    model = model_of(SMALL)
    prompt = torch.randint(0, 16, (1, 5))
    fixed, growing = fixed_from(model, prompt)
    first, *others = [noted(fixed.compute) for _ in range(12)]
    assert all(found == first for found in others)
    reads = [name for name, *_ in first if "_local_scalar_dense" in name or "nonzero" in name or "lift" in name]
    assert not reads
    token = torch.tensor([1])
    one, *more = [noted(lambda: decode.step(model, growing, token)) for _ in range(8)]
    assert any(found != one for found in more)  # the notes see what a graph could not hold


def test_no_operation_of_a_step_meets_the_host() -> None:
    """On another device without data, as torch's tracer has it, which refuses an operation on tensors of two."""
    with FakeTensorMode():
        with torch.device("lazy"):
            model = LanguageModel(ModelConfig(vocab=16, dim=24, n_layers=1, n_heads=6, d_k=8, d_v=4, nsa=SMALL))
        fixed = FixedDecoder(model, decode.start(model, 1), LENGTH)
        assert {kind for *_, kinds in noted(fixed.compute) for kind in kinds} == {"lazy"}
        with pytest.raises(FakeTensorDeviceMismatchError, match="lazy"):
            noted(lambda: fixed.step(torch.ones(1, dtype=torch.int64)) + torch.ones(1))


@pytest.mark.parametrize(
    ("attention", "graph", "words"), [("dense", False, "attention 'dense'"), ("nsa", True, "CUDA")]
)
def test_what_it_cannot_do_is_refused(attention: str, graph: bool, words: str) -> None:
    model = model_of(SMALL, attention=attention)
    with pytest.raises(ConfigError, match=words):
        FixedDecoder(model, decode.start(model, 1), LENGTH, graph=graph)

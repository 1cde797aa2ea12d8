"""Models of which only the shapes are wanted have those of real ones, and nothing else changes."""

from __future__ import annotations

import torch

from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel, parameter_count
from uvcc_engine.nsa.outlines import shapes_alone

CFG = ModelConfig(vocab=16, dim=12, n_layers=2, n_heads=3, n_kv_groups=1, d_k=8, d_v=4, nsa=NSAConfig(w=8))


def shapes(model: LanguageModel) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}


def test_the_shapes_are_those_of_a_real_model_and_hold_nothing() -> None:
    with shapes_alone():
        outline = LanguageModel(CFG)
    real = LanguageModel(CFG)
    assert shapes(outline) == shapes(real)
    assert all(value.is_meta for value in outline.state_dict().values())
    assert parameter_count(CFG) == sum(p.numel() for p in real.parameters())


def test_models_made_afterwards_are_drawn_as_ever() -> None:
    torch.manual_seed(4)
    before = LanguageModel(CFG).state_dict()
    with shapes_alone():
        LanguageModel(CFG)
    torch.manual_seed(4)
    after = LanguageModel(CFG).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert float(before["embed.weight"].std()) > 0

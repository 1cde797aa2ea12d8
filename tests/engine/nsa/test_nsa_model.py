"""The model as a whole: decode equals prefill, sizes are the planned ones, it learns to retrieve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from uvcc_engine.nsa import decode, selftest
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel, gate_metrics, parameter_count

TINY = ModelConfig(
    vocab=32,
    dim=32,
    n_layers=2,
    n_heads=6,
    n_kv_groups=2,
    d_k=8,
    d_v=8,
    nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=10),
)
FLAT = ModelConfig(
    vocab=32, dim=32, n_layers=1, n_heads=4, n_kv_groups=1, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=8, l_sel=8, n_sel=3, w=8)
)
WINDOW = replace(TINY, attention="window")


@pytest.mark.parametrize("cfg", [TINY, FLAT, replace(TINY, attention="dense"), WINDOW])
def test_decode_equals_prefill(cfg: ModelConfig) -> None:
    torch.manual_seed(1)
    model = LanguageModel(cfg).double().eval()
    tokens = torch.randint(0, cfg.vocab, (2, 70))
    with torch.no_grad():
        whole = model(tokens)
    state = decode.start(model, 2)
    for t in range(70):
        torch.testing.assert_close(decode.step(model, state, tokens[:, t]), whole[:, t], rtol=1e-9, atol=1e-9)
    for prompt in (3, 40):
        logits, state = decode.prefill(model, tokens[:, :prompt])
        torch.testing.assert_close(logits, whole[:, prompt - 1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(decode.step(model, state, tokens[:, prompt]), whole[:, prompt], rtol=1e-9, atol=1e-9)


def test_a_window_alone_sees_as_far_as_its_layers_reach() -> None:
    """Two layers of ten tokens: token 18 moves the logits 18 tokens on, and nothing behind them."""
    torch.manual_seed(1)
    model = LanguageModel(WINDOW).double().eval()
    tokens = torch.randint(0, 32, (1, 70))
    edited = tokens.clone()
    edited[0, 20] = (edited[0, 20] + 1) % 32
    with torch.no_grad():
        moved = (model(edited) - model(tokens)).abs().amax(-1)[0] > 0
    reach = WINDOW.n_layers * (WINDOW.nsa.w - 1)
    assert moved.nonzero()[:, 0].tolist() == list(range(20, 20 + reach + 1))


@pytest.mark.parametrize("cfg", [TINY, FLAT])
def test_decoding_reads_less_than_the_past(cfg: ModelConfig) -> None:
    model = LanguageModel(cfg).eval()
    state = decode.start(model, 1)
    for _ in range(70):
        decode.step(model, state, torch.tensor([1]))
    assert state.reads < cfg.n_layers * sum(range(1, 71)) * 2


def test_m7c_is_the_planned_size() -> None:
    assert parameter_count(ModelConfig(vocab=50257)) == pytest.approx(122e6, rel=0.03)
    assert parameter_count(ModelConfig(vocab=256)) == pytest.approx(83e6, rel=0.04)


def test_no_output_of_the_model_sees_the_future() -> None:
    torch.manual_seed(2)
    model = LanguageModel(TINY).eval()
    tokens = torch.randint(0, 32, (1, 64))
    with torch.no_grad():
        base = model(tokens)
        for j in (1, 8, 23, 24, 40, 63):
            edited = tokens.clone()
            edited[0, j] = (edited[0, j] + 1) % 32
            assert torch.equal(model(edited)[:, :j], base[:, :j])


def test_recomputation_changes_no_gradient() -> None:
    torch.manual_seed(3)
    model = LanguageModel(TINY)
    tokens = torch.randint(0, 32, (2, 40))
    grads = []
    for recompute in (range(0), range(2), range(1, 2)):
        model.recompute = recompute
        model.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for none, every, last in zip(*grads, strict=True):
        assert torch.equal(none, every)
        assert torch.equal(none, last)


def test_gate_metrics_see_a_collapse() -> None:
    even = torch.full((1, 4, 2, 3), 0.5)
    metrics = gate_metrics([even])
    assert metrics is not None
    assert metrics.entropy_mean == pytest.approx(1.0986, abs=1e-3)
    assert metrics.collapse_frac == 0
    collapsed = torch.tensor([0.99, 0.001, 0.001]).expand(1, 4, 2, 3)
    metrics = gate_metrics([even, collapsed])
    assert metrics is not None
    assert metrics.collapse_frac == 0.5


@pytest.mark.slow  # 20 s alone, minutes on a busy machine; the self-test with --full has it, too
def test_a_short_training_finds_needles_that_only_compression_and_selection_reach() -> None:
    assert selftest.needle(torch.device("cpu"), 0).startswith("found")

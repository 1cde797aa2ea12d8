"""Short rows on one thread of a processor: all branches in one go, with their weights kept for the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from nsa_kit import SMALL, edits_change_nothing_before, results, small_layer, starts_of

from uvcc_engine.nsa import dispatch, kept, loops, spans
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import route_of
from uvcc_engine.nsa.visibility import Layout

CPU = torch.device("cpu")
NARROW = NSAConfig(l=8, d=4, l_sel=16, n_sel=9, w=12)  # which windows cut, and nothing is left to select
WIDE = NSAConfig(l=8, d=8, l_sel=16, n_sel=12, w=500)


@pytest.fixture(autouse=True)
def _one_thread_and_small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(loops, "found", lambda: None)
    monkeypatch.setattr(spans, "ROWS", 48)
    monkeypatch.setattr(spans, "SCORES", 1500)
    yield
    dispatch.force(None)


@pytest.mark.parametrize(
    ("nsa", "lengths"),
    [
        (NARROW, (7,)),
        (WIDE, (7,)),
        (NARROW, (15, 9, 11)),
        *(pytest.param(n, s, marks=pytest.mark.ci(__file__)) for n in (NARROW, WIDE) for s in ((55,), (5, 20, 30))),
        pytest.param(WIDE, (25, 9, 21), marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_the_oracles(nsa: NSAConfig, lengths: tuple[int, ...]) -> None:
    """Rows of one document and of several, and one that is shorter than a block."""
    layer, rows = small_layer(nsa), 2
    x = torch.randn(rows, sum(lengths), 24, dtype=torch.float64, requires_grad=True)
    found = starts_of(*lengths)
    starts = None if found is None else found.expand(rows, -1)
    assert dispatch.together(Layout(nsa, sum(lengths), CPU, starts), torch.float64, 2, (8, 4)) is kept
    for ours, theirs in zip(results("kept", layer, x, starts), results(None, layer, x, starts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_rows_of_several_documents_each_see_their_own() -> None:
    layer = small_layer(NARROW)
    x = torch.randn(2, 90, 24, dtype=torch.float64, requires_grad=True)
    one, two = starts_of(43, 47), starts_of(5, 30, 55)
    assert one is not None
    assert two is not None
    starts = torch.cat([one, two])
    for ours, theirs in zip(results("kept", layer, x, starts), results("masked", layer, x, starts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("lengths", [(120,), (50, 70)])
def test_no_output_sees_its_future(lengths: tuple[int, ...]) -> None:
    dispatch.force("kept")
    layer = small_layer(NARROW).float()
    edits_change_nothing_before(layer, 120, starts_of(*lengths), [0, 7, 8, 15, 16, 49, 50, 100, 119])


def test_gradients_compute_no_weight_again() -> None:
    layer = small_layer(NARROW).float()
    x = torch.randn(1, 120, 24, requires_grad=True)
    total = layer(x, None)[0].sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        total.backward()
    names = {event.name for event in seen.events() or ()}
    assert "aten::addmm_" in names
    assert not names & {
        "aten::exp",
        "aten::exp2_",
        "aten::softmax",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }


def test_it_serves_short_rows_without_a_selection_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"cmp": "kept", "sel": "dense", "win": "kept"}
    cfg = ModelConfig()
    assert route_of(cfg, kept.UP_TO, CPU) == paths
    assert "kept" not in route_of(cfg, kept.UP_TO + 1, CPU).values()
    assert "kept" not in route_of(cfg, kept.UP_TO, CPU, torch.bfloat16).values()
    assert "kept" not in route_of(ModelConfig(nsa=SMALL), kept.UP_TO, CPU).values()
    dispatch.force("masked")
    assert "kept" not in route_of(cfg, kept.UP_TO, CPU).values()
    dispatch.force("kept")
    assert route_of(cfg, kept.UP_TO, CPU) == paths
    assert set(route_of(ModelConfig(nsa=SMALL), kept.UP_TO, CPU).values()) == {"masked"}  # where it does not serve
    dispatch.force(None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "kept" not in route_of(cfg, kept.UP_TO, CPU).values()

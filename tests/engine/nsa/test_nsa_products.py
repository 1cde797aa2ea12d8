"""What a processor computes by products over tiles, where the shapes and sizes of a row decide."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from nsa_kit import ODD, SMALL, results, small_layer, starts_of
from torch import Tensor

from uvcc_engine.nsa import dispatch, masked, products, spans
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.index import as_mask
from uvcc_engine.nsa.visibility import Layout

CPU = torch.device("cpu")
FAR = NSAConfig(l=8, d=4, l_sel=8, n_sel=3, w=12)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spans, "ROWS", 48)
    monkeypatch.setattr(spans, "SCORES", 1500)
    monkeypatch.setattr(products, "CHOSEN_TILE", 16)
    monkeypatch.setattr(products, "RANKED", 32)
    yield
    dispatch.force(None)


@pytest.mark.parametrize(
    ("nsa", "lengths"),
    [
        (ODD, (43, 9, 12)),
        *(pytest.param(n, s, marks=pytest.mark.ci(__file__)) for n in (SMALL, ODD) for s in ((90,), (43, 9, 34))),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_the_oracles(nsa: NSAConfig, lengths: tuple[int, ...]) -> None:
    layer = small_layer(nsa)
    x = torch.randn(1, sum(lengths), 24, dtype=torch.float64, requires_grad=True)
    starts = starts_of(*lengths)
    for ours, theirs in zip(results("chunked", layer, x, starts), results(None, layer, x, starts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["cmp", "causal", "local", "window"])
def test_tiles_hide_what_is_not_seen_and_nothing_else(kind: spans.Kind) -> None:
    """Every query is in one tile, whose keys and edges are those that the bounds of its document and branch name."""
    layout = Layout(SMALL, 130, CPU, starts_of(71, 9, 50))
    seen = {
        "cmp": layout.cmp_visible,
        "causal": layout.causal[:, 0] if layout.causal is not None else None,
        "window": layout.window[:, 0] if layout.window is not None else None,
    }.get(kind)
    if kind == "local":
        near = layout.positions // SMALL.l_sel * SMALL.l_sel - SMALL.l_sel
        late = layout.positions >= SMALL.n_sel * SMALL.l_sel
        assert layout.causal is not None
        seen = layout.causal[:, 0] & ((torch.arange(130) >= near[:, None]) | ~late[:, None])
    assert seen is not None
    (tiles,) = spans.tiles(layout, kind, 3)
    assert [t.begin for t in tiles[1:]] == [t.end for t in tiles[:-1]]
    assert (tiles[0].begin, tiles[-1].end) == (0, 130)
    for tile in tiles:
        score = torch.zeros((tile.end - tile.begin) * 3, tile.high - tile.low)
        tile.hide(score)
        found = torch.zeros(tile.end - tile.begin, seen.shape[-1], dtype=torch.bool)
        found[:, tile.low : tile.high] = (score == 0).view(-1, 3, score.shape[-1]).all(1)
        wanted = seen[0, tile.begin : tile.end]
        some = wanted.any(-1)  # a query that sees no compression block is given one
        assert torch.equal(found[some], wanted[some])
        assert bool((found[~some].sum(-1) == 1).all())


def far_away(s: int, high: float, dtype: torch.dtype) -> tuple[Layout, Tensor, Tensor, Tensor, Tensor]:
    """Rows whose last query finds, in a block that it chose, a score of ``high`` above all others."""
    gen = torch.Generator().manual_seed(5)
    layout = Layout(FAR, s, CPU, None)
    q, k, v = (torch.randn(1, s, n, 4, generator=gen, dtype=dtype) for n in (2, 1, 1))
    k[0, 19, 0] = torch.tensor([high, 0, 0, 0])
    q[..., 0] = 0
    q[0, -1, :, 0] = 2  # the scale is 1 / 2
    late = torch.arange(spans.early(layout), s)
    blocks = torch.stack([torch.full_like(late, 2), late // 8 - 1, late // 8], -1).clamp(min=0)
    blocks = torch.where(blocks[:, 1:2] == 2, torch.tensor([1, 2, 3]), blocks)
    return layout, q, k, v, blocks.to(torch.int32)[None, None]


def test_a_weight_beyond_the_type_raises_its_query_alone() -> None:
    layout, q, k, v, chosen = far_away(60, 900.0, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    weight = torch.randn(1, 60, 2, 4, dtype=torch.float64)
    mask = torch.ones(1, 1, 60, layout.n_blocks, dtype=torch.bool)
    mask[:, :, spans.early(layout) :] = as_mask(chosen, layout.n_blocks)
    ours = products.selected(q, k, v, chosen, layout)
    theirs = masked.selected(q, k, v, mask, layout)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    found, wanted = (torch.autograd.grad((o * weight).sum(), leaves) for o in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours[0, -1, 0], v[0, 19, 0])


def test_a_raised_query_leaves_the_bits_of_earlier_ones() -> None:
    layout, q, k, v, chosen = far_away(60, 300.0, torch.float32)
    high = products.selected(q, k, v, chosen, layout)
    assert high.isfinite().all()
    q[0, -1, :, 0] = 0
    plain = products.selected(q, k, v, chosen, layout)
    assert torch.equal(high[:, :-1], plain[:, :-1])
    assert not torch.equal(high[:, -1], plain[:, -1])


def test_no_score_is_put_through_an_exp_that_is_slow_at_hidden_ones() -> None:
    """The weights are powers of 2: where a score is hidden or far away, torch's exp takes twenty times as long."""
    layer = small_layer(SMALL).float()
    x = torch.randn(1, 150, 24)
    dispatch.force("chunked")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, torch.no_grad():
        layer(x, None)
    names = {event.name for event in seen.events() or ()}
    assert "aten::exp2_" in names
    assert not names & {"aten::exp", "aten::exp_", "aten::softmax", "aten::_softmax"}

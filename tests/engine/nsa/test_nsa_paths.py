"""Every path computes what the masked one does, forward and gradients, packed or not, and sees no future."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import blocks, chunked, dispatch, longctx
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.index import as_mask, invert, pool, pool_weights, top_blocks
from uvcc_engine.nsa.layout import Layout

SMALL = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=12)
FLAT = NSAConfig(l=8, d=8, l_sel=8, n_sel=4, w=40)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunked, "TILE", 32)
    yield
    dispatch.force(None)


def _layer(nsa: NSAConfig, seed: int = 0) -> NSAttention:
    torch.manual_seed(seed)
    return NSAttention(ModelConfig(vocab=16, dim=24, n_layers=1, n_heads=6, n_kv_groups=2, d_k=8, d_v=4, nsa=nsa))


def _starts(*lengths: int) -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return blocks.doc_starts(ids[None])


def _results(path: str, layer: NSAttention, x: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Output and every gradient on one path."""
    dispatch.force(path)
    y = layer(x, starts)[0]
    weight = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    inputs = (x, *layer.parameters())
    return [y, *torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("nsa", [SMALL, FLAT])
@pytest.mark.parametrize("lengths", [(77,), (7,), (90, 9, 41)])
@pytest.mark.parametrize("path", ["chunked"])
def test_outputs_and_gradients_are_those_of_the_masked_path(
    nsa: NSAConfig, lengths: tuple[int, ...], path: str
) -> None:
    layer = _layer(nsa).double()
    x = torch.randn(2, sum(lengths), 24, dtype=torch.float64, requires_grad=True)
    starts = _starts(*lengths).expand(2, -1) if len(lengths) > 1 else None
    for ours, theirs in zip(_results(path, layer, x, starts), _results("masked", layer, x, starts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("path", ["masked", "chunked"])
@pytest.mark.parametrize("lengths", [(130,), (50, 80)])
def test_editing_a_token_changes_nothing_before_it(path: str, lengths: tuple[int, ...]) -> None:
    dispatch.force(path)
    layer = _layer(SMALL)
    s = sum(lengths)
    starts = _starts(*lengths) if len(lengths) > 1 else None
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(1, s, 24, generator=gen)
    with torch.no_grad():
        base = layer(x, starts)[0]
        for j in (1, 7, 8, 15, 16, 31, 32, 33, 49, 50, 63, 64, 96, s - 1, *torch.randint(1, s, (6,), generator=gen)):
            edited = x.clone()
            edited[0, j] += torch.randn(24, generator=gen)
            out = layer(edited, starts)[0]
            assert torch.equal(out[:, :j], base[:, :j]), int(j)
            assert not torch.equal(out[:, j], base[:, j])


@pytest.mark.parametrize("cfg", [NSAConfig(), SMALL, FLAT, NSAConfig(l=64, d=16, l_sel=64, n_sel=4, w=8)])
def test_pooling_is_the_overlap_matrix(cfg: NSAConfig) -> None:
    n_cmp, n_blocks = cfg.n_cmp(500), cfg.n_blocks(500)
    p = torch.rand(3, n_cmp, dtype=torch.float64)
    matrix = blocks.overlap(cfg, n_cmp, n_blocks, device=p.device, dtype=p.dtype)
    torch.testing.assert_close(pool(cfg, p, n_blocks), p @ matrix)
    assert pool_weights(NSAConfig()).tolist() == [1, 2, 2, 2, 1]


def test_short_lists_make_the_choice_of_the_mask_ties_included() -> None:
    starts = _starts(70, 58, 72)
    pos = torch.arange(200)
    score = torch.randint(0, 4, (1, 2, 200, SMALL.n_blocks(200)), generator=torch.Generator().manual_seed(1)).float()
    wanted = blocks.select_blocks(SMALL, score, pos, starts)
    found = top_blocks(SMALL, score, pos, starts)
    assert torch.equal(as_mask(found, SMALL.n_blocks(200)), wanted)
    assert found.dtype == torch.int32
    assert bool((found[..., 1:] >= found[..., :-1])[found[..., 1:] >= 0].all())


def test_the_inverse_names_each_query_of_each_block_once_in_order() -> None:
    pos, starts = torch.arange(100), _starts(100)
    score = torch.rand(2, 2, 100, SMALL.n_blocks(100), generator=torch.Generator().manual_seed(2))
    chosen = top_blocks(SMALL, score, pos, starts)
    inverse = invert(chosen, SMALL.n_blocks(100))
    for b in range(2):
        for g in range(2):
            for j in range(SMALL.n_blocks(100)):
                lo, hi = inverse.offset[b, g, j : j + 2].tolist()
                queries = (inverse.entry[b, g, lo:hi] // SMALL.n_sel).tolist()
                assert queries == [t for t in range(100) if j in chosen[b, g, t].tolist()]


def test_the_route_follows_the_length_and_is_reported() -> None:
    cpu = torch.device("cpu")
    assert dispatch.route(Layout(NSAConfig(), 512, cpu, None), 12, 2).to_json() == {
        "cmp": "masked",
        "sel": "dense",
        "win": "masked",
    }
    assert dispatch.route(Layout(NSAConfig(), 8192, cpu, None), 12, 2) == dispatch.Route(*["chunked"] * 3)
    with pytest.raises(ConfigError, match="unknown attention path"):
        dispatch.force("fast")


def test_long_context_counts_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, s = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=12), 90
    zeros = torch.zeros(1, s, dtype=torch.int64)
    pos = torch.arange(s)
    chosen = blocks.select_blocks(cfg, torch.rand(1, 1, s, cfg.n_blocks(s)), pos, zeros)
    assert longctx.reads(cfg, s) == longctx.Reads(
        cmp=int(blocks.cmp_visible(cfg, pos, zeros, cfg.n_cmp(s)).sum()),
        sel=int(blocks.token_mask(cfg, chosen, pos, zeros, s).sum()),
        win=int(blocks.window_mask(cfg, pos, zeros, s).sum()),
        dense=s * (s + 1) // 2,
    )
    assert longctx.main(["--S", "1500", "--dim", "32", "--heads", "2", "--groups", "1", "--w", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["route"]["sel"] == "chunked"
    assert found["prefill_ms"] > 0

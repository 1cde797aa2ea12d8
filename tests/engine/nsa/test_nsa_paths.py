"""Every path computes what the masked one does, forward and gradients, packed or not, and sees no future."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nsa_kit import SMALL, edits_change_nothing_before, results, small_layer, starts_of

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import blocks, chunked, dispatch, flex, longctx, loops, part_of_keys, products, spans
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.index import as_mask, invert, pool, pool_weights, top_blocks
from uvcc_engine.nsa.visibility import Layout
from uvcc_engine.train import config as lm_config

FLAT = NSAConfig(l=8, d=8, l_sel=8, n_sel=4, w=40)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TILE", "CHOSEN_TILE", "WINDOW_TILE"):
        monkeypatch.setattr(chunked, name, 32)
    for module, name, size in (
        (spans, "ROWS", 96),
        (spans, "SCORES", 4000),
        (products, "CHOSEN_TILE", 16),
        (products, "RANKED", 48),
    ):
        monkeypatch.setattr(module, name, size)
    yield
    dispatch.force(None)


@pytest.mark.parametrize("nsa", [SMALL, FLAT])
@pytest.mark.parametrize("lengths", [(77,), (7,), (90, 9, 41)])
@pytest.mark.parametrize("by_products", [True, False], ids=["by products", "by fused operations"])
def test_outputs_and_gradients_are_those_of_the_masked_path(
    nsa: NSAConfig, lengths: tuple[int, ...], by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 32 and 64 bits are computed on a processor, and as 16 are."""
    if not by_products:
        monkeypatch.setattr(products, "TYPES", frozenset())
    layer = small_layer(nsa)
    x = torch.randn(2, sum(lengths), 24, dtype=torch.float64, requires_grad=True)
    found = starts_of(*lengths)
    starts = None if found is None else found.expand(2, -1)
    for ours, theirs in zip(results("chunked", layer, x, starts), results("masked", layer, x, starts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_plain_arithmetic_and_torchs_fused_operations_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no such operations, parts of the keys are computed by products and sums."""
    calls = []
    plain = part_of_keys.scores

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return plain(*args)

    monkeypatch.setattr(part_of_keys, "scores", counted)
    monkeypatch.setattr(products, "TYPES", frozenset())
    layer = small_layer(SMALL)
    x = torch.randn(2, 150, 24, dtype=torch.float64, requires_grad=True)
    starts = starts_of(100, 9, 41)
    assert starts is not None
    fused = results("chunked", layer, x, starts.expand(2, -1))
    assert not calls
    monkeypatch.setattr(part_of_keys, "FUSED", frozenset())
    found = results("chunked", layer, x, starts.expand(2, -1))
    assert calls
    for ours, theirs in zip(found, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("path", ["masked", "chunked", "flex"])
@pytest.mark.parametrize("lengths", [pytest.param((130,), marks=pytest.mark.ci(__file__)), (50, 80)])
def test_editing_a_token_changes_nothing_before_it(path: str, lengths: tuple[int, ...]) -> None:
    dispatch.force(path)
    random = torch.randint(1, 130, (6,), generator=torch.Generator().manual_seed(4)).tolist()
    places = [1, 7, 8, 15, 16, 31, 32, 33, 49, 50, 63, 64, 96, 129, *random]
    edits_change_nothing_before(small_layer(SMALL).float(), 130, starts_of(*lengths), places)


def test_the_path_for_long_rows_computes_in_bf16_too() -> None:
    layer = small_layer(SMALL).float()
    x = torch.randn(1, 90, 24, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [results(path, layer, x, None) for path in ("chunked", "masked")]
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1 * float(theirs.abs().max()))


@pytest.mark.parametrize("nsa", [SMALL, FLAT])
@pytest.mark.parametrize("lengths", [pytest.param((200,), marks=pytest.mark.ci(__file__)), (7,), (90, 9, 101)])
def test_flex_attention_computes_what_the_masked_path_does(nsa: NSAConfig, lengths: tuple[int, ...]) -> None:
    """Forward only: torch has no backward of it on a CPU."""
    layer = small_layer(nsa).float()
    x = torch.randn(2, sum(lengths), 24)
    found = starts_of(*lengths)
    starts = None if found is None else found.expand(2, -1)
    outputs = []
    with torch.no_grad():
        for path in ("flex", "masked"):
            dispatch.force(path)
            outputs.append(layer(x, starts)[0])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_flex_block_masks_skip_what_nobody_sees() -> None:
    """A tile of queries lists no key block of another document, of the future, or from before its window."""
    layout = Layout(SMALL, 640, torch.device("cpu"), starts_of(300, 340))
    mask = flex.band_mask(layout, 1, 1, 64, 640)
    assert mask.kv_num_blocks.flatten().tolist() == [1, 2, 2, 2, 2]
    whole = flex.band_mask(layout, SMALL.d, SMALL.l, 1 << 30, layout.n_cmp)
    assert whole.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("cfg", [NSAConfig(), SMALL, FLAT, NSAConfig(l=64, d=16, l_sel=64, n_sel=4, w=8)])
def test_pooling_is_the_overlap_matrix(cfg: NSAConfig) -> None:
    n_cmp, n_blocks = cfg.n_cmp(500), cfg.n_blocks(500)
    p = torch.rand(3, n_cmp, dtype=torch.float64)
    matrix = blocks.overlap(cfg, n_cmp, n_blocks, device=p.device, dtype=p.dtype)
    torch.testing.assert_close(pool(cfg, p, n_blocks), p @ matrix)
    assert pool_weights(NSAConfig()).tolist() == [1, 2, 2, 2, 1]


def test_short_lists_make_the_choice_of_the_mask_ties_included() -> None:
    starts = starts_of(70, 58, 72)
    pos = torch.arange(200)
    score = torch.randint(0, 4, (1, 2, 200, SMALL.n_blocks(200)), generator=torch.Generator().manual_seed(1)).float()
    wanted = blocks.select_blocks(SMALL, score, pos, starts)
    found = top_blocks(SMALL, score, pos, starts)
    assert torch.equal(as_mask(found, SMALL.n_blocks(200)), wanted)
    assert found.dtype == torch.int32
    assert bool((found[..., 1:] >= found[..., :-1])[found[..., 1:] >= 0].all())


def test_the_inverse_names_each_query_of_each_block_once_in_order() -> None:
    pos, starts = torch.arange(100), torch.zeros(1, 100, dtype=torch.int64)
    score = torch.rand(2, 2, 100, SMALL.n_blocks(100), generator=torch.Generator().manual_seed(2))
    chosen = top_blocks(SMALL, score, pos, starts)
    inverse = invert(chosen, SMALL.n_blocks(100))
    for b in range(2):
        for g in range(2):
            for j in range(SMALL.n_blocks(100)):
                lo, hi = inverse.offset[b, g, j : j + 2].tolist()
                queries = (inverse.entry[b, g, lo:hi] // SMALL.n_sel).tolist()
                assert queries == [t for t in range(100) if j in chosen[b, g, t].tolist()]


def test_the_route_follows_the_length_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(loops, "found", lambda: None)
    assert dispatch.route(Layout(NSAConfig(), 512, cpu, None), 12, 2).to_json() == {
        "cmp": "masked",
        "sel": "dense",
        "win": "masked",
    }
    assert dispatch.route(Layout(NSAConfig(), 8192, cpu, None), 12, 2) == dispatch.Route(*["chunked"] * 3)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    by_length = [dispatch.best_path("cuda", s, 6) for s in (512, 2048, 8192, 65_536)]
    assert by_length == ["masked", "triton", "triton", "triton"]
    assert dispatch.best_path("cuda", 65_536, 128) == "flex"
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch.best_path("cuda", 65_536, 6) == "flex"
    with pytest.raises(ConfigError, match="needs triton"):
        dispatch.force("triton")
    with pytest.raises(ConfigError, match="unknown attention path"):
        dispatch.force("fast")


@pytest.mark.parametrize("name", ["m7c_125m_24g", "m7c_125m_40g", "m7c_125m_80g", "m7c_125m_2xa100_production"])
def test_the_production_trainings_come_to_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = lm_config.from_mapping(lm_config.load(name))
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    layout = Layout(cfg.model.nsa, cfg.train.seq_len, torch.device("cuda"), None)
    assert dispatch.route(layout, cfg.model.n_heads, cfg.model.n_kv_groups) == dispatch.Route(*["triton"] * 3)


def test_long_context_counts_what_is_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "found", lambda: None)
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


BLOCKS_OF = {"shipped": NSAConfig(n_sel=4), "small blocks": NSAConfig(l=32, d=16, l_sel=32, n_sel=4, w=64)}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("cfg", BLOCKS_OF.values(), ids=BLOCKS_OF)
def test_what_torch_tiles_on_each_gpu_divides_the_blocks_of_every_mask(
    cfg: NSAConfig, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses tiles that do not divide the listed blocks, or finds none at all on the way back."""
    choices = importlib.import_module("torch._inductor.choices").InductorChoices()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    layout, masks = Layout(cfg, 640, torch.device("cpu"), None), []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, lse: bool = False) -> Any:
        masks.append(mask)
        return q, torch.zeros(q.shape[0], q.shape[2], q.shape[1]) if lse else None

    monkeypatch.setattr(flex, "attend_blocks", attend)
    q, kv = torch.randn(1, 640, 12, 64), torch.randn(1, 640, 2, 64)
    short = kv[:, : layout.n_cmp]
    _, chosen = flex.compressed(q, short, short, layout)
    assert chosen is not None
    flex.selected(q, kv, kv, chosen, layout)
    flex.window(q, kv, kv, layout)
    assert len(masks) == 3
    for head_dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float32):
            forward = choices.get_flex_attention_fwd_configs(head_dim, dtype, "cuda")
            backward = choices.get_flex_attention_bwd_configs(head_dim, dtype, "cuda")
            for rows, keys in (mask.BLOCK_SIZE for mask in masks):
                assert all(rows % c.block_m == 0 and keys % c.block_n == 0 for c in forward)
                assert all(rows % c.block_m1 == 0 and keys % c.block_n1 == 0 for c in backward)
                assert all(rows % c.block_m2 == 0 and keys % c.block_n2 == 0 for c in backward)


def test_the_bands_block_masks_are_one_for_all_layers() -> None:
    layout = Layout(SMALL, 640, torch.device("cpu"), None)
    assert flex.band_mask(layout, 1, 1, 64, 640) is flex.band_mask(layout, 1, 1, 64, 640)
    assert flex.band_mask(layout, 1, 1, 32, 640) is not flex.band_mask(layout, 1, 1, 64, 640)


def test_a_torch_without_aux_request_is_asked_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.9; the flag still serves."""
    layer = small_layer(SMALL).float()
    x = torch.randn(2, 200, 24)
    with torch.no_grad():
        dispatch.force("flex")
        ours = layer(x, None)[0]
        monkeypatch.delattr(flex.torch_flex, "AuxRequest", raising=False)
        torch.testing.assert_close(layer(x, None)[0], ours)


def test_a_torch_without_lengths_in_block_masks_takes_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.5."""
    monkeypatch.setattr(dispatch, "has_flex", lambda: False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch.best_path("cuda", 2048, 6) == "chunked"
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    assert [dispatch.best_path("cuda", 2048, heads) for heads in (6, 128)] == ["triton", "chunked"]
    with pytest.raises(ConfigError, match=r"needs torch 2\.6"):
        dispatch.force("flex")

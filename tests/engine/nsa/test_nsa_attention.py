"""The masked path against the float64 oracle, and what no amount of reading proves: no output sees the future."""

from __future__ import annotations

import pytest
import torch
from nsa_kit import ODD, SMALL, docs, oracle_of, small_layer

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.rope import rope_tables, rotate
from uvcc_engine.nsa.visibility import forget


@pytest.mark.parametrize(
    ("nsa", "s"),
    [
        *((nsa, s) for nsa in (SMALL, ODD) for s in (1, 7, 8)),
        (ODD, 33),
        *(pytest.param(nsa, s, marks=pytest.mark.ci(__file__)) for nsa, s in ((SMALL, 33), (SMALL, 60), (ODD, 60))),
    ],
)
def test_masked_path_equals_the_oracle(nsa: NSAConfig, s: int) -> None:
    layer = small_layer(nsa)
    x = torch.randn(2, s, 24, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], oracle_of(layer, x, None), rtol=1e-9, atol=1e-9)


def test_a_layer_whose_projection_has_an_odd_width_equals_the_oracle() -> None:
    """Pairs of its rows do not lie as complex numbers would. A width of 400 has 25 hidden units in its gate."""
    layer = small_layer(SMALL, n_kv_groups=1, d_v=5)
    assert layer.project_in.out_features % 2
    x = torch.randn(2, 33, 24, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], oracle_of(layer, x, None), rtol=1e-9, atol=1e-9)


def test_packed_documents_equal_the_oracle_and_do_not_see_each_other() -> None:
    layer = small_layer(SMALL)
    starts = blocks.doc_starts(docs(37, 5, 40))
    x = torch.randn(1, 82, 24, dtype=torch.float64)
    with torch.no_grad():
        packed = layer(x, starts)[0]
        torch.testing.assert_close(packed, oracle_of(layer, x, starts), rtol=1e-9, atol=1e-9)
        other = x.clone()
        other[:, :37] = torch.randn(1, 37, 24, dtype=torch.float64)
        assert torch.equal(layer(other, starts)[0][:, 37:], packed[:, 37:])


@pytest.mark.parametrize("packed", [False, True])
def test_editing_a_token_changes_nothing_before_it(packed: bool) -> None:
    layer = small_layer(SMALL).float()
    s = 96
    starts = blocks.doc_starts(docs(50, 46)) if packed else None
    x = torch.randn(1, s, 24)
    with torch.no_grad():
        base = layer(x, starts)[0]
        for j in (0, 1, 7, 8, 15, 16, 17, 31, 49, 50, 63, 64, 95):
            edited = x.clone()
            edited[0, j] += torch.randn(24)
            out = layer(edited, starts)[0]
            assert torch.equal(out[:, :j], base[:, :j]), j
            assert not torch.equal(out[:, j], base[:, j])


def test_a_planted_leak_is_noticed() -> None:
    """Softmax over invisible compression blocks (a real defect of an older trainer) must fail the edit test."""
    layer = small_layer(SMALL).float()
    x = torch.randn(1, 96, 24)
    honest = blocks.cmp_visible
    forget()
    blocks.cmp_visible = lambda cfg, q_pos, doc_start, n: torch.ones_like(honest(cfg, q_pos, doc_start, n))  # type: ignore[assignment]
    try:
        with torch.no_grad():
            base = layer(x)[0]
            edited = x.clone()
            edited[0, 80] += 1.0
            assert not torch.equal(layer(edited)[0][:, :80], base[:, :80])
    finally:
        blocks.cmp_visible = honest
        forget()


def test_overlap_weights_are_the_spatial_ones() -> None:
    w = blocks.overlap(NSAConfig(), 20, 5, device=torch.device("cpu"), dtype=torch.float64)
    column = w[:, 2]
    assert column[7:12].tolist() == [1, 2, 2, 2, 1]
    assert column.sum() == 8


def test_selection_forces_first_and_local_blocks_and_breaks_ties_low() -> None:
    cfg = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=12)
    pos = torch.arange(160)
    chosen = blocks.select_blocks(cfg, torch.zeros(1, 1, 160, 10), pos, torch.zeros(1, 160, dtype=torch.int64))
    assert chosen[0, 0, 159].nonzero().flatten().tolist() == [0, 1, 8, 9]
    assert chosen[0, 0, 20].nonzero().flatten().tolist() == [0, 1]
    assert int(chosen.sum(-1).max()) == 4


def test_rope_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 64, dtype=torch.float64)

    def dot(i: int, j: int) -> float:
        turned = []
        for vec, pos in ((q, i), (k, j)):
            turned.append(rotate(vec, rope_tables(torch.tensor(pos), 64, base=1e4, scale=2.0, dtype=torch.float64)))
        return float(turned[0] @ turned[1])

    assert dot(10, 5) == pytest.approx(dot(110, 105), abs=1e-9)
    assert dot(10, 5) != pytest.approx(dot(10, 6), abs=1e-3)


def test_gradients_equal_the_oracle() -> None:
    layer = small_layer(ODD)
    x = torch.randn(1, 38, 24, dtype=torch.float64, requires_grad=True)  # so long that blocks are left out
    weight = torch.randn(1, 38, 24, dtype=torch.float64)
    names, params = zip(*layer.named_parameters(), strict=True)
    ours = torch.autograd.grad((layer(x)[0] * weight).sum(), (x, *params))
    theirs = torch.autograd.grad((oracle_of(layer, x, None) * weight).sum(), (x, *params))
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=name)


def test_bad_geometry_names_the_hint() -> None:
    with pytest.raises(ConfigError, match="d must divide"):
        NSAConfig(l=30, d=16)

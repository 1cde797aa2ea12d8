"""Slices of a row attend as the whole row does, on every path, with their gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from nsa_kit import starts_of
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.kernels import tiles
from uvcc_engine.nsa.shared_rows import SharedRows
from uvcc_engine.nsa.visibility import Layout

pytestmark = pytest.mark.usefixtures("quick_triton")
NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=3, w=10)
S, HEADS, GROUPS, DK, DV = 48, 4, 2, 8, 4


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    for kernel in tiles.KERNELS:
        tiles.force(kernel, tiles.Tiles(rows=16, keys=16))
    yield
    dispatch.force(None)
    for kernel in tiles.KERNELS:
        tiles.force(kernel, None)


def attended(layout: Layout, leaves: list[Tensor]) -> Tensor:
    """All three branches of the layout's queries [B, S, 3, H, dv]; zeros where a branch has nothing."""
    n, m, here = layout.n_keys, layout.n_cmp, slice(layout.first, layout.n_keys)
    q, kc, ks, kw, vc, vs, vw = leaves
    keys, values = (kc[:, :m] if m else None, ks[:, :n], kw[:, :n]), (vc[:, :m] if m else None, vs[:, :n], vw[:, :n])
    o_cmp, o_sel, o_win = dispatch.attend(layout, q[:, here], keys, values)
    o_cmp = torch.zeros_like(o_sel) if o_cmp is None else o_cmp * layout.sees_cmp[..., None]
    return torch.stack([o_cmp, o_sel, o_win], 2)


@pytest.mark.parametrize(
    ("path", "lengths"),
    [
        ("masked", (S,)),
        ("chunked", (S,)),
        ("masked", (19, 29)),
        ("chunked", (19, 29)),
        pytest.param("triton", (19, 29), marks=pytest.mark.ci("tests/engine/nsa/test_nsa_triton.py")),
    ],
)
def test_slices_attend_as_the_row_does(path: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    m = NSA.n_cmp(S)
    shapes = [(S, HEADS, DK), (m, GROUPS, DK), *[(S, GROUPS, DK)] * 2, (m, GROUPS, DV), *[(S, GROUPS, DV)] * 2]
    leaves = [torch.randn(1, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    starts = starts_of(*lengths)
    device = torch.device("cpu")
    dispatch.force("masked")
    whole = attended(Layout(NSA, S, device, starts), leaves)
    dispatch.force(path)
    context = SharedRows(0, 2, lambda x: x)
    cuts = [cut for rank in range(2) for cut in context.slices(S, rank)]
    found = torch.empty_like(whole)
    for cut in cuts:
        own = None if starts is None else starts[:, cut.start : cut.stop]
        found[:, cut.start : cut.stop] = attended(Layout(NSA, len(cut), device, own, first=cut.start), leaves)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weights).sum(), leaves)
    for a, b in zip(torch.autograd.grad((found * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_every_token_has_one_rank_and_the_ranks_have_equally_much_to_look_at() -> None:
    context = SharedRows(1, 4, lambda x: x)
    places = [context.places(S, torch.device("cpu"), rank) for rank in range(4)]
    assert sorted(torch.cat(places).tolist()) == list(range(S))
    assert len({int(p.sum()) for p in places}) == 1
    assert torch.equal(context.places(S, torch.device("cpu")), places[1])

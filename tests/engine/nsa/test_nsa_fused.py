"""Rows of 32-bit floats on a processor: all branches in one go by compiled loops."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from nsa_kit import edits_change_nothing_before, results, small_layer, starts_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from uvcc_engine.nsa import dispatch, fused, index, loops
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel, route_of
from uvcc_engine.nsa.visibility import Layout, forget

numba = pytest.importorskip("numba")
CPU = torch.device("cpu")
CHOOSY = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=40)
WIDE = NSAConfig(l=16, d=8, l_sel=48, n_sel=3, w=500)  # blocks of more than one tile, a window longer than the row
WIDTHS = {"n_heads": 6, "n_kv_groups": 2, "d_k": 16, "d_v": 80}


@pytest.fixture(autouse=True)
def _short_rows_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(fused, "FROM", 1)
    monkeypatch.setattr(fused, "ROWS", 20)
    yield
    dispatch.force(None)


def layer_of(nsa: NSAConfig, **over: int) -> NSAttention:
    return small_layer(nsa, **{**WIDTHS, **over}).float()


def agree(layer: NSAttention, x: Tensor, starts: Tensor | None, wanted: list[Tensor]) -> None:
    """Output and gradients of the loops are those wanted, to the precision of 32 bits."""
    dispatch.force(None)
    layout = Layout(layer.cfg.nsa, x.shape[1], CPU, starts)
    widths = layer.cfg.d_k, layer.cfg.d_v
    assert dispatch.together(layout, torch.float32, layer.cfg.n_kv_groups, widths) is fused
    for ours, theirs in zip(results("fused", layer, x, starts), wanted, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=2e-5 * scale)


def exactly(path: str | None, x: Tensor, starts: Tensor | None, nsa: NSAConfig, **over: int) -> list[Tensor]:
    """Output and gradients in double precision."""
    return results(path, small_layer(nsa, **{**WIDTHS, **over}), x.detach().double().requires_grad_(), starts)


@pytest.mark.parametrize(
    "lengths", [(7,), *(pytest.param(s, marks=pytest.mark.ci(__file__)) for s in ((90,), (33, 9, 48)))], ids=str
)
def test_outputs_and_gradients_are_the_oracles(lengths: tuple[int, ...]) -> None:
    """Rows of one document and of several, one shorter than a block, and queries that select."""
    x, starts = torch.randn(1, sum(lengths), 24, requires_grad=True), starts_of(*lengths)
    agree(layer_of(CHOOSY), x, starts, exactly(None, x, starts, CHOOSY))


@pytest.mark.parametrize("lengths", [(230,), (43, 9, 178)])
def test_blocks_of_several_tiles_and_a_window_longer_than_the_row(lengths: tuple[int, ...]) -> None:
    x, starts = torch.randn(1, sum(lengths), 24, requires_grad=True), starts_of(*lengths)
    agree(layer_of(WIDE), x, starts, exactly("masked", x, starts, WIDE))


@pytest.mark.parametrize("heads", [1, 7, 8])
def test_groups_of_any_number_of_heads(heads: int) -> None:
    x = torch.randn(1, 110, 24, requires_grad=True)
    agree(layer_of(CHOOSY, n_heads=2 * heads), x, None, exactly("masked", x, None, CHOOSY, n_heads=2 * heads))


def test_rows_of_several_documents_each_see_their_own() -> None:
    one, two = starts_of(43, 107), starts_of(5, 30, 115)
    assert one is not None
    assert two is not None
    x, starts = torch.randn(2, 150, 24, requires_grad=True), torch.cat([one, two])
    agree(layer_of(CHOOSY), x, starts, exactly("masked", x, starts, CHOOSY))


@pytest.mark.parametrize("lengths", [(150,), (70, 80)])
def test_no_output_sees_its_future(lengths: tuple[int, ...]) -> None:
    dispatch.force("fused")
    edits_change_nothing_before(layer_of(CHOOSY), 150, starts_of(*lengths), [0, 7, 8, 15, 16, 63, 64, 100, 149])


def test_slices_of_a_row_have_its_bits() -> None:
    """As ranks that share rows compute them."""
    torch.manual_seed(0)
    s, starts = 150, starts_of(70, 80)
    m = CHOOSY.n_cmp(s)
    shapes = [(s, 6, 16), *[(m, 2, 16), (s, 2, 16), (s, 2, 16)], *[(m, 2, 32), (s, 2, 32), (s, 2, 32)], (s, 6, 3)]
    q, kc, ks, kw, vc, vs, vw, gates = (torch.rand(1, *shape) for shape in shapes)
    whole = fused.mixed(q, (kc, ks, kw), (vc, vs, vw), gates, Layout(CHOOSY, s, CPU, starts))
    assert starts is not None
    for a, b in ((0, 40), (40, 110), (110, 150)):
        layout = Layout(CHOOSY, b - a, CPU, starts[:, a:b], first=a)
        n, c = layout.n_keys, layout.n_cmp
        keys, values = (kc[:, :c], ks[:, :n], kw[:, :n]), (vc[:, :c], vs[:, :n], vw[:, :n])
        assert torch.equal(fused.mixed(q[:, a:b], keys, values, gates[:, a:b], layout), whole[:, a:b])


def test_two_threads_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(CHOOSY), torch.randn(2, 150, 24, requires_grad=True)
    one = results("fused", layer, x, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for a, b in zip(results("fused", layer, x, None), one, strict=True):
        assert torch.equal(a, b)


def test_the_blocks_picked_are_the_best_and_of_equals_the_lower() -> None:
    """Of shares of few values, so that many are equal; whole numbers, whose sums have no rounding."""
    found = loops.found()
    assert found is not None
    gen = torch.Generator().manual_seed(1)
    s, cfg = 300, CHOOSY
    count, weights = cfg.n_cmp(s), index.pool_weights(cfg)
    for start in (0, 37):
        shares = torch.randint(0, 3, (s, count), generator=gen).float()
        layout = Layout(cfg, s, CPU, torch.full((1, s), start))
        shares *= layout.cmp_visible[0]
        rank = index.pool(cfg, shares, layout.n_blocks)
        wanted = index.top_blocks(cfg, rank[None, None], layout.positions, layout.starts)[0, 0].numpy()
        for t in range(start, s):
            picked, row = np.empty(cfg.n_sel, dtype=np.int32), shares[t].contiguous()
            found.pick(t, start // 16, 16, 4, weights.numpy(), row.data_ptr(), 0, count, picked)
            assert picked.tolist() == wanted[t].tolist(), t


def test_extremes_stay_what_they_are() -> None:
    """Scores of thousands are softmaxed exactly, closed gates take no part, and what is no number is not hidden."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 90, n, 16) for n in (4, 2, 2))
    gates = torch.rand(1, 90, 4, 3)
    layout = Layout(CHOOSY, 90, CPU, None)
    kc, vc = (x[:, : layout.n_cmp] for x in (k, v))

    def attended(q: Tensor, gates: Tensor) -> Tensor:
        return fused.mixed(q, (kc, k, k), (vc, v, v), gates, layout)

    gates[:, 50] = 0
    high = (q * 3000).requires_grad_()
    y = attended(high, gates)
    (dq,) = torch.autograd.grad(y.sum(), high)
    assert y.isfinite().all()
    assert dq.isfinite().all()
    assert not y[:, 50].any()
    broken = q.clone()
    broken[0, 20, 3, 5] = torch.nan
    y = attended(broken, gates)
    assert y[0, 20, 3].isnan().all()
    assert y.isnan().sum() == 16


def test_powers_of_two_are_right_to_the_last_bit_but_one() -> None:
    """All the way down to where they end; below it they are 0, and what is no number stays so."""
    rows = importlib.import_module("uvcc_engine.nsa.loops.float_rows")
    power = rows.row_powers

    @numba.njit
    def run(address: int, vectors: int) -> float:
        return power(address, vectors, np.float32(0))

    x = np.linspace(-140, 0, 40_016, dtype=np.float32)  # a number of vectors that four do not divide
    x[-2:] = np.nan, -np.inf
    y = x.copy()
    assert np.isnan(run(y.ctypes.data, len(y) // 16))
    whole = x[:-2].astype(np.float64)
    normal = whole >= -126
    assert np.abs(y[:-2][normal] / np.exp2(whole[normal]) - 1).max() < 1.2e-7
    assert not y[:-2][whole < -127].any()
    assert np.isnan(y[-2])
    assert y[-1] == 0


def test_a_step_on_tensors_without_bytes_asks_no_loop() -> None:
    """As the plan counts the memory that a rank will need."""
    cfg = ModelConfig(vocab=16, dim=32, n_layers=1, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, nsa=CHOOSY)
    forget()
    try:
        with FakeTensorMode():
            model = LanguageModel(cfg)
            tokens = torch.zeros(1, 150, dtype=torch.int64)
            loss = model(tokens, labels=tokens)
            loss.backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    finally:
        forget()


def test_it_serves_where_loops_can_be_had_and_threads_have_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FROM", 256)
    cfg, long = ModelConfig(), 2048
    assert route_of(cfg, long, CPU) == {"cmp": "fused", "sel": "fused", "win": "fused"}
    assert route_of(cfg, 512, CPU) == {"cmp": "fused", "sel": "dense", "win": "fused"}
    for other in (
        route_of(cfg, 255, CPU),
        route_of(cfg, long, CPU, torch.float64),
        route_of(cfg, long, CPU, torch.bfloat16),
        route_of(ModelConfig(d_k=40), long, CPU),
        route_of(ModelConfig(nsa=NSAConfig(l=8, d=8, l_sel=24)), long, CPU),
    ):
        assert "fused" not in other.values()
    dispatch.force("chunked")
    assert set(route_of(cfg, long, CPU).values()) == {"chunked"}
    dispatch.force("fused")  # where it does not serve
    assert set(route_of(cfg, long, CPU, torch.float64).values()) == {"chunked"}
    dispatch.force(None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert set(route_of(cfg, long, CPU).values()) == {"chunked"}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert "fused" in route_of(cfg, long, CPU).values()
    monkeypatch.setattr(loops, "found", lambda: None)
    assert set(route_of(cfg, long, CPU).values()) == {"chunked"}


def test_without_a_compiler_or_a_fused_multiplication_there_are_no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    known = loops.found.__wrapped__
    monkeypatch.setattr(loops, "is_x86", lambda: True)
    monkeypatch.setattr(loops, "compiler_knows", lambda features: "+fma" not in features)
    assert known() is None
    monkeypatch.setattr(loops.importlib.util, "find_spec", lambda name: None)
    assert known() is None


_NARROW = """
import torch
from nsa_kit import results, small_layer
from uvcc_engine.nsa import fused
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.loops import tile_products
assert not tile_products.WIDE
torch.set_num_threads(1)
fused.FROM = 1
widths = dict(n_heads=6, n_kv_groups=2, d_k=32, d_v=16)
nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=40)
layer, exact = small_layer(nsa, **widths).float(), small_layer(nsa, **widths)
x = torch.randn(1, 110, 24)
ours = results("fused", layer, x.clone().requires_grad_(), None)
for a, b in zip(ours, results("masked", exact, x.double().requires_grad_(), None), strict=True):
    torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5 * float(b.abs().max()))
"""


@pytest.mark.ci(__file__)
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names an x86-64 processor")
def test_a_processor_with_narrow_vectors_has_the_same_results() -> None:
    env = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+sse4.2"}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
    done = subprocess.run([sys.executable, "-c", _NARROW], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

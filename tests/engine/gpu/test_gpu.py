"""On a real GPU: the bits of the CPU's secret sharing, and attention that agrees with double precision on every path.

Without one these are skipped with that reason; Triton's interpreter runs the same kernels everywhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # of other files, which are collected beside this one
pytest.importorskip("triton")

from uvcc_engine.bench import nsa as bench_nsa
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sample_text import load_text
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model.definition.specs import ModelSpec, find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels import triton_ops
from uvcc_engine.mpc.kernels.cuda import CudaKernels
from uvcc_engine.mpc.kernels.gemm import limbs
from uvcc_engine.mpc.kernels.layout import wire_dtype
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.nsa import decode, dispatch, flex, masked
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.fixed_decode import FixedDecoder
from uvcc_engine.nsa.index import as_mask, top_blocks
from uvcc_engine.nsa.kernels import gather, launch
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.nsa.visibility import Layout
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors
from uvcc_engine.simulate.fitting import party_inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU and Triton"
    ),
]
GPU = torch.device("cuda")
PLAIN, CUDA = PlainKernels(), CudaKernels()


def ring(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    edge = torch.tensor([2**63 - 1, -1, 0, -(2**63)])
    x.view(-1)[:4] = edge[: x.numel()]
    return x


def on_gpu(xs: list[Tensor]) -> list[Tensor]:
    return [x.to(GPU) for x in xs]


@pytest.fixture(autouse=True)
def _routes_by_itself() -> Iterator[None]:
    yield
    dispatch.force(None)


def test_elementwise_kernels_have_the_cpu_s_bits() -> None:
    a, b, c, d = (ring(100_003, seed=i) for i in range(4))
    assert torch.equal(CUDA.mul(on_gpu([a, b]), on_gpu([c, d])).cpu(), PLAIN.mul([a, b], [c, d]))
    for factor in (1, 7, -3, 2**40 + 1):
        assert torch.equal(CUDA.blind(a.to(GPU), factor, *on_gpu([b, c])).cpu(), PLAIN.blind(a, factor, b, c))
    for s in (1, 13, 16, 32, 38):
        k, m, low = (ring(100_003, seed=i).to(wire_dtype(s)) for i in range(3))
        z, left, right = on_gpu([a, b, c])
        pairs = [
            (CUDA.truncate_deal(z, left, right, *on_gpu([k, m, low]), s), PLAIN.truncate_deal(a, b, c, k, m, low, s)),
            (
                CUDA.truncate_deal_own(z, left, *on_gpu([torch.stack([k, m]), low, k]), s),
                PLAIN.truncate_deal_own(a, b, torch.stack([k, m]), low, k, s),
            ),
            (CUDA.truncate_open(z, left, right, *on_gpu([k, m]), s), PLAIN.truncate_open(a, b, c, k, m, s)),
            (CUDA.truncate_open(z, left, *on_gpu([low, k, m]), s, s), PLAIN.truncate_open(a, b, low, k, m, s, s)),
            ((CUDA.truncate_close(z, *on_gpu([k, m]), s),), (PLAIN.truncate_close(a, k, m, s),)),
        ]
        for found, expected in pairs:
            for x, y in zip(found, expected, strict=True):
                assert torch.equal(x.cpu(), y), s


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (33, 20, 40), (17, 8, 8), (128, 784, 128), (256, 256, 10), (200, 4096, 264)]
)
def test_products_have_the_cpu_s_bits(m: int, k: int, n: int) -> None:
    xs, ys = [ring(m, k, seed=i) for i in range(2)], [ring(k, n, seed=i + 5) for i in range(2)]
    expected = xs[0] @ ys[0] + xs[1] @ ys[1]
    assert torch.equal(CUDA.right_factor(on_gpu(ys), m)(on_gpu(xs)).cpu(), expected)
    turned = [y.t().contiguous().t() for y in on_gpu(ys)]
    assert torch.equal(CUDA.right_factor(turned, m)(on_gpu(xs)).cpu(), expected)
    assert torch.equal(triton_ops.gemm64(xs[0].to(GPU), ys[0].to(GPU)).cpu(), xs[0] @ ys[0])


def test_byte_products_wrap_at_the_largest_inner_size() -> None:
    assert limbs.has_fast_bytes(GPU)
    x, y = (torch.full(shape, -(2**63) + 0x7F, dtype=torch.int64) for shape in ((32, 1 << 15), (1 << 15, 8)))
    assert torch.equal(CUDA.right_factor([y.to(GPU)], 32)([x.to(GPU)]).cpu(), x @ y)


def test_the_key_stream_is_the_library_s() -> None:
    key, nonce = bytes(range(200, 232)), bytes(range(100, 112))
    for block, nbytes in ((0, 64), (5, 1000), (2**32 - 300, 64 * 300), (7, 64 * 5000)):
        out = torch.empty(nbytes, dtype=torch.uint8, device=GPU)
        triton_ops.chacha20(key, nonce, block, out)
        cipher = Cipher(algorithms.ChaCha20(key, block.to_bytes(4, "little") + nonce), mode=None).encryptor()
        assert out.cpu().numpy().tobytes() == cipher.update(bytes(nbytes))


@pytest.mark.parametrize("verify", ["off", "proofs"])
@pytest.mark.parametrize("model", ["logistic-digits", "mlp-digits", "cnn-digits", "gpt-tiny"])
def test_a_private_training_has_the_cpu_s_bits(model: str, verify: str) -> None:
    values = {"model": model, "steps": 2, "batch": 8, "test_rows": 16, "checkpoint_every": 1, "verify": verify}
    job = PrivateJob.from_json(values)
    spec = find_model(model)
    text = spec.positions > 1
    data = load_text(job.seed, 16, spec.positions) if text else load_digits(job.seed, 16)
    inputs = party_inputs(dataset_tensors(data, job.frac_bits, job), job.frac_bits)
    found = [_trained(job, spec, inputs, device) for device in (torch.device("cpu"), GPU)]
    assert found[0] == found[1]
    assert found[0][0][0][0] is not None


def _trained(job: PrivateJob, spec: ModelSpec, inputs: list[PartyInputs], device: torch.device) -> list[Any]:
    """Losses, digests of the weights and messages of the three parties, with masks that both devices can draw."""
    planes = LocalPlanes(3, device=device, prg="chacha20")

    def body(rt: Runtime) -> Any:
        trainer = PrivateTrainer(rt, job, spec, inputs[rt.party])
        losses = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            losses.append(trainer.step(step).loss)
        return losses, [trainer.component_digest(c, b"blind") for c in ("first", "second")], rt.messages

    return planes.run_three(body)


@pytest.mark.parametrize("path", ["masked", "chunked", "flex", "triton"])
@pytest.mark.parametrize("s", [75, 640])
def test_attention_agrees_with_double_precision(path: str, s: int) -> None:
    """Outputs and gradients of one layer of M7C's shape in float32, of one and of several documents."""
    cfg = replace(ModelConfig(n_layers=1), nsa=replace(ModelConfig().nsa, n_sel=4))
    torch.manual_seed(0)
    layer = NSAttention(cfg).to(GPU)
    x = torch.randn(2, s, cfg.dim, device=GPU)
    twice = NSAttention(cfg).to(GPU).double()
    twice.load_state_dict(layer.state_dict())
    for starts in (None, _starts(s)):
        exact = _answers("masked", twice, x.double(), starts)
        _agree(_answers(path, layer, x, starts), exact, 5e-4)


@pytest.mark.parametrize("way", ["flex", "triton"])
def test_the_branches_agree_in_the_16_bits_of_a_training(way: str) -> None:
    """Each branch by itself, and all paths with the same chosen blocks: a rounding may choose others."""
    cfg, s = ModelConfig().nsa, 2000
    layout = Layout(cfg, s, GPU, _starts(s))
    torch.manual_seed(1)
    n = layout.n_cmp
    low = [_random(s, 12), *(_random(count, 2) for count in (n, n, s, s, s, s))]
    high = [one.detach().double().requires_grad_() for one in low]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = high
    o_cmp, p = masked.compressed(q, k_cmp, v_cmp, layout.cmp_bias(6))
    chosen = top_blocks(cfg, masked.importance(cfg, p, layout.n_blocks), layout.positions, layout.starts)
    o_sel = masked.selected(q, k_sel, v_sel, as_mask(chosen, layout.n_blocks), layout)
    exact = [o_cmp, o_sel, masked.window(q, k_win, v_win, layout)]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = low
    if way == "flex":
        o_cmp, o_sel = flex.compressed(q, k_cmp, v_cmp, layout)[0], flex.selected(q, k_sel, v_sel, chosen, layout)
        o_win = flex.window(q, k_win, v_win, layout)
    else:
        o_cmp, o_win, _ = launch.compressed_and_window(q, k_cmp, v_cmp, k_win, v_win, layout)
        o_sel = gather.selected(q, k_sel, v_sel, chosen, layout)
    found, seen = [o_cmp, o_sel, o_win], layout.cmp_visible.any(-1)[..., None, None]
    found[0], exact[0] = found[0] * seen, exact[0] * seen  # rows that see no block hold anything finite
    weight = torch.sin(torch.arange(o_sel.numel(), device=GPU, dtype=torch.float64)).view_as(o_sel)
    ours = torch.autograd.grad(sum((o * weight.to(o.dtype)).sum() for o in found), low)
    theirs = torch.autograd.grad(sum((o * weight).sum() for o in exact), high)
    _agree([*found, *ours], [*exact, *theirs], 2e-2)


@pytest.mark.parametrize("path", ["masked", "flex", "triton"])
def test_a_model_learns_in_16_bits(path: str) -> None:
    """Two of M7C's layers under autocast, as its training runs them, beside the same in 32 bits."""
    torch.manual_seed(2)
    model = LanguageModel(ModelConfig(vocab=256, n_layers=2)).to(GPU)
    tokens = torch.randint(0, 256, (2, 1101), device=GPU)
    dispatch.force("masked")
    exact = float(model(tokens[:, :-1], None, labels=tokens[:, 1:]).detach())
    dispatch.force(path)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens[:, :-1], None, labels=tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - exact) < 2e-2 * exact
    assert losses[2] < losses[1] < losses[0]


def _random(n: int, heads: int) -> Tensor:
    return torch.randn(1, n, heads, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)


def _agree(found: Sequence[Tensor], exact: Sequence[Tensor], allowed: float) -> None:
    scale = max(float(one.detach().norm()) for one in exact)
    for ours, theirs in zip(found, exact, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-3 * scale))
        assert error < allowed, (tuple(ours.shape), error)


def _starts(s: int) -> Tensor:
    cut = s // 3
    first = torch.zeros(1, s, dtype=torch.int64, device=GPU)
    first[:, cut:] = cut
    return first


def _answers(path: str, layer: NSAttention, x: Tensor, starts: Tensor | None) -> list[Tensor]:
    dispatch.force(path)
    x = x.detach().requires_grad_()
    y = layer(x, starts)[0]
    weight = torch.sin(torch.arange(y.numel(), device=GPU, dtype=torch.float64)).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), (x, *layer.parameters()))]


def test_the_pod_s_own_check_passes_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uvcc_engine.cli", "selftest", "--full", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "triton" in json.dumps(said)


def test_a_recorded_step_gives_what_growing_caches_give() -> None:
    torch.manual_seed(1)
    model = LanguageModel(ModelConfig(vocab=64, dim=128, n_layers=2, n_heads=4, n_kv_groups=2, d_k=32, d_v=32))
    model = model.to(GPU).eval()
    tokens = torch.randint(0, 64, (2, 1100), device=GPU)
    _, growing = decode.prefill(model, tokens[:, :1000])
    fixed = FixedDecoder(model, growing, 100, graph=True)
    for t in range(1000, 1100):
        wanted = decode.step(model, growing, tokens[:, t])
        torch.testing.assert_close(fixed.step(tokens[:, t]), wanted, rtol=1e-3, atol=1e-3)


def test_the_benchmark_of_decoding_replays_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_nsa.TOKENS, "s", 4096)
    found = bench_nsa.decoding("decode_s", GPU, 2)
    assert found.value > 0
    assert found.ratio

"""The CUDA kernels in Triton's interpreter: the bits of the plain kernels. Skipped where Triton is not installed."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from uvcc_engine.mpc.kernels import cuda, triton_ops
from uvcc_engine.mpc.kernels.cuda import CudaKernels
from uvcc_engine.mpc.kernels.gemm import limbs
from uvcc_engine.mpc.kernels.layout import wire_dtype
from uvcc_engine.mpc.kernels.plain import PlainKernels

pytestmark = pytest.mark.usefixtures("quick_triton")
PLAIN, CUDA = PlainKernels(), CudaKernels()


def random(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    edge = torch.tensor([2**63 - 1, -1, 0, -(2**63)])
    x.view(-1)[:4] = edge[: x.numel()]
    return x


def test_elementwise_kernels() -> None:
    a, b, c, d = (random(1500, seed=i) for i in range(4))
    assert torch.equal(CUDA.mul([a, b], [c, d]), PLAIN.mul([a, b], [c, d]))
    assert torch.equal(CUDA.mul([a], [c]), PLAIN.mul([a], [c]))
    for factor in (1, 7, -3, 2**40 + 1):
        assert torch.equal(CUDA.blind(a, factor, b, c), PLAIN.blind(a, factor, b, c))


@pytest.mark.parametrize("s", [1, 13, 16, 32, 38])
def test_truncation_kernels(s: int) -> None:
    z, left, right, a, b = (random(1100, seed=i) for i in range(5))
    k, m, low = (random(1100, seed=i).to(wire_dtype(s)) for i in range(3))
    own = (z, left, torch.stack([k, m]), low, k, s)
    pairs = [
        (CUDA.truncate_deal(z, left, right, k, m, low, s), PLAIN.truncate_deal(z, left, right, k, m, low, s)),
        (CUDA.truncate_deal_own(*own), PLAIN.truncate_deal_own(*own)),
        (CUDA.truncate_open(z, a, b, k, m, s), PLAIN.truncate_open(z, a, b, k, m, s)),
        (CUDA.truncate_open(z, a, low, k, m, s, s), PLAIN.truncate_open(z, a, low, k, m, s, s)),
        ((CUDA.truncate_close(z, k, m, s),), (PLAIN.truncate_close(z, k, m, s),)),
    ]
    for found, expected in pairs:
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (33, 20, 40), (64, 9, 7)])
def test_the_plain_product(m: int, k: int, n: int) -> None:
    a, b = random(m, k), random(k, n, seed=1)
    assert torch.equal(triton_ops.gemm64(a, b), a @ b)


def test_products_in_byte_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = [random(40, 32, seed=i) for i in range(2)], [random(32, 16, seed=i + 5) for i in range(2)]
    left, right = triton_ops.split_left(xs), triton_ops.split_right(ys)
    assert torch.equal(left.view(40, -1), limbs.split_left(torch.cat(xs, 1)))
    assert torch.equal(right.view(16, -1).t(), limbs.split_right(torch.cat(ys)))
    monkeypatch.setattr(cuda, "LIMBS_FROM", 1)
    monkeypatch.setattr(limbs, "has_fast_bytes", lambda device: True)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.to(torch.int32) @ b.to(torch.int32))
    assert torch.equal(CUDA.right_factor(ys, 40)(xs), xs[0] @ ys[0] + xs[1] @ ys[1])
    assert limbs.blocks([32, 32], 48) == [[(0, 0, 32), (1, 0, 16)], [(1, 16, 32)]]
    monkeypatch.setattr(limbs, "blocks", functools.partial(limbs.blocks, most=48))
    assert torch.equal(CUDA.right_factor(ys, 40)(xs), xs[0] @ ys[0] + xs[1] @ ys[1])
    assert torch.equal(CUDA.right_factor(ys, 40)([x[:8] for x in xs]), xs[0][:8] @ ys[0] + xs[1][:8] @ ys[1])


def test_products_over_leading_axes() -> None:
    x, y = random(2, 3, 5, 4), random(3, 4, 6, seed=2)
    assert torch.equal(CUDA.right_factor([y], 0)([x]), x @ y)


@pytest.mark.ci(__file__)
def test_key_stream_equals_the_library_s() -> None:
    key, nonce = bytes(range(32)), bytes(range(100, 112))
    for block, nbytes in ((0, 64), (5, 1000), (2**32 - 300, 64 * 300), (7, 9000)):
        out = torch.empty(nbytes, dtype=torch.uint8)
        triton_ops.chacha20(key, nonce, block, out)
        cipher = Cipher(algorithms.ChaCha20(key, block.to_bytes(4, "little") + nonce), mode=None).encryptor()
        assert out.numpy().tobytes() == cipher.update(bytes(nbytes))

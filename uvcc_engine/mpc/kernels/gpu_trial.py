"""``python -m uvcc_engine.mpc.kernels.gpu_trial``: compile a GPU's kernels before a step needs them; try their bits.

Triton keeps what it compiled on the pod's disk, where every worker finds it. Each kernel is called on lengths that are
multiples of 16 and on others, which Triton compiles apart, and has to give what the processor's plain kernels give.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.mpc.kernels import choose
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.gemm import limbs
from uvcc_engine.mpc.kernels.layout import wire_dtype
from uvcc_engine.mpc.kernels.plain import PlainKernels

LENGTHS = (1024, 1037)
SHIFTS = (16, 26, 40)  # a wire form each
_WHOLE = 512  # the side of a product that 8-bit units take
KernelTrial = tuple[str, Callable[[Kernels, torch.device], list[Tensor]]]


def trials(whole: int = _WHOLE) -> Iterator[KernelTrial]:
    """What is tried: a name, and what gives its results by some kernels on their device."""
    for n in LENGTHS:
        a, b, c, d = (_random(n, seed) for seed in range(4))
        yield f"mul {n}", _on(lambda k, a, b, c, d: [k.mul([a], [b]), k.mul([a, b], [c, d])], a, b, c, d)
        yield f"blind {n}", _on(lambda k, a, b, c: [k.blind(a, 3, b, c)], a, b, c)
        for s in SHIFTS:
            yield f"truncate by {s} {n}", _truncated(s, n)
    for m, k, n in ((64, 64, 64), (33, 20, 9)):
        x, y = _random(m * k, 5).view(m, k), _random(k * n, 6).view(k, n)
        yield f"product {m} {k} {n}", _on(lambda kernels, x, y: [kernels.right_factor([y], x.shape[0])([x])], x, y)
        stacked = x.expand(2, m, k).contiguous(), y.expand(2, k, n).contiguous()
        yield f"products {m} {k} {n}", _on(lambda kernels, x, y: [kernels.right_factor([y], 0)([x])], *stacked)
    x, y = (_random(whole * whole, seed).view(whole, whole) for seed in (7, 8))
    yield f"product {whole}", _on(lambda kernels, x, y: [kernels.right_factor([y], whole)([x])], x, y)


def _on(by: Callable[..., list[Tensor]], *given: Tensor) -> Callable[[Kernels, torch.device], list[Tensor]]:
    return lambda kernels, device: by(kernels, *[x.to(device, copy=True) for x in given])


def _truncated(s: int, n: int) -> Callable[[Kernels, torch.device], list[Tensor]]:
    whole = [_random(n, seed) for seed in range(5)]
    narrow = [_random(n, seed).to(wire_dtype(s)) for seed in range(3)]

    def by(kernels: Kernels, *given: Tensor) -> list[Tensor]:
        z, left, right, a, b, k, m, low = given
        dealt = (
            *kernels.truncate_deal(z, left, right, k, m, low, s),
            *kernels.truncate_deal_own(z, left, torch.stack([k, m]), low, k, s),
        )
        opened = *kernels.truncate_open(z, a, b, k, m, s), *kernels.truncate_open(z, a, low, k, m, s, s)
        return [*dealt, *opened, kernels.truncate_close(z, k, m, s)]

    return _on(by, *whole, *narrow)


def _random(n: int, seed: int) -> Tensor:
    x = torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))
    x[:4] = torch.tensor([2**63 - 1, -1, 0, -(2**63)])
    return x


def key_stream_holds(device: torch.device) -> bool:
    """Whether the GPU's ChaCha20 gives the library's bytes, of whole blocks and of others."""
    from uvcc_engine.mpc.kernels.triton_ops import chacha20

    key, nonce = bytes(range(32)), bytes(range(12))
    for nbytes in (64 * 130, 9000):
        out = torch.empty(nbytes, dtype=torch.uint8, device=device)
        chacha20(key, nonce, 0, out)
        wanted = Cipher(algorithms.ChaCha20(key, bytes(4) + nonce), mode=None).encryptor().update(bytes(nbytes))
        if out.cpu().numpy().tobytes() != wanted:
            return False
    return True


def wrong(device: torch.device, whole: int = _WHOLE) -> list[str]:
    """The names of the kernels whose bits on the device are not the processor's."""
    kernels, plain, host = choose.kernels_for(device), PlainKernels(), torch.device("cpu")
    found = [
        name
        for name, by in trials(whole)
        if any(not torch.equal(x.cpu(), y) for x, y in zip(by(kernels, device), by(plain, host), strict=True))
    ]
    return found if key_stream_holds(device) else [*found, "key stream"]


def main(argv: Sequence[str] = ()) -> int:
    """One JSON object: ``ok``, and ``kernels_s`` that it took or ``error``. Exit code 1 if a kernel is wrong."""
    began = time.monotonic()
    try:
        device = choose.device_for("cuda")
        limbs.has_fast_bytes(device)
        failed = wrong(device)
        error = f"wrong bits from {', '.join(failed)}" if failed else ""
    except UvccError as why:
        error = why.what
    except Exception as why:  # noqa: BLE001  # a broken compiler or driver raises whatever it likes: told all the same
        error = f"{type(why).__name__}: {why}"
    took = round(time.monotonic() - began, 2)
    print(json.dumps({"ok": False, "error": error[:300]} if error else {"ok": True, "kernels_s": took}))
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``uvcc-engine selftest``: proves on this very device that attention is right. Minutes with ``--full``.

What the older GPU validation meant to check and did not: it looked at range ends only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.nsa import decode, dispatch
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.nsa.rope import rope_tables, rotate

SHAPE = ModelConfig(
    vocab=64,
    dim=96,
    n_layers=2,
    n_heads=6,
    n_kv_groups=1,
    d_k=16,
    d_v=16,
    nsa=NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=48),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finished check."""

    name: str
    ok: bool
    detail: str
    seconds: float


def usable_paths(device: torch.device) -> list[str]:
    """The attention paths that run here; the kernels only where they are compiled (their interpreter takes minutes)."""
    kernels = device.type == "cuda" and dispatch.has_triton()
    return ["masked", "chunked", "flex", *(["triton"] if kernels else [])]


@contextmanager
def _on(path: str) -> Iterator[None]:
    dispatch.force(path)
    try:
        yield
    finally:
        dispatch.force(None)


def causality(device: torch.device, rows: int) -> str:
    """Edit token j: every logit before j must keep its bits, on every path. Random and block-edge j."""
    paths = usable_paths(device)
    for path in paths:
        with _on(path):
            found = _edits(device, rows, path)
    return f"{found} on each of {', '.join(paths)}"


def _edits(device: torch.device, rows: int, path: str) -> str:
    torch.manual_seed(1)
    model = LanguageModel(SHAPE).to(device).eval()
    gen = torch.Generator().manual_seed(1)
    s = 5 * SHAPE.nsa.l_sel + 3
    tokens = torch.randint(0, 64, (1, s), generator=gen)
    edges = [1, SHAPE.nsa.l - 1, SHAPE.nsa.l, SHAPE.nsa.l_sel - 1, SHAPE.nsa.l_sel, 3 * SHAPE.nsa.l_sel, s - 1]
    places = edges + torch.randint(1, s, (rows,), generator=gen).tolist()
    with torch.no_grad():
        base = model(tokens.to(device))
        for j in places:
            edited = tokens.clone()
            edited[0, j] = (edited[0, j] + 1) % 64
            out = model(edited.to(device))
            if not torch.equal(out[:, :j], base[:, :j]):
                raise AssertionError(f"editing token {j} changed an earlier output on the {path} path")
            if torch.equal(out[:, j], base[:, j]):
                raise AssertionError(f"editing token {j} did not change its own output: the check would see nothing")
    return f"{len(places)} edits of {s} tokens"


def agreement(device: torch.device, rows: int) -> str:
    """Every path gives the masked one's logits and gradients (float32; FlexAttention has no gradients on a CPU).

    Raises AssertionError if not.
    """
    torch.manual_seed(7)
    model = LanguageModel(replace(SHAPE, n_layers=1)).to(device)
    tokens = torch.randint(0, 64, (2, 163), generator=torch.Generator().manual_seed(7)).to(device)
    found: dict[str, list[Tensor]] = {}
    for path in usable_paths(device):
        learns = path != "flex" or device.type != "cpu"
        with _on(path), torch.set_grad_enabled(learns):
            logits = model(tokens)
            found[path] = [logits.detach()]
            if learns:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
                found[path] += torch.autograd.grad(loss, list(model.parameters()))
    worst = 0.0
    for path, ours in found.items():
        for a, b in zip(ours, found["masked"], strict=False):
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)))
        if worst > 1e-3:
            raise AssertionError(f"the {path} path differs from the masked one by {worst:.1e}")
    return f"{', '.join(found)}: worst relative difference {worst:.1e}"


def prefill_is_decode(device: torch.device, rows: int) -> str:
    """Feeding tokens one by one gives the logits of feeding them at once. Raises AssertionError if not."""
    model = LanguageModel(SHAPE).to(device).double().eval()
    tokens = torch.randint(0, 64, (1, 150 + rows), generator=torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        whole = model(tokens)
        state, worst = decode.start(model, 1), 0.0
        for t in range(tokens.shape[1]):
            worst = max(worst, float((decode.step(model, state, tokens[:, t]) - whole[:, t]).abs().max()))
    if worst > 1e-8:
        raise AssertionError(f"decode differs from prefill by {worst:.2e}")
    return f"{tokens.shape[1]} tokens, worst {worst:.1e}"


def rope_shift(device: torch.device, rows: int) -> str:
    """Scores depend on the distance of two positions, whatever the shift. Raises AssertionError if not."""
    q, k = torch.randn(2, 64, dtype=torch.float64, device=device, generator=_gen(device, 3))

    def dot(i: int, j: int) -> float:
        turned = [
            rotate(x, rope_tables(torch.tensor(p, device=device), 64, base=1e4, scale=1.0, dtype=torch.float64))
            for x, p in ((q, i), (k, j))
        ]
        return float(turned[0] @ turned[1])

    worst = max(abs(dot(10 + shift, 5 + shift) - dot(10, 5)) for shift in (1, 100, 4096))
    if worst > 1e-9:
        raise AssertionError(f"scores move by {worst:.2e} under a common shift")
    return f"worst {worst:.1e}"


def gradients(device: torch.device, rows: int) -> str:
    """Autograd against central differences in float64, for parameters of all three branches.

    Raises AssertionError if they differ.
    """
    torch.manual_seed(4)
    model = LanguageModel(replace(SHAPE, n_layers=1, dim=24)).to(device).double()
    tokens = torch.randint(0, 64, (1, 70), generator=torch.Generator().manual_seed(4)).to(device)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    loss().backward()  # type: ignore[no-untyped-call]
    worst, h = 0.0, 1e-4
    names = ("project_in.weight", "phi_k.up.weight", "phi_k.position", "phi_v.down.weight", "gate.weight")
    with torch.no_grad():
        for name in names:
            p = model.get_parameter(f"blocks.0.attention.{name}")
            assert p.grad is not None
            flat, grad = p.view(-1), p.grad.view(-1)
            i = int(grad.abs().argmax())
            keep = float(flat[i])
            sides = []
            for sign in (1, -1):
                flat[i] = keep + sign * h
                sides.append(float(loss()))
            flat[i] = keep
            numeric = (sides[0] - sides[1]) / (2 * h)
            worst = max(worst, abs(numeric - float(grad[i])) / max(1e-8, abs(numeric)))
    if worst > 1e-4:
        raise AssertionError(f"relative error {worst:.1e}")
    return f"{len(names)} parameters, worst relative error {worst:.1e}"


def needle(device: torch.device, rows: int) -> str:
    """A value far outside the window must be found again after a short training. Raises AssertionError if it is not."""
    torch.manual_seed(6)
    cfg = replace(SHAPE, vocab=16, dim=48, n_heads=4, n_kv_groups=2, nsa=NSAConfig(l=4, d=4, l_sel=4, n_sel=5, w=4))
    model = LanguageModel(cfg).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(6)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        text = torch.zeros(n, 32, dtype=torch.int64)
        where, value = torch.randint(0, 20, (n,), generator=gen), torch.randint(1, 13, (n,), generator=gen)
        at = torch.arange(n)
        text[at, where], text[at, where + 1], text[:, -1] = 13, value, 14
        return text.to(device), value.to(device)

    for _ in range(220 + rows):
        text, value = batch(48)
        optimizer.zero_grad()
        F.cross_entropy(model(text)[:, -1], value).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    text, value = batch(400)
    with torch.no_grad():
        hit = float((model(text)[:, -1].argmax(-1) == value).float().mean())
    if hit < 0.9:
        raise AssertionError(f"found {hit:.0%} of the needles")
    return f"found {hit:.0%} of 400"


def _gen(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


QUICK: dict[str, Callable[[torch.device, int], str]] = {
    "causality": causality,
    "paths": agreement,
    "prefill = decode": prefill_is_decode,
    "rope shift": rope_shift,
    "gradients": gradients,
}
FULL = {**QUICK, "needle": needle}


def run(device: torch.device, *, full: bool) -> list[Check]:
    """Every check, none skipped because an earlier one failed."""
    found = []
    for name, check in (FULL if full else QUICK).items():
        began = time.perf_counter()
        try:
            ok, detail = True, check(device, 100 if full else 8)
        except AssertionError as e:
            ok, detail = False, str(e)
        found.append(Check(name, ok, detail, time.perf_counter() - began))
    return found


def main(argv: Sequence[str]) -> int:
    """Exit code 0 only if all checks hold."""
    parser = RaisingParser(prog="uvcc-engine selftest", description="prove attention on this device")
    parser.add_argument("--full", action="store_true", help="more edits, and a needle to be found after a training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    checks = run(torch.device(args.device), full=args.full)
    if args.json:
        json.dump([{"name": c.name, "ok": c.ok, "detail": c.detail, "seconds": c.seconds} for c in checks], sys.stdout)
        print()
    else:
        for c in checks:
            print(f"{'ok    ' if c.ok else 'FAILED'} {c.name:<18} {c.detail} ({c.seconds:.1f} s)")
    return 0 if all(c.ok for c in checks) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))

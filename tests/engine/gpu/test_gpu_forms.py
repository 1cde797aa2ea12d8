"""On a real GPU: what is chosen there and nowhere else. Masks that a second stream draws, kernels whose tiles the
device's own unit copies, masks of edge tiles alone, and the trial of kernels that preflight runs on a pod.

Without a GPU these are skipped with that reason; elsewhere an interpreter or a fake device stands for it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # of other files, which are collected beside this one
pytest.importorskip("triton")

from uvcc_engine.bench.timing import nsa_tiles
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.drawn_beside import DrawBeside
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, share_of, split
from uvcc_engine.mpc.products.arithmetic import matmul_protocol
from uvcc_engine.nsa import masked
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.index import top_blocks
from uvcc_engine.nsa.kernels import descriptors, gather, launch, tiles
from uvcc_engine.nsa.kernels.tiles import Tiles
from uvcc_engine.nsa.visibility import Layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU and Triton"
    ),
]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _chooses_by_itself() -> Iterator[None]:
    yield
    for kernel in tiles.KERNELS:
        tiles.force(kernel, None)


def test_preflight_s_trial_of_the_kernels_passes_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uvcc_engine.mpc.kernels.gpu_trial"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ok"]
    assert said["kernels_s"] > 0


def test_a_second_stream_gives_the_parties_the_same_shares() -> None:
    def trained(aheads: Sequence[DrawBeside | None]) -> tuple[list[list[Share]], list[Runtime]]:
        planes, keys = LocalPlanes(), rehearsal_keys(0)
        planes.runtimes = [
            Runtime(p, planes.planes[p], keys[p], b"s" * 32, prg="chacha20", ahead=aheads[p], device=GPU)
            for p in range(3)
        ]
        parts = split(torch.linspace(-3, 3, 90_000), 16, random.Random(4).randbytes)

        def steps(rt: Runtime) -> list[Share]:
            found = [share_of(parts, rt.party).to(GPU)]
            for epoch in range(4):
                rt.begin_epoch(epoch)
                weight = found[-1].reshape(300, 300)
                found.append(rt.run(relu_only_protocol(rt, rt.run(matmul_protocol(rt, weight, weight, scale=0.01)))))
            return found

        return planes.run_three(steps), planes.runtimes

    ours, runtimes = trained([DrawBeside(GPU) for _ in range(3)])
    theirs, _ = trained([None] * 3)
    for a, b in ((a, b) for p in range(3) for a, b in zip(ours[p], theirs[p], strict=True)):
        assert torch.equal(a.first, b.first)
        assert torch.equal(a.second, b.second)
    for rt in runtimes:
        assert rt.forecast is not None
        assert rt.forecast.met == 3 * rt.forecast.missed > 0  # of the first epoch everything, of the others nothing


@pytest.mark.parametrize("form", ["tma", "edges", "both"])
@pytest.mark.parametrize("kernel", nsa_tiles.DESCRIBED)
def test_the_other_forms_of_a_kernel_agree_with_the_first(kernel: str, form: str) -> None:
    """Outputs and gradients in 16 bits, of one document and of several."""
    copied, cut = form in ("tma", "both"), form in ("edges", "both")
    if copied and (torch.cuda.get_device_capability()[0] < descriptors.SINCE or not descriptors.there_are()):
        pytest.skip("needs a GPU from sm_90 on, and a Triton with descriptors")
    if cut and kernel not in nsa_tiles.MASKED:
        pytest.skip("this kernel masks every tile")
    for starts in (None, _starts(2000)):
        tiles.force(kernel, Tiles())
        plain = _answers(starts)
        tiles.force(kernel, Tiles(tma=copied, edges=cut))
        for ours, theirs in zip(_answers(starts), plain, strict=True):
            error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
            assert error < 1e-2, (kernel, form, tuple(ours.shape), error)


def _starts(s: int) -> Tensor:
    first = torch.zeros(1, s, dtype=torch.int64, device=GPU)
    first[:, s // 3 :] = s // 3
    return first


def _answers(starts: Tensor | None) -> list[Tensor]:
    """The three branches and all gradients, with chosen blocks that no rounding changes."""
    cfg, s = ModelConfig().nsa, 2000
    layout = Layout(cfg, s, GPU, starts)
    torch.manual_seed(1)
    n = layout.n_cmp
    given = [_random(s, 12), *(_random(count, 2) for count in (n, n, s, s, s, s))]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = given
    _, p = masked.compressed(q, k_cmp, v_cmp, layout.cmp_bias(6))
    chosen = top_blocks(cfg, masked.importance(cfg, p, layout.n_blocks), layout.positions, layout.starts)
    o_cmp, o_win, _ = launch.compressed_and_window(q, k_cmp, v_cmp, k_win, v_win, layout)
    o_cmp = o_cmp * layout.cmp_visible.any(-1)[..., None, None]  # rows that see no block hold anything finite
    found = [o_cmp, gather.selected(q, k_sel, v_sel, chosen, layout), o_win]
    weight = torch.sin(torch.arange(o_win.numel(), device=GPU, dtype=torch.float64)).view_as(o_win).to(o_win.dtype)
    return [*(o.detach() for o in found), *torch.autograd.grad(sum((o * weight).sum() for o in found), given)]


def _random(n: int, heads: int) -> Tensor:
    return torch.randn(1, n, heads, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)

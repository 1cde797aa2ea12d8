"""The kernels in Triton's interpreter, against the float64 oracle, forward and backward. Skipped without Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nsa_kit import SMALL, edits_change_nothing_before, results, small_layer, starts_of

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from uvcc_engine.nsa import blocks, decode, dispatch
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.fixed_decode import FixedDecoder
from uvcc_engine.nsa.index import as_mask, pool, top_blocks
from uvcc_engine.nsa.kernels import band, descriptors, gather, launch, tiles
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.nsa.visibility import Layout

pytestmark = pytest.mark.usefixtures("quick_triton")
WIDE = NSAConfig(l=16, d=8, l_sel=16, n_sel=4, w=40)
ONE_GROUP = {"dim": 12, "n_heads": 3, "n_kv_groups": 1, "d_k": 8, "d_v": 4}


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    for kernel in tiles.KERNELS:
        tiles.force(kernel, tiles.Tiles(rows=32, keys=32))
    yield
    dispatch.force(None)
    for kernel in tiles.KERNELS:
        tiles.force(kernel, None)


@pytest.mark.parametrize(
    ("nsa", "lengths"),
    [
        pytest.param(SMALL, (75,), marks=pytest.mark.ci(__file__)),
        pytest.param(WIDE, (70,), marks=pytest.mark.ci(__file__)),
        pytest.param(SMALL, (50, 3, 26), marks=pytest.mark.ci(__file__)),
        (SMALL, (36, 3, 9)),
    ],
)
def test_outputs_and_gradients_are_those_of_the_oracle(nsa: NSAConfig, lengths: tuple[int, ...]) -> None:
    layer = small_layer(nsa, **ONE_GROUP)
    x = torch.randn(1, sum(lengths), 12, dtype=torch.float64, requires_grad=True)
    starts = starts_of(*lengths)
    for ours, theirs in zip(results("triton", layer, x, starts), results(None, layer, x, starts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.ci(__file__)
def test_groups_rows_and_segments_fall_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, two groups of three heads, segments of 32 queries, one tile to a chunk: against the masked path."""
    monkeypatch.setattr(gather, "SEGMENT", 32)
    monkeypatch.setattr(gather, "CHUNK", 1)
    monkeypatch.setattr(gather, "CHUNK_ROWS", 1)
    layer = small_layer(SMALL)
    x = torch.randn(2, 44, 24, dtype=torch.float64, requires_grad=True)
    for ours, theirs in zip(results("triton", layer, x, None), results("masked", layer, x, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def in_form(*, tma: bool, edges: bool) -> None:
    for kernel in tiles.KERNELS:
        tiles.force(kernel, tiles.Tiles(rows=16, keys=16, tma=tma, edges=edges))


@pytest.mark.ci(__file__)
def test_descriptors_and_masks_of_edges_alone_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of packed documents, the last tiles cut short."""
    from triton.runtime.interpreter import InterpreterBuilder

    copies: list[Any] = []
    whole: list[bool] = []
    load, all_seen = InterpreterBuilder.create_descriptor_load, band.all_seen

    def copied(self: Any, *args: Any) -> Any:
        copies.append(args)
        return load(self, *args)

    def judged(*args: Any) -> Any:
        found = all_seen(*args)
        whole.append(bool(found.handle.data))
        return found

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_load", copied)
    monkeypatch.setattr(band, "all_seen", judged)
    layer = small_layer(NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=40), dim=12, n_heads=1, n_kv_groups=1).float()
    x = torch.randn(1, 71, 12, requires_grad=True)
    found = []
    for other in (False, True):
        in_form(tma=other, edges=other)
        copies.clear()
        found.append(results("triton", layer, x, starts_of(60, 11)))
        assert bool(copies) == other
    assert {True, False} <= set(whole)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_tensors_that_the_copying_unit_cannot_take_are_read_by_pointers() -> None:
    fits = torch.zeros(2, 40, 3, 8, dtype=torch.bfloat16)
    assert descriptors.named(True, 32, fits)[1]
    assert descriptors.named(False, 32, fits) == ([fits], False)
    odd = torch.zeros(2, 40, 3, 12, dtype=torch.bfloat16)[..., 4:]  # heads of 24 bytes, one behind another
    for other in (odd, fits[:1].expand(2, -1, -1, -1), fits.transpose(2, 3), fits[:, :0]):
        assert descriptors.named(True, 32, fits, other) == ([fits, other], False)


@pytest.mark.parametrize(
    ("lengths", "edited"),
    [pytest.param((60,), 47, marks=pytest.mark.ci(__file__)), ((34, 26), 34)],
)
def test_editing_a_token_changes_nothing_before_it(lengths: tuple[int, ...], edited: int) -> None:
    dispatch.force("triton")
    layer = small_layer(SMALL, **ONE_GROUP).float()
    edits_change_nothing_before(layer, sum(lengths), starts_of(*lengths), [edited])


def test_the_streaming_choice_is_the_sorted_one_ties_included() -> None:
    """More blocks than the kernel holds at a time; equal keys make equal scores, which go to the lower block."""
    cfg = NSAConfig(l=4, d=4, l_sel=4, n_sel=5, w=4)
    s, starts = 84, starts_of(72, 12)
    layout = Layout(cfg, s, torch.device("cpu"), starts)
    gen = torch.Generator().manual_seed(1)
    q = torch.randn(1, s, 2, 8, generator=gen, dtype=torch.float64)
    k = torch.randn(1, layout.n_cmp, 1, 8, generator=gen, dtype=torch.float64)
    k[:, 6:14] = k[:, 6:7]
    score = torch.einsum("bshd,bngd->bhsn", q, k) * 8**-0.5
    score = score.masked_fill(~layout.cmp_visible[:, None], -torch.inf)
    lse = score.logsumexp(-1)
    p = (score - lse[..., None].masked_fill(lse[..., None].isinf(), 0)).exp().sum(1, keepdim=True)
    p = pool(cfg, p, layout.n_blocks)
    wanted = top_blocks(cfg, p, layout.positions, layout.starts)
    base_2 = (lse / torch.log(torch.tensor(2.0, dtype=torch.float64))).masked_fill(lse.isinf(), 0).contiguous()
    found = launch.top_blocks_by_kernel(q, k, base_2, layout)
    assert torch.equal(found, wanted)
    assert torch.equal(as_mask(found, layout.n_blocks), blocks.select_blocks(cfg, p, layout.positions, layout.starts))


@pytest.mark.parametrize("prompt", [pytest.param(50, marks=pytest.mark.ci(__file__)), 4])
def test_the_split_kernel_decodes_what_prefill_computes(prompt: int) -> None:
    torch.manual_seed(1)
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=10)
    cfg = ModelConfig(vocab=32, dim=24, n_layers=1, n_heads=6, n_kv_groups=2, d_k=8, d_v=4, nsa=nsa)
    model = LanguageModel(cfg).double().eval()
    tokens = torch.randint(0, 32, (2 if prompt > 4 else 1, 62))
    with torch.no_grad():
        whole = model(tokens)
    dispatch.force(None)
    logits, state = decode.prefill(model, tokens[:, :prompt])
    torch.testing.assert_close(logits, whole[:, prompt - 1], rtol=1e-9, atol=1e-9)
    dispatch.force("triton")
    fixed = FixedDecoder(model, state, 5)  # whose kernels take the number of keys from the device
    for t in range(prompt, prompt + 5):
        torch.testing.assert_close(decode.step(model, state, tokens[:, t]), whole[:, t], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(fixed.step(tokens[:, t]), whole[:, t], rtol=1e-9, atol=1e-9)


SPILLED = {("band.backward_q", 80): 48, ("selection.backward", 80): 80}  # bytes of a thread; none anywhere else
SHARED_OF_SM = 99 << 10  # what every card of either kind has for a block
LONGEST_PROGRAM = 300_000  # bytes, of 32 bits, where every product of a tile is written down; a megabyte takes minutes
SPILLED_OF_32_BITS = {64: 0, 128: 600}  # by the width of a head
WITHOUT_PRODUCTS = {"decode.merge", "selection.combine", "selection.sum_slots", "selection.add_chunks"}


def compiled_kernels(cache: Path, *asked: str) -> list[dict[str, Any]]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("nsa_compile.py")), *asked],
        env={**env, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine
def test_every_kernel_compiles_and_keeps_what_it_holds_in_registers(tmp_path: Path) -> None:
    """Down to machine code for sm_80, sm_90 and sm_100, which takes Triton and its assembler but no GPU; in a process
    of its own. Loads of a loop are asynchronous, those by descriptors the copying unit's, products are the tensor
    cores', and nothing spills but what stands above."""
    kernels = compiled_kernels(tmp_path)
    assert len(kernels) == 3 * (11 + 3) + 2 * 5  # three kernels that mask; five that take descriptors, on two kinds
    for k in kernels:
        name, sm = k["kernel"], k["sm"]
        assert k["spills"] <= SPILLED.get((name, sm), 0), k
        assert k["shared"] <= SHARED_OF_SM, k
        if name in WITHOUT_PRODUCTS:
            continue
        assert (k["bulk"] > 0) == k["tma"], k
        assert k["copies"] > 0 or k["tma"], k
        # a decoding group has 16 rows, a warp group's product 64
        unit = "mma" if name == "decode.split" else {80: "mma", 90: "wgmma", 100: "tcgen05"}[sm]
        assert [u for u in ("mma", "wgmma", "tcgen05") if k[u] > 0] == [unit], k


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_of_32_bits_stay_short(tmp_path: Path) -> None:
    """Which no tensor core multiplies exactly: every product of a tile is written down. With the tiles of 16 bits the
    programs had up to a megabyte and a half, for which the assembler takes minutes, held 14 KB of a thread outside of
    registers, and one of them took twice the memory that a block of most cards may have."""
    kernels = compiled_kernels(tmp_path, "singles")
    assert len(kernels) == 7 + 2 * 2
    for k in kernels:
        assert k["bytes"] <= LONGEST_PROGRAM, k
        assert k["shared"] <= SHARED_OF_SM, k
        assert k["spills"] <= SPILLED_OF_32_BITS[k["width"]], k

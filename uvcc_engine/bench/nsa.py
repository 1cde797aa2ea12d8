"""``bench nsa``: the three branches against dense causal attention of torch's SDPA (FlashAttention on CUDA), in turn.

Measured from queries, keys and values on: compression, choice, three branches against one dense one; decoding is a
whole layer with its caches. M7C's shape: 12 heads in 2 groups of 64. On CUDA at 65,536 tokens, with peers where they
are installed; on a CPU, where dense SDPA is well tuned and these paths are plain torch, at 4,096 and 16,384.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.bench.peers import nsa_peers
from uvcc_engine.bench.train import pick
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.benchrows import Row, row, to_json, to_text
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.machine.turns import in_turn, ratio
from uvcc_engine.nsa import decode, dispatch
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.cache import LayerCache
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.fixed_decode import FixedDecoder, recorded
from uvcc_engine.nsa.masked import sdpa
from uvcc_engine.nsa.model import LanguageModel, TransformerBlock
from uvcc_engine.nsa.rope import first_positions, rotate
from uvcc_engine.nsa.visibility import layout_of

M7C = ModelConfig(n_layers=1)
WIDE = replace(M7C, dim=4096, n_heads=64, n_kv_groups=4)  # the paper's groups of 16, which peers can do
CPU_ROWS = ("attn_fwd_4k", "attn_bwd_4k", "decode_4k", "attn_fwd_16k")
GPU_ROWS = ("attn_fwd_64k", "attn_bwd_64k", "decode_64k")
TUNED_AT = 16_384  # tokens: long enough that every kernel fills a GPU
TOKENS = {"4k": 4096, "16k": 16_384, "64k": 65_536}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random tensors of one row: q [1, S, H, d], for each branch k and v [1, S, G, d], and the output's gradient."""

    q: Tensor
    k: tuple[Tensor, Tensor, Tensor]
    v: tuple[Tensor, Tensor, Tensor]
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.q, *self.k, *self.v)


def inputs(cfg: ModelConfig, s: int, device: torch.device) -> Inputs:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(heads: int) -> Tensor:
        return torch.randn(1, s, heads, cfg.d_k, device=device, dtype=dtype, requires_grad=True)

    q, six = random(cfg.n_heads), [random(cfg.n_kv_groups) for _ in range(6)]
    return Inputs(q, (six[0], six[1], six[2]), (six[3], six[4], six[5]), torch.randn_like(q.detach()))


class Sparse:
    """Compression, choice and branches from raw keys and values; the gates are a third each."""

    def __init__(self, cfg: ModelConfig, s: int, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self._layer = NSAttention(cfg).to(device, dtype)
        self._layout = layout_of(cfg.nsa, s, device, None)
        table = first_positions(s, cfg.d_k, cfg.rope_base, 1.0, dtype, device)[:, None]
        self._table = table[: self._layout.n_cmp * cfg.nsa.d : cfg.nsa.d]

    def __call__(self, x: Inputs) -> Tensor:
        k_cmp, v_cmp = rotate(self._layer.phi_k(x.k[0]), self._table), self._layer.phi_v(x.v[0])
        o_cmp, o_sel, o_win = dispatch.attend(self._layout, x.q, (k_cmp, *x.k[1:]), (v_cmp, *x.v[1:]))
        assert o_cmp is not None
        return (o_cmp + o_sel + o_win) / 3


def dense(x: Inputs) -> Tensor:
    """One causal branch of the same heads and groups."""
    return sdpa(x.q, x.k[1], x.v[1], None)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device's queue included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _forward(run: Callable[[Inputs], Tensor], x: Inputs, device: torch.device) -> float:
    with torch.no_grad():
        return timed(lambda: run(x), device)


def _backward(run: Callable[[Inputs], Tensor], x: Inputs, device: torch.device) -> float:
    """The backward pass alone: its graph is built before the clock starts."""
    y = run(x)
    return timed(lambda: torch.autograd.grad(y, x.leaves, x.grad, allow_unused=True), device)


def attention(name: str, cfg: ModelConfig, device: torch.device, runs: int) -> Row:
    """Seconds of NSA; the reference is dense attention, the ratio how many times faster NSA is (median of rounds)."""
    s = TOKENS[name.rsplit("_", 1)[1]]
    x = inputs(cfg, s, device)
    sparse = Sparse(cfg, s, device, x.q.dtype)
    measure = _forward if "fwd" in name else _backward
    return _versus(name, lambda: measure(sparse, x, device), lambda: measure(dense, x, device), runs)


def _versus(name: str, ours: Callable[[], float], theirs: Callable[[], float], runs: int) -> Row:
    ours(), theirs()  # builds kernels, fills caches
    a, b = in_turn([ours, theirs], runs)
    return replace(row(name, "seconds", "s", a, statistics.median(b)), ratio=ratio(b, a).value)


def decoding(name: str, device: torch.device, runs: int) -> Row:
    """Seconds of one token in one layer behind S tokens, against a dense layer's one query over all S keys.

    On CUDA both are replayed as CUDA graphs, as ``generate`` replays a step.
    """
    s = TOKENS[name.rsplit("_", 1)[1]]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = LanguageModel(M7C).to(device, dtype).eval()
    state = _filled(model, s)
    x = torch.randn(1, 1, M7C.dim, device=device, dtype=dtype)
    k, v = (torch.randn(1, M7C.n_kv_groups, s, M7C.d_k, device=device, dtype=dtype) for _ in range(2))
    q_in, q_out = (torch.randn(M7C.dim, M7C.dim, device=device, dtype=dtype) for _ in range(2))

    def full() -> object:
        q = (x @ q_in).view(1, 1, M7C.n_heads, M7C.d_k).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2) @ q_out

    with torch.no_grad():
        if device.type == "cuda":
            fixed = FixedDecoder(model, state, 1)
            ours, theirs = recorded(lambda: fixed.attention(0, x)), recorded(full)
            return _versus(name, lambda: timed(ours.replay, device), lambda: timed(theirs.replay, device), runs)
        sparse = _growing(model, state, x)
        return _versus(name, lambda: timed(sparse, device), lambda: timed(full, device), runs)


def _filled(model: LanguageModel, s: int) -> decode.DecodeState:
    """The state of a model of one layer behind ``s`` tokens, its caches filled at random."""
    state, nsa = decode.start(model, 1), M7C.nsa
    cache = state.layers[0]
    assert isinstance(cache, LayerCache)
    for rows, n in (
        *((r, nsa.n_cmp(s)) for r in (cache.cmp_k, cache.cmp_v)),
        *((r, s) for r in (cache.sel_k, cache.sel_v, cache.win_k, cache.win_v)),
        *((r, s - nsa.n_cmp(s) * nsa.d) for r in (cache.raw_k, cache.raw_v)),
    ):
        rows.append(rows.view.new_empty(1, n, M7C.n_kv_groups, M7C.d_k).normal_())
    state.position = s
    return state


def _growing(model: LanguageModel, state: decode.DecodeState, x: Tensor) -> Callable[[], object]:
    """A step of the one layer whose caches grow, which leaves them as they were."""
    block, cache, s = model.blocks[0], state.layers[0], state.position
    assert isinstance(block, TransformerBlock)
    assert isinstance(block.attention, NSAttention)
    assert isinstance(cache, LayerCache)
    layer = block.attention

    def sparse() -> object:
        state.position = s
        found = decode.attend(layer, x, cache, state)
        for rows in (cache.sel_k, cache.sel_v):
            rows.drop_newest(1)
        return found

    return sparse


def peers(device: torch.device, runs: int, say: Callable[[str], None]) -> list[Row]:
    """Each installed peer at 64k tokens, forward and backward; the reference is ours, the ratio ours / theirs."""
    there, absent = nsa_peers.find(WIDE.nsa)
    if device.type != "cuda":
        absent = [*absent, *(f"{name} (it needs a CUDA device)" for name in there)]
    if absent:
        say(f"peers left out: {', '.join(absent)}")
    if device.type != "cuda" or not there:
        return []
    s = TOKENS["64k"]
    x = inputs(WIDE, s, device)
    sparse, found = Sparse(WIDE, s, device, x.q.dtype), []
    for name, peer in there.items():

        def run(y: Inputs, peer: nsa_peers.AttentionPeer = peer) -> Tensor:
            return peer(y.q, y.k[1], y.v[1])

        for kind, measure in (("fwd", _forward), ("bwd", _backward)):
            made = _versus(
                f"{name}_{kind}_64k",
                lambda m=measure, r=run: m(r, x, device),  # type: ignore[misc]
                lambda m=measure: m(sparse, x, device),  # type: ignore[misc]
                runs,
            )
            found.append(made)
    return found


def _tune(asked: str, cuda: bool, say: Callable[[str], None]) -> int:
    if not cuda or not dispatch.has_triton():
        raise ConfigError("--tune needs a GPU and Triton", "run it on a pod that has both")
    from uvcc_engine.bench.timing import nsa_tiles

    names = nsa_tiles.chosen(asked)
    print(nsa_tiles.printed(nsa_tiles.tune(names, TUNED_AT, torch.device("cuda"), say)))
    return 0


def main(argv: Sequence[str]) -> int:
    parser = RaisingParser(prog="uvcc-engine bench nsa", description=__doc__)
    parser.add_argument("--rows", default="", help="comma-separated row names")
    parser.add_argument("--runs", type=natural, default=5, help="rounds of both")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--tune",
        nargs="?",
        const="all",
        metavar="KERNELS",
        help="which tiles kernels (all) are fastest with on this GPU",
    )
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    known = GPU_ROWS if cuda else (*CPU_ROWS, *GPU_ROWS)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    if args.tune:
        return _tune(args.tune, cuda, say)
    names = pick(args.rows, known, GPU_ROWS, cuda, say)
    device, runs = torch.device("cuda" if cuda else "cpu"), max(1, args.runs)
    rows = [decoding(n, device, runs) if n.startswith("decode") else attention(n, M7C, device, runs) for n in names]
    if not args.rows:
        rows += peers(device, runs, say)
    print(to_json(rows) if args.json else to_text(rows))
    return 0

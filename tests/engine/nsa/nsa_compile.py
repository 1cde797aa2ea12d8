"""Compiles every kernel for an H100 (sm_90) with M7C's shapes; needs Triton, no GPU. Run as a script."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uvcc_engine.nsa.kernels import band, decode, selection, topk

FLOATS = {"scale", "natural"}
FP32 = {"lse", "delta", "part_o", "part_lse", "part_dq", "part_dk", "part_dv", "part"}
INT32 = {"starts", "entry", "offset", "block_of", "begin_of", "chosen", "first_of"}
BF16 = {"q", "k", "v", "kc", "vc", "ks", "vs", "kw", "vw", "o", "o_cmp", "o_win", "do", "do_cmp", "do_win", "dq"}
WIDTHS = {"PER": 6, "DK": 64, "DV": 64, "DKP": 64, "DVP": 64, "ACC": tl.float32}
GEOMETRY = {"STRIDE": 16, "SPAN": 32, "RATIO": 4, "PARTS": 2, "SIZE": 64, "N_SEL": 16, "N_PAD": 16, "HP": 16}
TILES = {"BQ": 64, "BN": 64, "M": 64, "CHUNK": 16, "R": 64, "D": 64, "DP": 64}
CONSTANTS: dict[str, Any] = {**WIDTHS, **GEOMETRY, **TILES}
KERNELS = {
    "band.forward": (band.forward, {}),
    "band.backward_q": (band.backward_q, {}),
    "band.backward_kv": (band.backward_kv, {"dk": "*fp32", "dv": "*fp32"}),
    "topk.top_blocks": (topk.top_blocks, {}),
    "selection.forward": (selection.forward, {}),
    "selection.combine": (selection.combine, {}),
    "selection.backward": (selection.backward, {}),
    "selection.sum_slots": (selection.sum_slots, {}),
    "selection.add_chunks": (selection.add_chunks, {"out": "*fp32"}),
    "decode.split": (decode.split_kernel, {}),
}


def type_of(name: str) -> str:
    for names, kind in ((FLOATS, "fp32"), (FP32, "*fp32"), (INT32, "*i32"), (BF16, "*bf16")):
        if name in names:
            return kind
    return "i32"


def main() -> None:
    for name, (kernel, special) in KERNELS.items():
        constants = {a: CONSTANTS[a] for a in kernel.arg_names if a in CONSTANTS}
        signature = {a: "constexpr" if a in constants else special.get(a) or type_of(a) for a in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        print(f"{name}: {len(made.asm['cubin'])} bytes, {made.metadata.shared} bytes of shared memory")


if __name__ == "__main__":
    main()

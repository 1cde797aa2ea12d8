"""Compiles every kernel for an A100 (sm_80), an H100 (sm_90) and a B200 (sm_100) with M7C's shapes; needs Triton, no
GPU.

Run as a script: a line of JSON for each, with what its machine code takes (registers of a thread, bytes of its stack:
spills) and its PTX does (asynchronous copies, those of the device's own unit, tensor core products of a warp, of a warp
group, of sm_100's own unit). From sm_90 on, kernels that take descriptors are compiled with them, too, and those that
mask edges alone in that form: ``tma``, ``edges``. With the argument ``singles`` instead, kernels with products for
inputs of 32 bits, with the tiles that a launch takes for those; ``width``: that of their heads.
As in a launch, pointers and strides are known to be multiples of 16: M7C's heads are 64 wide.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uvcc_engine.nsa.kernels import band, decode, selection, tiles, topk

FLOATS = {"scale", "natural"}
FP32 = {"lse", "delta", "part_o", "part_lse", "part_dq", "part_dk", "part_dv", "part"}
INT32 = {"counts", "starts", "entry", "offset", "block_of", "begin_of", "chosen", "first_of"}
BF16 = {"q", "k", "v", "kc", "vc", "ks", "vs", "kw", "vw", "o", "o_cmp", "o_win", "do", "do_cmp", "do_win", "dq"}
WIDTHS = {"PER": 6, "DK": 64, "DV": 64, "DKP": 64, "DVP": 64, "ACC": tl.float32}
GEOMETRY = {"STRIDE": 16, "SPAN": 32, "RATIO": 4, "PARTS": 2, "SIZE": 64, "N_SEL": 16, "N_PAD": 16, "HP": 16}
TILES = {"BQ": 64, "BN": 64, "M": 64, "CHUNK": 16, "R": 64, "D": 64, "DP": 64, "PP": 16, "COUNTED": True}
DESCRIBED = {
    "band.forward": {"kc", "vc", "kw", "vw"},
    "band.backward_q": {"kc", "vc", "kw", "vw"},
    "band.backward_kv": {"q", "do"},
    "selection.forward": {"k", "v"},
    "selection.backward": {"k", "v"},
}
LONGEST = ("band.backward_q", "selection.backward")
DESCRIPTOR = "tensordesc<bf16[1,1,64,64]>"
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
    "decode.merge": (decode.merge_kernel, {}),
}


def type_of(name: str) -> str:
    for names, kind in ((FLOATS, "fp32"), (FP32, "*fp32"), (INT32, "*i32"), (BF16, "*bf16")):
        if name in names:
            return kind
    return "i32"


def attributes(names: list[str], signature: dict[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """What a launch with M7C's tensors tells the compiler of pointers and strides."""
    wide = re.compile(r"\w+_[bsghn]")
    known = [a for a in names if signature[a].startswith("*") or (signature[a] == "i32" and wide.fullmatch(a))]
    return {(names.index(a),): [["tt.divisibility", 16]] for a in known}


def usage_of(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", f.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "spills": int(found[2])}


def of_32_bits(name: str, width: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The constants and options of a launch for heads of ``width`` numbers of 32 bits."""
    tile = tiles.of_single_products(name.replace("topk.top_blocks", "topk"), width)
    keys = GEOMETRY["SIZE"] if name.startswith("selection.") else tile.keys
    sizes = dict.fromkeys(("DK", "DV", "DKP", "DVP"), width)
    return {"BQ": tile.rows, "M": max(tile.rows, WIDTHS["PER"]), "BN": keys, **sizes}, tile.launch


def compiled(name: str, capability: int, *, tma: bool, edges: bool, width: int = 0) -> dict[str, Any]:
    kernel, special = KERNELS[name]
    other, options = of_32_bits(name, width) if width else ({}, {"num_warps": 4})
    given = {**CONSTANTS, "TMA": tma, "EDGES": edges, **other}
    constants = {a: given[a] for a in kernel.arg_names if a in given}
    if tma:
        special = special | dict.fromkeys(DESCRIBED[name], DESCRIPTOR)
    signature = {a: "constexpr" if a in constants else special.get(a) or type_of(a) for a in kernel.arg_names}
    if width:
        signature = {a: kind.replace("bf16", "fp32") for a, kind in signature.items()}
    source = ASTSource(kernel, signature, constants, attributes(kernel.arg_names, signature))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    seen = {
        "copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "bulk": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "shared": made.metadata.shared,
    }
    told = {
        "kernel": name,
        "sm": capability,
        "tma": tma,
        "edges": edges,
        "bytes": len(made.asm["cubin"]),
        "width": width,
    }
    return told | usage_of(made.asm["cubin"]) | seen


def main() -> None:
    for capability in (80, 90, 100):
        for name in KERNELS:
            print(json.dumps(compiled(name, capability, tma=False, edges=False)))
            if "EDGES" in KERNELS[name][0].arg_names:
                print(json.dumps(compiled(name, capability, tma=False, edges=True)))
            if name in DESCRIBED and capability >= 90:
                print(json.dumps(compiled(name, capability, tma=True, edges=False)))


def singles() -> None:
    for name in (*DESCRIBED, "topk.top_blocks", "decode.split"):
        print(json.dumps(compiled(name, 90, tma=False, edges=False, width=64)))
    for name in LONGEST:
        for capability, width in ((80, 64), (90, 128)):
            print(json.dumps(compiled(name, capability, tma=False, edges=False, width=width)))


if __name__ == "__main__":
    singles() if sys.argv[1:] == ["singles"] else main()

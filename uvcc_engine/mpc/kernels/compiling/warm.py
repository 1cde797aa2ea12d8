"""Calls every compiled loop with every combination of types that the protocols call it with."""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.compiled_kernels import COMPILE_FROM
from uvcc_engine.mpc.kernels.cpu import CpuKernels
from uvcc_engine.mpc.kernels.gemm import gemm_paths, ifma_units, limbs, tile_units
from uvcc_engine.mpc.kernels.layout import Patches, level, wire_dtype
from uvcc_engine.mpc.kernels.proving.binary_words import blocks_of

_N = COMPILE_FROM
_WORDS = _N // 64


def warm(kernels: CpuKernels) -> None:
    """Call each kernel once for every combination of types; on tensors of zeros, as large as it takes."""

    def zeros(*shape: int, bits: int = 64) -> Tensor:
        return torch.zeros(shape, dtype=wire_dtype(bits))

    x, words = zeros(_N), zeros(_WORDS)
    for factors in ([x], [x, x]):
        kernels.mul(factors, factors)
    kernels.cut_patches(zeros(_N), Patches(1, 2, 2, 2, 2, 1, 1, 0, 0))
    kernels.add_patches(zeros(_N), Patches(1, 2, 2, 2, 2, 1, 1, 0, 0))
    kernels.blind(zeros(_N), 3, x, x)
    kernels.mul_blinded(True, False, (x, x), (x, x), 3, x, x)
    for s in (16, 32, 50):
        half = zeros(_N, bits=s)
        kernels.truncate_deal(x, x, x, half, half, half, s)
        kernels.truncate_deal_own(x, x, zeros(2, _N, bits=s), half, half, s)
        kernels.truncate_open(x, x, half, half, half, s, s)
        c, part = kernels.truncate_open(x, x, x, half, half, s)
        kernels.truncate_close(c, part, half, s)
    kernels.pack(x, 5)
    kernels.select_deal(words, [x], zeros(2, _N))
    kernels.select(words, [x], [x], zeros(2, _N), 1)
    planes = kernels.to_planes(x, 63)
    kernels.deal_digits(planes, 3, zeros(147, _WORDS), zeros(147, _WORDS))
    g, p = kernels.pick_digits(zeros(147, _WORDS), planes, 3, -1)
    plan = level(3, generate=True, carry_on=True)
    single, product = (zeros(len(rows), 7, _WORDS) for rows in (plan.singles, plan.products))
    kernels.mask_products(plan, single, single, product, product)
    kernels.close(plan, g, p, single, single)
    kernels.merge(plan, single, single, product, -1, zeros(7, _WORDS), zeros(7, _WORDS))
    kernels.binary_multiply(x, x)
    kernels.binary_inner(x, x)
    kernels.binary_powers(x[:1], _WORDS * 64)
    kernels.chosen_places(x, zeros(64), x)
    blocks = zeros(blocks_of(_N))
    kernels.ternary_bits([x], [x], blocks)
    kernels.turned_sums(x, blocks)
    kernels.block_weights(blocks, _N)
    rows = zeros(_WORDS, 64)
    kernels.binary_columns(rows, zeros(_WORDS))
    kernels.binary_diagonals(rows.unsqueeze(0), rows.unsqueeze(0))
    kernels.binary_product(rows, rows)
    kernels.weigh(rows, words, 52)
    kernels.weigh_columns(rows, zeros(64), 52)
    kernels.weigh_pairs(rows.unsqueeze(0), rows.unsqueeze(0), words, 52)
    kernels.ternary_numbers([rows.T.contiguous()], [rows.T.contiguous()], words, 52)
    kernels.weigh_elements(zeros(_WORDS, 52), words, 3)
    kernels.add_degrees(zeros(1, 2, 52, 2, 52))
    kernels.multiply_wide(zeros(1, 64, 2, 52), zeros(1, 64, 2, 52))
    kernels.multiply_elements(zeros(16, 8, 52), zeros(16, 8, 52))
    kernels.ring_multiply(zeros(_WORDS, 52), zeros(_WORDS, 52), 3)
    kernels.ring_powers(zeros(52), _WORDS, 3)
    matrix = zeros(32, 32)
    units = {
        "bytes": limbs.has_fast_bytes(matrix.device),
        "tiles": tile_units.loops() is not None,
        "ifma": ifma_units.loops() is not None,
    }
    for path in (*gemm_paths.LOOP_KINDS, *(name for name, there in units.items() if there)):
        for right in (matrix, zeros(64, 32).t()):  # 8-bit units take columns in order as they lie
            gemm_paths.prepared(path, [right, right])([zeros(32, right.shape[0])] * 2)

"""Compiles the loops of attention into numba's cache: a small layer, forward and backward, calls all of them."""

from __future__ import annotations

import torch
from nsa_kit import results, small_layer

from uvcc_engine.nsa import fused
from uvcc_engine.nsa.config import NSAConfig


def main() -> None:
    torch.set_num_threads(1)
    fused.FROM = 1  # type: ignore[misc]
    widths = {"n_heads": 6, "n_kv_groups": 2, "d_k": 16, "d_v": 16}
    layer = small_layer(NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=40), **widths).float()
    results("fused", layer, torch.randn(1, 64, 24, requires_grad=True), None)


if __name__ == "__main__":
    main()

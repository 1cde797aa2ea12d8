"""How much arithmetic a token of training needs, and what share of a GPU's peak that is (MFU).

Counted as PaLM does (Chowdhery et al. 2022, appendix B): what the model needs, and nothing that is computed twice to
save memory. A multiplication and its addition are two operations; the backward pass needs twice the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.nsa.outlines import shapes_alone

FORWARD_AND_BACKWARD: Final = 3
# dense bf16 with fp32 accumulation, in operations a second; vendors' data sheets, without sparsity
PEAK_BF16: Final = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A40": 150e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX A6000": 155e12,
}


def keys_seen(cfg: ModelConfig, length: int) -> float:
    """Keys that a query attends to over all branches, on average over one document of ``length`` tokens."""
    if cfg.attention == "dense":
        return (length + 1) / 2
    nsa = cfg.nsa
    if cfg.attention == "window":
        return sum(min(t + 1, nsa.w) for t in range(length)) / length
    total = 0
    for t in range(length):
        compressed = max(0, (t + 1 - nsa.l) // nsa.d + 1)
        blocks = min(nsa.n_sel, t // nsa.l_sel + 1)
        selected = min(t + 1, (blocks - 1) * nsa.l_sel + t % nsa.l_sel + 1)
        total += compressed + selected + min(t + 1, nsa.w)
    return total / length


def operations_a_token(cfg: ModelConfig, length: int) -> float:
    """Operations of one token's forward and backward pass, in rows of ``length`` tokens that hold one document each."""
    with shapes_alone():
        model = LanguageModel(cfg)
    products = 0.0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            times = 1.0 / cfg.nsa.d if "phi_" in name else 1.0  # a compression block is made every d tokens
            products += times * module.weight.numel()
    products += model.embed.weight.numel()  # tied: it is also the output
    attention = cfg.n_layers * cfg.n_heads * (cfg.d_k + cfg.d_v) * keys_seen(cfg, length)
    return FORWARD_AND_BACKWARD * 2 * (products + attention)


def peak_of(device: torch.device) -> float:
    """Operations a second that the device's data sheet promises for bf16; 0.0 where it is not known, as for CPUs."""
    if device.type != "cuda":
        return 0.0
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float:
    """The peak of the GPU that a driver calls ``name``, like ``NVIDIA H100 80GB HBM3``; 0.0 where it is not known."""
    words = set(name.replace("-", " ").split())
    return next((peak for known, peak in PEAK_BF16.items() if set(known.split()) <= words), 0.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a rate of tokens means for one rank. ``operations`` of a token; ``peak`` a second, 0.0 where unknown."""

    operations: float
    peak: float
    world: int

    def at(self, toks_per_s: float) -> dict[str, float]:
        """Figures of one rank at ``toks_per_s`` of all ranks: tokens and 10^12 operations a second, and the MFU."""
        mine = toks_per_s / self.world
        done = mine * self.operations
        found = {"toks_per_s_rank": mine, "tflops_rank": done / 1e12}
        return found | ({"mfu": done / self.peak} if self.peak else {})


def effort_of(cfg: ModelConfig, length: int, device: torch.device, world: int, *, bf16: bool) -> Effort:
    """Of a training in rows of ``length`` tokens. Arithmetic in fp32 is not held against the peak for bf16."""
    return Effort(operations_a_token(cfg, length), peak_of(device) if bf16 else 0.0, world)

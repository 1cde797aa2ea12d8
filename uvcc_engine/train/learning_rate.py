"""Learning rate and optimizer: linear warm-up, a cosine that ends where the steps end, AdamW on fp32 weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from uvcc_engine.train.config import TrainConfig


def lr_at(cfg: TrainConfig, step: int) -> float:
    """Rate of optimizer step ``step`` (0-based); reaches 0 after the last one."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    progress = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    return cfg.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(model: nn.Module, cfg: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """Decay for matrices only; one fused kernel."""

    def params(matrices: bool) -> Iterable[nn.Parameter]:
        return [p for p in model.parameters() if (p.ndim >= 2) == matrices]

    groups = [
        {"params": params(True), "weight_decay": cfg.weight_decay},
        {"params": params(False), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), fused=True)

"""The learning rate: a warm-up and one of three schedules."""

from __future__ import annotations

import math

from uvcc_engine.train.config import TrainConfig


def lr_at(cfg: TrainConfig, step: int) -> float:
    """Rate of optimizer step ``step`` (0-based); reaches ``min_lr`` after the last one, unless it is constant."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "wsd":
        decay = min(cfg.decay_steps or max(1, cfg.steps // 10), max(1, cfg.steps - cfg.warmup))
        left = min(1.0, max(0.0, (cfg.steps - step) / decay))
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * left
    progress = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

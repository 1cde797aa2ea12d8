"""The layer types that ship, one file each; importing this package registers them all."""

from uvcc_engine.model.layer_types import (
    attention,
    batch_norm,
    conv2d,
    dense,
    embedding,
    gelu,
    layer_norm,
    leaky_relu,
    pool,
    relu,
    residual,
    rms_norm,
    smooth,
)

__all__ = [
    "attention",
    "batch_norm",
    "conv2d",
    "dense",
    "embedding",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "pool",
    "relu",
    "residual",
    "rms_norm",
    "smooth",
]

"""Shapes of Native Sparse Attention and of the language model around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from uvcc_engine.contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NSAConfig:
    """Block geometry of NSA (arXiv 2502.11089, section 3.3; the paper's symbols in brackets)."""

    l: int = 32  # noqa: E741 - the paper's name: tokens per compression block
    d: int = 16  # stride between compression blocks
    l_sel: int = 64  # tokens per selection block (l')
    n_sel: int = 16  # selected blocks per query and group (n), the first and the two local ones included
    w: int = 512  # sliding window, the query's own token included

    def __post_init__(self) -> None:
        for name in ("l", "d", "l_sel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"nsa.{name}={getattr(self, name)}", "it must be at least 1")
        if self.l % self.d or self.l_sel % self.d or self.l > self.l_sel:
            raise ConfigError(
                f"nsa.l={self.l}, nsa.d={self.d}, nsa.l_sel={self.l_sel} do not fit",
                "d must divide l and l_sel, and l must not exceed l_sel",
            )
        if self.n_sel < 3 or self.w < 1:
            raise ConfigError(
                f"nsa.n_sel={self.n_sel}, nsa.w={self.w}", "n_sel counts three forced blocks; w is at least 1"
            )

    def n_cmp(self, s: int) -> int:
        """Compression blocks that lie wholly inside the first ``s`` tokens; block i covers [i*d, i*d + l)."""
        return 0 if s < self.l else (s - self.l) // self.d + 1

    def n_blocks(self, s: int) -> int:
        """Selection blocks that ``s`` tokens touch; block j covers [j*l_sel, (j+1)*l_sel)."""
        return -(-s // self.l_sel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of ``n_layers`` pre-norm blocks. ``n_heads`` must be a multiple of ``n_kv_groups`` (GQA)."""

    vocab: int = 256
    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    n_kv_groups: int = 2
    d_k: int = 64
    d_v: int = 64
    rope_base: float = 10_000.0
    rope_scale: float = 1.0  # positions are divided by this for long context
    attention: str = "nsa"  # or one branch alone, the baselines: "dense" sees all earlier tokens, "window" the last w
    nsa: NSAConfig = field(default_factory=NSAConfig)

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_v"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}", "it must be at least 1")
        for name in ("rope_base", "rope_scale"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name}={getattr(self, name)}", "it must be a number above 0")
        if self.n_heads % self.n_kv_groups:
            raise ConfigError(
                f"model.n_heads={self.n_heads} is no multiple of n_kv_groups={self.n_kv_groups}", "change one of them"
            )
        if self.d_k % 2:
            raise ConfigError(f"model.d_k={self.d_k} is odd", "RoPE rotates pairs: make it even")
        if self.attention not in ("nsa", "dense", "window"):
            raise ConfigError(f"model.attention={self.attention!r}", "nsa, dense or window")

"""The M7C language model: a pre-norm decoder around NSA (or around one branch alone, the benchmarks' baselines)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.masked import sdpa
from uvcc_engine.nsa.outlines import shapes_alone
from uvcc_engine.nsa.rope import first_positions, rope_tables, rotate
from uvcc_engine.nsa.shared_rows import SharedLayout, SharedRows
from uvcc_engine.nsa.visibility import Layout, layout_of

NO_LABEL: Final = -100
"""A label that no loss is taken of, as torch's cross-entropy has it."""


class OneBranchAttention(nn.Module):
    """Grouped-query attention of the same width over all earlier tokens, or over the last ``nsa.w`` where the config
    says ``window``: what NSA is measured against."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q = nn.Linear(cfg.dim, cfg.n_heads * cfg.d_k, bias=False)
        self.kv = nn.Linear(cfg.dim, cfg.n_kv_groups * (cfg.d_k + cfg.d_v), bias=False)
        self.out = nn.Linear(cfg.n_heads * cfg.d_v, cfg.dim, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        """x [B, S, dim] -> (y [B, S, dim], None)."""
        return self.mix(layout, *self.heads(x)), None

    def heads(self, x: Tensor, at: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H, dk], keys and values [B, S, G, d] of x [B, S, dim], whose first token is number ``at``."""
        b, s, _ = x.shape
        c = self.cfg
        q = self.q(x).view(b, s, c.n_heads, c.d_k)
        k, v = self.kv(x).split((c.n_kv_groups * c.d_k, c.n_kv_groups * c.d_v), dim=-1)
        if at:
            here = torch.arange(at, at + s, device=x.device)
            table = rope_tables(here, c.d_k, base=c.rope_base, scale=c.rope_scale, dtype=q.dtype)
        else:
            table = first_positions(s, c.d_k, c.rope_base, c.rope_scale, q.dtype, x.device)
        q, k = rotate(q, table[:, None]), rotate(k.view(b, s, -1, c.d_k), table[:, None])
        return q, k, v.view(b, s, -1, c.d_v)

    def mix(self, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the queries read of the keys that they see, projected: [B, S, dim]."""
        mask = layout.causal if self.cfg.attention == "dense" else layout.window
        out: Tensor = self.out(sdpa(q, k, v, mask).flatten(-2))
        return out


class TransformerBlock(nn.Module):
    """Attention and a GELU MLP of four times the width, each behind an RMSNorm.

    ``[batch, length, dim]`` to the same.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.norm_a = nn.RMSNorm(cfg.dim)
        self.attention = NSAttention(cfg) if cfg.attention == "nsa" else OneBranchAttention(cfg)
        self.norm_m = nn.RMSNorm(cfg.dim)
        self.up = nn.Linear(cfg.dim, 4 * cfg.dim, bias=False)
        self.down = nn.Linear(4 * cfg.dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, layout: Layout | SharedLayout) -> tuple[Tensor, Tensor | None]:
        y, gates = self.attention(self.norm_a(x), layout)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm_m(x)))), gates


@dataclass(frozen=True, slots=True)
class GateMetrics:
    """Health of the three gates over all layers. Entropy in nats of the normalised gates (at most ln 3 = 1.0986)."""

    entropy_mean: float
    entropy_min: float
    max_gate: float
    collapse_frac: float
    branch_shares: tuple[float, float, float]


class LanguageModel(nn.Module):
    """Token ids -> logits. The embedding is tied to the output."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(TransformerBlock(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim)
        self.context: SharedRows | None = None  # the ranks that compute the same rows with this one
        self.recompute = range(0)  # blocks whose activations are computed again in the backward pass
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith(("attention.out.weight", ".down.weight")) and p.ndim == 2:
                nn.init.normal_(p, std=0.02 / (2 * cfg.n_layers) ** 0.5)

    def compile_blocks(self) -> None:
        """Have torch.compile lower each block when it is first used; what it makes of one serves them all."""
        for block in self.blocks:
            block.compile()

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        doc_start: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        chunk: int = 0,
        gates: list[Tensor] | None = None,
    ) -> Tensor:
        """tokens [B, S] int64 -> logits [B, S, vocab]; with ``labels`` [B, S] their mean cross-entropy instead.

        ``chunk``: so many tokens' logits are held at once, see ``token_loss``. ``gates`` collects each layer's
        [B, S, H, 3], detached.

        Where ranks share the rows (``context``), each is given them whole and computes its own tokens; its loss is
        theirs, weighted so that the mean of the ranks' losses, and of their gradients, is the rows'.
        """
        layout: Layout | SharedLayout
        counted = labels
        if self.context is None:
            layout = layout_of(self.cfg.nsa, tokens.shape[1], tokens.device, doc_start)
        else:
            layout = SharedLayout(self.cfg.nsa, tokens.shape[1], tokens.device, doc_start, self.context)
            tokens = tokens[:, layout.places]
            labels = None if labels is None else labels[:, layout.places]
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if self.training and number in self.recompute:
                x, g = checkpoint(block, x, layout, use_reentrant=False)
            else:
                x, g = block(x, layout)
            if gates is not None and g is not None:
                gates.append(g.detach())
        hidden = self.norm(x)
        if labels is not None:
            loss = token_loss(hidden, self.output, labels, chunk, of=counted)
            return loss if self.context is None else loss * self.context.ranks
        return F.linear(hidden, self.output)

    @property
    def output(self) -> Tensor:
        """The embedding ``[vocab, dim]`` again; of ranks that compute together, each has all of it."""
        weight = self.embed.weight
        plain: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        return plain


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 0, *, of: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in fp32 of ``labels`` [B, S] under the logits hidden [B, S, dim] @ weight [vocab, dim]^T.

    Tokens labelled ``NO_LABEL`` do not count; where none does, the loss is 0.

    With ``chunk`` > 0 only so many tokens' logits exist at a time; the backward pass computes them again. Fifty
    thousand symbols are 200 KB of logits a token, which is most of a step's memory otherwise. ``of``: the labels whose
    number the sum is divided by, where ``labels`` are some of them.
    """
    rows, wanted = hidden.flatten(0, 1), labels.flatten()
    count = ((labels if of is None else of) != NO_LABEL).sum().clamp_min(1)
    if not 0 < chunk < len(wanted):
        return _summed_loss(rows, weight, wanted) / count
    parts = zip(torch.split(rows, chunk), torch.split(wanted, chunk), strict=True)
    sums = [checkpoint(_summed_loss, r, weight, w, use_reentrant=False, preserve_rng_state=False) for r, w in parts]
    return torch.stack(sums).sum() / count


def _summed_loss(rows: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight).float(), wanted, reduction="sum")


def route_of(cfg: ModelConfig, s: int, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The path of each branch for rows of ``s`` tokens, as the heartbeat tells it; a baseline has one branch."""
    if cfg.attention != "nsa":
        return {cfg.attention: "sdpa"}
    layout, widths = layout_of(cfg.nsa, s, device, None), (cfg.d_k, cfg.d_v)
    return dispatch.route(layout, cfg.n_heads, cfg.n_kv_groups, dtype, widths).to_json()


def parameter_count(cfg: ModelConfig) -> int:
    """Number of parameters, counted on the meta device: costs no memory."""
    with shapes_alone():
        return sum(p.numel() for p in LanguageModel(cfg).parameters())


@torch.no_grad()
def gate_metrics(gates: list[Tensor]) -> GateMetrics | None:
    """Over all layers, tokens and heads. A gate is collapsed below 0.1 nats with a share above 0.95. Each: [..., 3]."""
    if not gates:
        return None
    share = torch.stack([g.float() for g in gates])
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-9)
    entropy = -(share * share.clamp_min(1e-9).log()).sum(-1)
    top = share.amax(-1)
    a, b, c = share.flatten(0, -2).mean(0).tolist()
    return GateMetrics(
        entropy_mean=float(entropy.mean()),
        entropy_min=float(entropy.min()),
        max_gate=float(top.max()),
        collapse_frac=float(((entropy < 0.1) & (top > 0.95)).float().mean()),
        branch_shares=(a, b, c),
    )

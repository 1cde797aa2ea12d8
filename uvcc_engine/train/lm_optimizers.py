"""The optimizers of the language model: AdamW alone, or Muon for the matrices inside the blocks and AdamW for the rest.

Muon orthogonalises the momentum of a matrix (Jordan et al. 2024); torch's own is used, with the update scaled to the
size of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.train.config import TrainConfig
from uvcc_engine.train.dimensions.sharded import like

STEP: Final = "step"
BUFFER: Final = "momentum_buffer"  # Muon's only moment
MOMENTS: Final = ("exp_avg", "exp_avg_sq", BUFFER, STEP)
_BETAS: Final = (0.9, 0.95)


class Optimizers:
    """Several torch optimizers that step as one, each over parameters of its own."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self._of = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts; a rate that is set in each is the rate of the step."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Apply the gradients that lie in the parameters."""
        for part in self.parts:
            part.step()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What a step remembers of ``parameter``, by name; empty before the first step. All are fp32."""
        state = self._of[parameter].state[parameter]
        return {key: state[key] for key in MOMENTS if key in state}

    def remember(self, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
        """Put back what ``moments`` gave, whole: on the parameter's device, in its parts where it has parts.

        A counter of steps stays on the CPU, but for the fused kernel of a GPU, which wants it there. Where another
        optimizer trained the parameter, its moments mean nothing to this one, which begins without any.
        """
        wanted = ("exp_avg", "exp_avg_sq", STEP) if isinstance(self._of[parameter], torch.optim.AdamW) else (BUFFER,)
        if not moments.keys() >= set(wanted):
            return
        held = {k: like(v, parameter) if k != STEP else v for k, v in moments.items() if k in wanted}
        if STEP in held and parameter.device.type == "cuda":
            held[STEP] = held[STEP].to(parameter.device)
        self._of[parameter].state[parameter] = {k: v.clone() for k, v in held.items()}


def make_optimizers(model: nn.Module, cfg: TrainConfig) -> Optimizers:
    """Weight decay for matrices only; AdamW as one fused kernel. Raises ConfigError where this torch has no Muon."""
    named = list(model.named_parameters())
    if cfg.optimizer == "adamw":
        return Optimizers([_adamw((p for _, p in named), cfg)])
    if not hasattr(torch.optim, "Muon"):
        hint = "an image with torch 2.9 or newer, or train.optimizer: adamw"
        raise ConfigError(f"train.optimizer is muon, which torch {torch.__version__} does not have", hint)
    inside = [p for name, p in named if p.ndim == 2 and name.startswith("blocks.")]
    muon = torch.optim.Muon(inside, lr=cfg.lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw")
    taken = set(inside)
    return Optimizers([muon, _adamw((p for _, p in named if p not in taken), cfg)])


def _adamw(parameters: Iterable[nn.Parameter], cfg: TrainConfig) -> torch.optim.AdamW:
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=_BETAS, fused=True)

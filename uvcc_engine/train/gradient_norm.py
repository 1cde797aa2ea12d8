"""The norm of all gradients, and scaling them down to a largest one: torch's own functions, which are new in 2.6.

The oldest torch that the engine runs on has only both in one, which would spread a gradient that is not finite to every
other before it can be named; the same computation stands here for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_EPS = 1e-6  # torch's


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all of them together, a scalar; of parts a scalar in parts."""
    own = getattr(torch.nn.utils, "get_total_norm", None)
    norm: Tensor
    if own is not None:
        norm = own(gradients)
    else:
        norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(list(gradients)))))
    return norm


@torch.no_grad()
def clip(parameters: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Scale gradients whose total norm is ``norm`` down to ``most``, in place; smaller ones stay as they are."""
    own = getattr(torch.nn.utils, "clip_grads_with_norm_", None)
    if own is not None:
        own(parameters, most, norm)
        return
    scale = torch.clamp(most / (norm + _EPS), max=1.0)
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)

"""What layers are written with: torch, and operations on shares, each loaded when it is first used.

A layer type is one file, and the data owner's client, which has no torch, reads its shapes from that file. So a layer
says ``ops.matmul_protocol(rt, x, y)`` and ``ops.torch.eye(3)`` where other modules import by name: nothing of torch is
loaded before a layer is built. (The scientific-python projects call it lazy loading, SPEC 1.)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch as torch

    from uvcc_engine.model.additive import product as product
    from uvcc_engine.model.additive import public_product_protocol as public_product_protocol
    from uvcc_engine.model.additive import public_scaling_protocol as public_scaling_protocol
    from uvcc_engine.model.additive import settle_protocol as settle_protocol
    from uvcc_engine.model.additive import summed_term as summed_term
    from uvcc_engine.model.functions import to_exp_scale_protocol as to_exp_scale_protocol
    from uvcc_engine.model.losses import powers_protocol as powers_protocol
    from uvcc_engine.model.losses import product_powers_protocol as product_powers_protocol
    from uvcc_engine.mpc.comparisons.gated import matmul_gated_protocol as matmul_gated_protocol
    from uvcc_engine.mpc.comparisons.gated import product_gated_protocol as product_gated_protocol
    from uvcc_engine.mpc.comparisons.maximum import matmul_max_protocol as matmul_max_protocol
    from uvcc_engine.mpc.comparisons.maximum import max_and_place_protocol as max_and_place_protocol
    from uvcc_engine.mpc.comparisons.maximum import max_protocol as max_protocol
    from uvcc_engine.mpc.comparisons.selection import ROUNDED as ROUNDED
    from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol as drelu_arithmetic_protocol
    from uvcc_engine.mpc.comparisons.selection import matmul_relu_protocol as matmul_relu_protocol
    from uvcc_engine.mpc.comparisons.selection import relu_protocol as relu_protocol
    from uvcc_engine.mpc.foundation.roles import roles as roles
    from uvcc_engine.mpc.foundation.runtime import par as par
    from uvcc_engine.mpc.foundation.share import Share as Share
    from uvcc_engine.mpc.foundation.share import cat as cat
    from uvcc_engine.mpc.foundation.share import encode as encode
    from uvcc_engine.mpc.functions.activations import gelu_protocol as gelu_protocol
    from uvcc_engine.mpc.functions.activations import sigmoid_protocol as sigmoid_protocol
    from uvcc_engine.mpc.functions.nonlinear import softmax_protocol as softmax_protocol
    from uvcc_engine.mpc.functions.normalize import deviated_protocol as deviated_protocol
    from uvcc_engine.mpc.functions.normalize import normalize_gradient_protocol as normalize_gradient_protocol
    from uvcc_engine.mpc.functions.normalize import normalize_protocol as normalize_protocol
    from uvcc_engine.mpc.functions.normalize import power_of_two_for as power_of_two_for
    from uvcc_engine.mpc.functions.softmax import powers_fit as powers_fit
    from uvcc_engine.mpc.kernels.layout import Patches as Patches
    from uvcc_engine.mpc.kernels.threads import laid_out as laid_out
    from uvcc_engine.mpc.products.arithmetic import DEALER as DEALER
    from uvcc_engine.mpc.products.arithmetic import add as add
    from uvcc_engine.mpc.products.arithmetic import add_public as add_public
    from uvcc_engine.mpc.products.arithmetic import add_ring as add_ring
    from uvcc_engine.mpc.products.arithmetic import matmul_protocol as matmul_protocol
    from uvcc_engine.mpc.products.arithmetic import mul_protocol as mul_protocol
    from uvcc_engine.mpc.products.arithmetic import mul_public_protocol as mul_public_protocol
    from uvcc_engine.mpc.products.arithmetic import partners as partners
    from uvcc_engine.mpc.products.arithmetic import product_with_protocol as product_with_protocol
    from uvcc_engine.mpc.products.arithmetic import public as public
    from uvcc_engine.mpc.products.arithmetic import rescale_protocol as rescale_protocol
    from uvcc_engine.mpc.products.arithmetic import scale_int as scale_int
    from uvcc_engine.mpc.products.arithmetic import sub as sub
    from uvcc_engine.mpc.products.arithmetic import terms as terms
    from uvcc_engine.mpc.products.summed import summed_products_protocol as summed_products_protocol

_ARITHMETIC: Final = (
    "DEALER add add_public add_ring matmul_protocol mul_protocol mul_public_protocol partners product_with_protocol"
)
_NAMES: Final = {
    "model.additive": "product public_product_protocol public_scaling_protocol settle_protocol summed_term",
    "model.functions": "to_exp_scale_protocol",
    "model.losses": "powers_protocol product_powers_protocol",
    "mpc.functions.activations": "gelu_protocol sigmoid_protocol",
    "mpc.products.arithmetic": f"{_ARITHMETIC} public rescale_protocol scale_int sub terms",
    "mpc.products.summed": "summed_products_protocol",
    "mpc.comparisons.gated": "matmul_gated_protocol product_gated_protocol",
    "mpc.comparisons.maximum": "matmul_max_protocol max_and_place_protocol max_protocol",
    "mpc.functions.nonlinear": "softmax_protocol",
    "mpc.functions.normalize": "deviated_protocol normalize_protocol normalize_gradient_protocol power_of_two_for",
    "mpc.foundation.roles": "roles",
    "mpc.foundation.runtime": "par",
    "mpc.comparisons.selection": "ROUNDED drelu_arithmetic_protocol matmul_relu_protocol relu_protocol",
    "mpc.foundation.share": "Share cat encode",
    "mpc.kernels.layout": "Patches",
    "mpc.kernels.threads": "laid_out",
    "mpc.functions.softmax": "powers_fit",
}
_HOMES: Final = {name: f"uvcc_engine.{home}" for home, names in _NAMES.items() for name in names.split()}
OPERATIONS: Final = ("torch", *sorted(_HOMES))
"""Everything that this module gives."""

if not TYPE_CHECKING:  # mypy knows the names from above, and so finds one that is misspelt

    def __getattr__(name: str) -> Any:
        if name == "torch":
            found = importlib.import_module("torch")
        elif name in _HOMES:
            found = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def load() -> None:
    """Load all operations now: whoever trains does, so that no round of a protocol waits for it."""
    for name in OPERATIONS:
        getattr(sys.modules[__name__], name)

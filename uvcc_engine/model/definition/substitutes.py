"""What to use in place of an operation that has no layer: by what it does, not by how its name is spelt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

_JOIN: Final = "branches meet as add, mul or cat"
_SHAPE: Final = "numbers may be moved by reshape, transpose, permute, slices and cat, each row of the data alone"
_PRODUCT: Final = "products are those of linear, conv1d and conv2d, entry by entry (mul), and attention"
_SEQUENCE: Final = "recurrence cannot be; use conv1d, or scaled_dot_product_attention"
INSTEAD: Final[dict[str, tuple[str, ...]]] = {
    "use leaky_relu": ("elu", "selu", "celu", "prelu", "rrelu", "threshold", "log_sigmoid"),
    "use relu": ("relu6", "softplus", "clamp_min", "hardshrink", "softshrink"),
    "use silu": ("mish", "hardswish", "glu"),
    "use sigmoid": ("hardsigmoid",),
    "use tanh": ("hardtanh", "softsign", "atan", "erf", "clamp", "clip"),
    "use layer_norm": ("group_norm", "instance_norm", "var", "std", "rsqrt", "sqrt", "linalg_vector_norm", "norm"),
    "use conv2d": ("conv3d", "conv_transpose1d", "conv_transpose2d"),
    "use max_pool2d": ("max_pool3d", "adaptive_max_pool2d", "adaptive_max_pool1d"),
    "use amax": ("max", "topk", "sort", "argmax"),
    "use avg_pool2d": ("avg_pool3d", "interpolate", "upsample_nearest2d", "upsample_bilinear2d"),
    "use mean": ("sum", "nansum", "nanmean"),
    "use linear": ("cumsum", "addmm", "tensordot"),
    _JOIN: ("stack", "hstack", "vstack", "where", "lerp", "maximum", "minimum"),
    _SHAPE: (
        *("nonzero", "masked_select", "unique"),
        *("roll", "flip", "pad", "constant_pad_nd", "index", "index_select", "gather", "broadcast_to", "scatter"),
    ),
    _PRODUCT: ("mm", "baddbmm", "einsum", "bilinear", "outer", "dot"),
    _SEQUENCE: (*("embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu"),),
    "it belongs at the end, where the objective has it already": ("log_softmax", "logsumexp"),
    "leave the cast out: shares are fixed point, of one type": ("to", "_to_copy", "type_as"),
    "leave dropout out": ("alpha_dropout", "bernoulli", "rand_like", "randn_like"),
}
INSTEAD_OF: Final[dict[str, str]] = {name: hint for hint, names in INSTEAD.items() for name in names}


def substitute(name: str, known: Collection[str]) -> str:
    """What to write in place of the operation ``name``; ``known``: those that have a layer."""
    if hint := INSTEAD_OF.get(name):
        return hint
    near = nearest(name, known, CLOSE)
    return f"did you mean {near!r}?" if near else f"what can be computed: {', '.join(sorted(known))}"

"""What to use in place of an operation that has no layer: by what it does, not by how its name is spelt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

_JOIN: Final = "branches meet only as x + layers(x)"
_SHAPE: Final = "the one change of shape is flatten, before a linear layer"
_PRODUCT: Final = "products are those of layers with their weights: linear, conv2d"
_SEQUENCE: Final = "attention and embeddings come with the shipped gpt models only, and recurrence with none"
INSTEAD: Final[dict[str, tuple[str, ...]]] = {
    "use leaky_relu": ("elu", "selu", "celu", "prelu", "rrelu", "threshold", "log_sigmoid"),
    "use relu": ("relu6", "softplus", "clamp_min", "hardshrink", "softshrink"),
    "use silu": ("mish", "hardswish", "glu"),
    "use sigmoid": ("hardsigmoid",),
    "use tanh": ("hardtanh", "softsign", "atan", "erf", "clamp", "clip"),
    "use layer_norm": ("group_norm", "instance_norm", "var", "std", "rsqrt", "sqrt", "linalg_vector_norm", "norm"),
    "use conv2d": ("conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d", "unfold"),
    "use max_pool2d": ("max_pool1d", "max_pool3d", "adaptive_max_pool2d", "amax", "max"),
    "use avg_pool2d": ("avg_pool1d", "avg_pool3d", "interpolate", "upsample_nearest2d", "upsample_bilinear2d"),
    "use mean": ("sum", "nansum", "nanmean"),
    "use linear": ("cumsum", "addmm", "tensordot"),
    _JOIN: ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "where", "lerp", "sub", "rsub"),
    _SHAPE: (
        *("transpose", "permute", "t", "movedim", "squeeze", "unsqueeze", "expand", "repeat", "roll", "flip", "pad"),
        *("constant_pad_nd", "slice", "select", "index", "index_select", "gather", "split", "chunk", "narrow"),
        *("pixel_shuffle", "unbind", "tile", "broadcast_to"),
    ),
    _PRODUCT: ("mul", "div", "pow", "matmul", "mm", "bmm", "baddbmm", "einsum", "bilinear", "outer", "dot"),
    _SEQUENCE: (
        *("embedding", "embedding_bag", "scaled_dot_product_attention", "multi_head_attention_forward"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    ),
    "it belongs at the end, where the objective has it already": ("softmax", "log_softmax", "logsumexp"),
    "leave dropout out": ("dropout", "alpha_dropout", "feature_dropout", "bernoulli", "rand_like", "randn_like"),
}
_BY_NAME: Final = {name: hint for hint, names in INSTEAD.items() for name in names}


def substitute(name: str, known: Collection[str]) -> str:
    """What to write in place of the operation ``name``; ``known``: those that have a layer."""
    if hint := _BY_NAME.get(name):
        return hint
    near = nearest(name, known, CLOSE)
    return f"did you mean {near!r}?" if near else f"what can be computed: {', '.join(sorted(known))}"

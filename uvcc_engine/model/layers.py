"""A model on shares is a stack of layers: through them forward, and backward with an update of every weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.layer_spec import LayerSpec, WeightedSpec
from uvcc_engine.model.registry import SecretContext, type_of
from uvcc_engine.model.secret_layer import FusedActivation, Layer, LayerBlock, ProductLayer

if TYPE_CHECKING:
    from uvcc_engine.data.sets import Floats
    from uvcc_engine.model.batch_place import BatchPlace
    from uvcc_engine.model.losses import Powers
    from uvcc_engine.model.model_spec import ModelSpec
    from uvcc_engine.model.secret_layer import Then, Update
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

__all__ = [
    "Layer",
    "backward_protocol",
    "build",
    "flat",
    "forward_powers_protocol",
    "forward_protocol",
    "next_protocol",
    "set_training",
    "weighted",
]


def build(model: ModelSpec, weights: Sequence[Share]) -> list[Layer]:
    """The layers of a model around the given weights, one per weighted layer. Raises ConfigError if they do not fit."""
    if [tuple(w.shape) for w in weights] != [layer.weight_shape for layer in model.weights]:
        raise ConfigError(
            f"weights of shapes {[tuple(w.shape) for w in weights]} do not fit {model.name}", "use its own checkpoint"
        )
    left = iter(weights)
    return [_layer(spec, left, model.public) for spec in model.layers]


def _layer(spec: LayerSpec, weights: Iterator[Share], public: Mapping[str, Floats]) -> Layer:
    own = next(weights) if isinstance(spec, WeightedSpec) else None
    inner = [_layer(one, weights, public) for one in spec.inner]
    return type_of(spec).secret(spec, SecretContext(own, inner, public))


def flat(layers: Sequence[Layer]) -> Iterator[Layer]:
    """All layers, those inside of blocks in their place."""
    for layer in layers:
        if isinstance(layer, LayerBlock):
            yield from flat(layer.inner)
        else:
            yield layer


def weighted(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that hold a weight, in order."""
    return [layer for layer in flat(layers) if layer.weight is not None]


def set_training(layers: Sequence[Layer], on: bool, batch: BatchPlace | None = None) -> None:
    """Tell every layer whether a step of training goes on, and on which rows of its ``batch``: batch normalisation then
    uses the batch's statistics, and dropout leaves numbers out."""
    for layer in flat(layers):
        layer.training, layer.batch = on, batch


def forward_protocol(
    rt: Runtime, layers: Sequence[Layer], x: Share, seen: list[Share] | None = None
) -> MpcProtocol[Share]:
    """Through all layers, first to last: (rows, features) to (rows * positions, classes).

    An activation that fuses takes part in the rounds of the product before it. ``seen`` is given what comes out of each
    layer, of a block the whole, of a product with its activation the latter's.
    """
    left = list(reversed(layers))
    while left:
        layer = left.pop()
        following = left[-1] if left else None
        if isinstance(layer, ProductLayer) and isinstance(following, FusedActivation):
            x = yield from following.after_protocol(rt, layer, x)
            left.pop()
        else:
            x = yield from layer.forward_protocol(rt, x)
        if seen is not None:
            seen.append(x)
    return x


def next_protocol(rt: Runtime, layers: Sequence[Layer], x: Share, place: int) -> MpcProtocol[Share]:
    """One more line (rows, features) through all layers; see ``Layer.next_protocol``."""
    for layer in layers:
        x = yield from layer.next_protocol(rt, x, place)
    return x


def forward_powers_protocol(rt: Runtime, layers: Sequence[Layer], x: Share, *, loss: bool) -> MpcProtocol[Powers]:
    """Through all layers to the exponentials of the logits (rows, classes), less their row maximum.

    Behind a direct product of few rows and classes the last layer and these take 6 rounds, for up to 10 classes 11,
    and else what one after the other take.
    """
    *below, last = layers
    if not (isinstance(last, ProductLayer) and last.direct):
        logits = yield from forward_protocol(rt, layers, x)
        return (yield from ops.powers_protocol(rt, logits, None, loss=loss))
    x = yield from forward_protocol(rt, below, x)
    left, right = last.factors(rt, x)
    if ops.powers_fit(rt, left.shape[0], right.shape[1], left.f):
        return (yield from ops.product_powers_protocol(rt, left, right, loss=loss))
    logits, top = yield from ops.matmul_max_protocol(rt, left, right)
    return (yield from ops.powers_protocol(rt, logits, top, loss=loss))


def backward_protocol(
    rt: Runtime, layers: Sequence[Layer], grad: Share, update: Update, then: Then | None = None
) -> MpcProtocol[None]:
    """Through all layers, last to first, updating weights beside the gradient's way down.

    Without ``then``, which takes the gradient of the inputs, the lowest weighted layer needs none. Input gradients use
    the weights from before their update. ``grad``: [rows, outputs] of the last layer.
    """
    lowest = 0
    if then is None:
        lowest = next((i for i, layer in enumerate(layers) if weighted([layer])), len(layers))
    yield from _backward_from_protocol(rt, layers, len(layers) - 1, lowest, grad, update, then)


def _backward_from_protocol(
    rt: Runtime, layers: Sequence[Layer], at: int, lowest: int, grad: Share, update: Update, then: Then | None
) -> MpcProtocol[None]:
    if at < lowest:
        if then is not None:
            yield from then(grad)
        return
    layer, last = layers[at], at == lowest and then is None

    def below_protocol(inner: Share) -> MpcProtocol[None]:
        yield from _backward_from_protocol(rt, layers, at - 1, lowest, inner, update, then)

    if isinstance(layer, LayerBlock):
        yield from layer.backward_protocol(rt, grad, update, None if last else below_protocol)
        return
    if last:
        yield from update(layer, grad)
        return
    down = _descend_protocol(rt, layers, at, lowest, grad, update, then)
    if layer.weight is None:
        yield from down
    else:
        # the first segment of `down` reads the old weight before `update` can replace it: par starts them in order
        yield from ops.par(down, update(layer, grad))


def _descend_protocol(
    rt: Runtime, layers: Sequence[Layer], at: int, lowest: int, grad: Share, update: Update, then: Then | None
) -> MpcProtocol[None]:
    layer, following = layers[at], layers[at - 1] if at > lowest else None
    if isinstance(layer, ProductLayer) and isinstance(following, FusedActivation):
        at -= 1
        below = yield from following.before_protocol(rt, layer, grad)
    else:
        below = yield from layer.input_gradient_protocol(rt, grad)
    yield from _backward_from_protocol(rt, layers, at - 1, lowest, below, update, then)

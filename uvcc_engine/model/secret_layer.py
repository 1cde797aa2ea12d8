"""What a layer on shares must give, and the kinds of layers that the passes through a model treat alike.

Every pass is a protocol generator, so that independent work shares its rounds: while the gradient of an input travels
on to the layer below, the gradient of this layer's weight is computed and applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from uvcc_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from uvcc_engine.model.batch_place import BatchPlace
    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


class Layer(ABC):
    """One layer. ``forward_protocol`` remembers what ``input_gradient_protocol`` and ``weight_gradient_protocol`` need.

    ``weight``: this party's share of the weight, which the optimiser replaces; None for a layer without one.
    ``training``: whether a step of training is going on; normalisation over a batch asks for it. ``batch``: the rows
    of that step's batch that go through, where it does; dropout asks for them.
    """

    by_line: ClassVar[bool] = False
    """Whether it does to each line what it would do to that line alone."""
    weight: Share | None = None
    training: bool = False
    batch: BatchPlace | None = None

    @abstractmethod
    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        """Outputs (rows, ...) of inputs (rows, ...), at the scale of the inputs."""

    @abstractmethod
    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """Gradient of the inputs from the gradient of the outputs, in the shapes of the forward pass."""

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        """Outputs (rows, features) for one more line of every row, the one at ``place``, those before it having gone
        through this very layer, from 0 on. Raises ConfigError for a layer that needs all lines at once."""
        if not self.by_line:
            raise ConfigError(f"{type(self).__name__} cannot go on line by line", "generate with causal attention")
        return (yield from self.forward_protocol(rt, x))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        """``scale`` times the gradient of the weight, summed over the rows; for layers that have one.

        Raises ConfigError for a layer without a weight.
        """
        raise ConfigError(f"{type(self).__name__} has no weight", "ask a layer that has one")
        yield  # a generator like its siblings


class ProductLayer(Layer):
    """A layer whose outputs are a matrix product, so that the activation behind it can take part in its rounds.

    ``direct``: whether the product is laid out as the outputs are, so that ``outputs`` changes nothing.
    """

    direct: ClassVar[bool] = False

    @abstractmethod
    def factors(self, rt: Runtime, x: Share) -> tuple[Share, Share]:
        """The two matrices whose product are the outputs for ``x``. Local; remembers what the gradients need."""

    @abstractmethod
    def outputs(self, product: Share) -> Share:
        """The layout of the outputs, from that of the product. Local."""

    @abstractmethod
    def gated_gradient_protocol(self, rt: Runtime, grad: Share, bits: Share) -> MpcProtocol[Share]:
        """The input gradient times bits of its shape."""


class FusedActivation(Layer):
    """An activation that takes part in the rounds of the product before it, forward as backward.

    It goes element by element: what it gives has the shape of what the product gives, and gradients likewise.
    """

    @abstractmethod
    def after_protocol(self, rt: Runtime, layer: ProductLayer, x: Share) -> MpcProtocol[Share]:
        """The layer's outputs for ``x``, through this activation."""

    @abstractmethod
    def before_protocol(self, rt: Runtime, layer: ProductLayer, grad: Share) -> MpcProtocol[Share]:
        """The gradient of this activation's inputs from that of the outputs of the layer above."""

    @abstractmethod
    def of_product_protocol(
        self, rt: Runtime, left: Share, right: Share, *, dealer: int | None = None
    ) -> MpcProtocol[Share]:
        """This activation of ``left @ right`` (two dimensions each); ``dealer`` of the truncation, if not the usual."""


if TYPE_CHECKING:
    Update = Callable[[Layer, Share], MpcProtocol[None]]
    """Compute a layer's weight gradient from the gradient of its outputs, and apply it."""
    Then = Callable[[Share], MpcProtocol[None]]
    """What goes on below, from the gradient that arrives there."""


class LayerBlock(Layer):
    """A layer that is made of others, ``inner``; its weights are theirs.

    A gradient has the shape of the block's outputs, or, once it has gone through, of its inputs.
    """

    def __init__(self, inner: Sequence[Layer]) -> None:
        self.inner = inner

    @abstractmethod
    def backward_protocol(self, rt: Runtime, grad: Share, update: Update, then: Then | None) -> MpcProtocol[None]:
        """Through the inner layers, last to first, each weight handed to ``update``; what arrives at the inputs goes to
        ``then``. Without it nothing is computed below the lowest inner weight."""

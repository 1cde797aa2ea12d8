"""Layers of a public base: frozen ones whose weight everybody knows, and ones that start from it and are trained.

A product with a public weight is local; only its truncation takes messages (2 rounds, 40 bytes a number), and nothing
is computed or sent for a gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import im2col, ops
from uvcc_engine.model.layer_spec import LayerSpec, PublicSpec
from uvcc_engine.model.layer_types.conv2d import Conv1d, Conv2d
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.layer_norm import LayerNorm
from uvcc_engine.model.layer_types.normalization import EPSILON, HIGHEST
from uvcc_engine.model.layer_types.places import LinePlaces
from uvcc_engine.model.registry import (
    InitialContext,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    register,
    type_of,
)
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Public(PublicSpec):
    """A layer with a weight, which is the public ``tensor`` of the base and stays as it is."""

    layer: LayerSpec
    tensor: str

    @property
    def public_tensor(self) -> tuple[str, tuple[int, int]]:
        return self.tensor, weighted(self.layer).weight_shape

    def merged(self, public: Mapping[str, Floats], trained: Iterator[Floats]) -> tuple[LayerSpec, Floats]:
        return self.layer, public[self.tensor]


@dataclass(frozen=True, slots=True)
class Started(PublicSpec, WeightedSpec):
    """A layer whose secret weight starts from the public ``tensor`` of the base, and is trained."""

    layer: LayerSpec
    tensor: str

    @property
    def public_tensor(self) -> tuple[str, tuple[int, int]]:
        return self.tensor, self.weight_shape

    @property
    def weight_shape(self) -> tuple[int, int]:
        return weighted(self.layer).weight_shape

    @property
    def decays(self) -> bool:
        return weighted(self.layer).decays

    def merged(self, public: Mapping[str, Floats], trained: Iterator[Floats]) -> tuple[LayerSpec, Floats]:
        return self.layer, next(trained)


def weighted(layer: LayerSpec) -> WeightedSpec:
    """The layer inside, which must have a weight of its own. Raises ConfigError."""
    if not isinstance(layer, WeightedSpec) or isinstance(layer, PublicSpec):
        raise ConfigError(f"{type(layer).__name__} has no weight that a base could hold", "leave it as it is")
    return layer


def tensor_of(public: Mapping[str, Floats], spec: PublicSpec) -> Floats:
    """The public tensor of a layer, of the shape that it says. Raises ConfigError where the base lacks it."""
    name, shape = spec.public_tensor
    found = public.get(name)
    if found is None or found.shape != shape:
        what = "is missing" if found is None else f"has shape {found.shape}"
        raise ConfigError(f"{name} of the public base {what}, a layer takes {shape}", "give the base of job.base")
    return found


class PublicLayer(Layer):
    """A layer around public numbers: its ring elements are made once, where the shares lie, at its first pass."""

    def __init__(self, spec: Any, numbers: Floats) -> None:
        self._spec = spec
        self._numbers = numbers
        self._ring: Tensor | None = None

    def ring(self, rt: Runtime, x: Share) -> Tensor:
        """The public weight at the scale of ``x``: int64 of its shape."""
        if self._ring is None:
            self._ring = ops.encode(ops.torch.from_numpy(self._numbers), x.f, name="public weight").to(rt.device)
        return self._ring


class PublicDense(PublicLayer):
    """y = [x, 1] W with public W. Forward 2 rounds, input gradient 2 rounds."""

    by_line = True

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        w = self.ring(rt, x)
        return (yield from ops.public_product_protocol(rt, x, w[:-1], w[-1]))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        w = self.ring(rt, grad)
        return (yield from ops.public_product_protocol(rt, grad, w[:-1].T))


class PublicConv(PublicLayer):
    """A convolution with a public kernel: see ``ConvLayer``. Forward 2 rounds, input gradient 2 rounds."""

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        w, spec = self.ring(rt, x), self._spec
        patches = x.map(lambda t: im2col.cut_patches(rt.kernels, t, spec))
        found = yield from ops.public_product_protocol(rt, patches, w[:-1], w[-1])
        return found.map(lambda t: im2col.channels_first(t, spec.out))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        w, spec = self.ring(rt, grad), self._spec
        last = grad.map(lambda t: im2col.channels_last(t, spec.out))
        back = ops.public_product_protocol(rt, last, w[:-1].T, after=lambda t: im2col.add_patches(rt.kernels, t, spec))
        return (yield from back)


class PublicEmbedding(PublicLayer):
    """Secret one-hot letters times a public table, and public places. 2 rounds; letters have no gradient."""

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        spec, w = self._spec, self.ring(rt, x)
        letters = x.reshape(-1, spec.vocabulary)
        places = w[spec.vocabulary :].repeat(x.shape[0], 1) if spec.places else None
        return (yield from ops.public_product_protocol(rt, letters, w[: spec.vocabulary], places))

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        """The vectors of one-hot letters (rows, vocabulary) at ``place``."""
        spec, w = self._spec, self.ring(rt, x)
        added = w[spec.vocabulary + place] if spec.places else None
        return (yield from ops.public_product_protocol(rt, x, w[: spec.vocabulary], added))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        """Raises ConfigError: letters have no gradient."""
        raise ConfigError("an embedding has no input gradient", "put it first")
        yield  # a generator like its siblings


class PublicLayerNorm(PublicLayer):
    """Layer normalisation with public gain and bias. Forward 19 rounds, backward 8, as with secret ones."""

    by_line = True
    _normal: Share | None = None
    _inverse: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        self._normal, self._inverse = yield from ops.normalize_protocol(rt, x, epsilon=EPSILON, high=HIGHEST)
        w = self.ring(rt, x)
        return (yield from ops.public_scaling_protocol(rt, self._normal, w[0], w[1]))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._normal is not None
        assert self._inverse is not None
        gained = yield from ops.public_scaling_protocol(rt, grad, self.ring(rt, grad)[0])
        return (yield from ops.normalize_gradient_protocol(rt, gained, self._normal, self._inverse))


class PublicPlaces(PublicLayer):
    """Public vectors added to the lines of a row. No message."""

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        rows = x.shape[0] // self._spec.lines
        return ops.add_public(rt, x, ops.torch.from_numpy(self._numbers).repeat(rows, 1))
        yield  # a generator like its siblings

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        return grad
        yield  # a generator like its siblings


_LAYERS: Final[dict[type[LayerSpec], Callable[[Any, Floats], PublicLayer]]] = {
    Dense: PublicDense,
    Conv1d: PublicConv,
    Conv2d: PublicConv,
    Embedding: PublicEmbedding,
    LayerNorm: PublicLayerNorm,
    LinePlaces: PublicPlaces,
}


def can_be_public(layer: LayerSpec) -> bool:
    """Whether a layer can stay public: whether there are protocols around a weight that everybody knows."""
    return type(layer) in _LAYERS


def _public_shape(spec: Public, shape: WeightShape) -> WeightShape:
    if not can_be_public(spec.layer):
        names = ", ".join(sorted(kind.__name__ for kind in _LAYERS))
        raise ConfigError(f"a public {type(spec.layer).__name__}", f"{names} can be public; train it instead")
    found: WeightShape = type_of(spec.layer).output_shape(spec.layer, shape)
    return found


def _started_shape(spec: Started, shape: WeightShape) -> WeightShape:
    found: WeightShape = type_of(weighted(spec.layer)).output_shape(spec.layer, shape)
    return found


def _public_secret(spec: Public, at: SecretContext) -> Layer:
    return _LAYERS[type(spec.layer)](spec.layer, tensor_of(at.public, spec))


def _started_secret(spec: Started, at: SecretContext) -> Layer:
    return type_of(spec.layer).secret(spec.layer, at)


def _public_plaintext(spec: Public, at: PlaintextContext, x: Tensor) -> Tensor:
    known = ops.torch.from_numpy(tensor_of(at.public, spec))
    return type_of(spec.layer).plaintext(spec.layer, PlaintextContext(known, at.training, at.inner), x)


def _started_plaintext(spec: Started, at: PlaintextContext, x: Tensor) -> Tensor:
    return type_of(spec.layer).plaintext(spec.layer, at, x)


def _started_initial(spec: Started, at: InitialContext) -> Floats:
    return tensor_of(at.public, spec)


register(
    LayerType(
        name="public", spec=Public, output_shape=_public_shape, secret=_public_secret, plaintext=_public_plaintext
    )
)
register(
    LayerType(
        name="started",
        spec=Started,
        output_shape=_started_shape,
        secret=_started_secret,
        plaintext=_started_plaintext,
        initial=_started_initial,
    )
)

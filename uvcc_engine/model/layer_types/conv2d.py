"""Convolutions of images and of sequences, as a product of patches and weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import im2col, ops
from uvcc_engine.model.parts import Pass, Plain, gather_rows, my_rows, weight_gradient_protocol
from uvcc_engine.model.registry import (
    InitialContext,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    register,
)
from uvcc_engine.model.secret_layer import ProductLayer
from uvcc_engine.model.shapes import Image, WeightShape, check_features, check_image, check_positive
from uvcc_engine.model.tensor_parallel import (
    COLUMNS,
    ROWS,
    WHOLE,
    PartContext,
    PlaceContext,
    Placed,
    TensorParallel,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Conv2d(WeightedSpec):
    """A convolution with zero padding. Its weight is (channels * kernel^2 + 1, outputs); the last row is the bias."""

    image: Image
    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0

    @property
    def out(self) -> Image:
        """The size of the image that comes out."""
        image, both = self.image, 2 * self.padding - self.kernel
        return Image(self.channels, (image.height + both) // self.stride + 1, (image.width + both) // self.stride + 1)

    @property
    def inputs(self) -> int:
        """Fan-in of one output."""
        return self.image.channels * self.kernel**2

    @property
    def kernels(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return self.kernel, self.kernel

    @property
    def strides(self) -> tuple[int, int]:
        """How far apart patches begin, down and across."""
        return self.stride, self.stride

    @property
    def paddings(self) -> tuple[int, int]:
        """Zeros above and below, and at the sides."""
        return self.padding, self.padding

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + 1, self.channels


@dataclass(frozen=True, slots=True)
class Conv1d(WeightedSpec):
    """A convolution of a sequence of ``length`` places, which lies channel by channel, with zero padding. Its weight is
    (inputs * kernel + 1, channels); the last row is the bias."""

    inputs_each: int
    length: int
    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0

    @property
    def image(self) -> Image:
        """The sequence that goes in, as an image of one line."""
        return Image(self.inputs_each, 1, self.length)

    @property
    def out(self) -> Image:
        """The sequence that comes out."""
        return Image(self.channels, 1, (self.length + 2 * self.padding - self.kernel) // self.stride + 1)

    @property
    def inputs(self) -> int:
        """Fan-in of one output."""
        return self.inputs_each * self.kernel

    @property
    def kernels(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return 1, self.kernel

    @property
    def strides(self) -> tuple[int, int]:
        """How far apart patches begin, down and across."""
        return 1, self.stride

    @property
    def paddings(self) -> tuple[int, int]:
        """Zeros above and below, and at the sides."""
        return 0, self.padding

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + 1, self.channels


class ConvLayer(ProductLayer):
    """A convolution: patches times weight, the last row of the weight being the bias.

    Forward 2 rounds; input gradient 2 rounds (patches are added up before the truncation, so it costs one truncation
    per input pixel); weight gradient 2 rounds.
    """

    def __init__(self, spec: Conv2d | Conv1d, weight: Share) -> None:
        self.weight = weight
        self._spec = spec
        self._seen: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        return self.outputs((yield from ops.matmul_protocol(rt, *self.factors(rt, x))))

    def factors(self, rt: Runtime, x: Share) -> tuple[Share, Share]:
        assert self.weight is not None
        self._seen = _patches_and_ones(rt, x, self._spec)
        return self._seen, self.weight

    def outputs(self, product: Share) -> Share:
        return product.map(lambda t: im2col.channels_first(t, self._spec.out))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        kernel = self.weight.index(slice(0, -1)).T
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from ops.product_with_protocol(rt, last, kernel, _back(rt, self._spec), cut=_cut(rt, self._spec)))

    def gated_gradient_protocol(self, rt: Runtime, grad: Share, bits: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        kernel = self.weight.index(slice(0, -1)).T
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        back, cut = _back(rt, self._spec), _cut(rt, self._spec)
        return (yield from ops.product_gated_protocol(rt, last, kernel, bits, back, cut=cut))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._seen is not None
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from ops.matmul_protocol(rt, self._seen.T, last, scale=scale))


class ConvPart(Plain):
    """The same on tensor ranks, each with the whole weight and its own rows of data. Whole or rows in, rows out.

    Forward 2 rounds; the input gradient 2 rounds; the weight's gradient takes no message.
    """

    shared: bool = True

    def __init__(self, spec: Conv2d | Conv1d, at: PartContext) -> None:
        super().__init__(at.weight, at.dealer)
        self._spec = spec
        self._cuts = at.placed.layout == WHOLE and at.tp.size > 1

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        mine = x.map(lambda t: my_rows(on.tp, t)) if self._cuts else x
        seen = _patches_and_ones(on.rt, mine, self._spec)
        on.keep(self, seen)
        found = yield from ops.matmul_protocol(on.rt, seen, self.weights[0], dealer=self.dealers[0])
        return found.map(lambda t: im2col.channels_first(t, self._spec.out))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        seen: Share = on.take(self)
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        given = weight_gradient_protocol(on, self, seen.T, last)
        if not wanted:
            yield from given
            return grad
        kernel, back, cut = self.weights[0].index(slice(0, -1)).T, _back(on.rt, self._spec), _cut(on.rt, self._spec)
        both: MpcProtocol[list[Any]] = ops.par(
            given, ops.product_with_protocol(on.rt, last, kernel, back, dealer=self.dealers[0], cut=cut)
        )
        below = cast("Share", (yield from both)[1])
        return gather_rows(on.tp, below, on.rows) if self._cuts else below


def _patches_and_ones(rt: Runtime, x: Share, spec: Conv2d | Conv1d) -> Share:
    """``with_ones`` of the patches, a layer's most numbers: they are cut to where they stand in it."""
    seen = x.map(lambda t: im2col.cut_patches(rt.kernels, t, spec, 1))
    one = ops.public(rt, ops.torch.ones(1, 1), f=x.f)
    seen.first[:, -1:], seen.second[:, -1:] = one.first, one.second
    return seen


def _back(rt: Runtime, spec: Conv2d | Conv1d) -> Callable[[Tensor, Tensor], Tensor]:
    def local(grad: Tensor, kernel: Tensor) -> Tensor:
        product = rt.kernels.right_factor([kernel], grad.shape[0])([grad])
        return im2col.add_patches(rt.kernels, product, spec)

    return local


def _cut(rt: Runtime, spec: Conv2d | Conv1d) -> Callable[[Tensor], Tensor]:
    """What :func:`_back` is the transpose of, after its product."""
    return lambda images: im2col.cut_patches(rt.kernels, images, spec)


def _output_shape(spec: Conv2d | Conv1d, shape: WeightShape) -> WeightShape:
    check_image(spec.image)
    check_positive(spec, "channels", "kernel", "stride")
    sides = zip((spec.image.height, spec.image.width), spec.kernels, spec.paddings, strict=True)
    if spec.padding < 0 or any(kernel > side + 2 * padding for side, kernel, padding in sides):
        raise ConfigError(f"{spec} has a kernel larger than its image", "pad the image, or use a smaller kernel")
    check_features(spec, shape, spec.image.size)
    return shape[0], spec.out.size


def _initial(spec: Conv2d | Conv1d, at: InitialContext) -> Floats:
    return at.kaiming(spec.weight_shape)


def _secret(spec: Conv2d | Conv1d, at: SecretContext) -> ConvLayer:
    return ConvLayer(spec, at.weight)


def _plaintext(spec: Conv2d | Conv1d, at: PlaintextContext, x: Tensor) -> Tensor:
    kernel = at.weight[:-1].T.reshape(spec.channels, spec.image.channels, *spec.kernels)
    pixels = im2col.pixels(x, spec.image)
    fn = ops.torch.nn.functional
    return fn.conv2d(pixels, kernel, at.weight[-1], spec.strides, spec.paddings).flatten(1)


def _products(spec: Conv2d | Conv1d) -> int:
    return spec.inputs * spec.out.size


def place_rows(spec: WeightedSpec, at: PlaceContext) -> Placed:
    """Place a weight whole at every rank, each doing its own rows. Raises ConfigError if it is fed columns."""
    if at.layout == COLUMNS and at.tensor > 1:
        raise at.refusal(spec)
    return at.placed(spec, WHOLE, ROWS)


register(
    LayerType(
        name="conv2d",
        spec=Conv2d,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=4,
        products=_products,
        tensor_parallel=TensorParallel(place=place_rows, part=ConvPart),
    )
)
register(
    LayerType(
        name="conv1d",
        spec=Conv1d,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=4,
        products=_products,
        tensor_parallel=TensorParallel(place=place_rows, part=ConvPart),
    )
)

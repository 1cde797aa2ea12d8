"""A convolution, as a product of patches and weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model import im2col, ops
from uvcc_engine.model.parts import with_ones
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
    def outputs(self) -> int:
        return self.channels

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + 1, self.channels


class ConvLayer(ProductLayer):
    """A convolution: patches times weight, the last row of the weight being the bias.

    Forward 2 rounds; input gradient 2 rounds (patches are added up before the truncation, so it costs one truncation
    per input pixel); weight gradient 2 rounds.
    """

    def __init__(self, spec: Conv2d, weight: Share) -> None:
        self.weight = weight
        self._spec = spec
        self._seen: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        return self.outputs((yield from ops.matmul_protocol(rt, *self.factors(rt, x))))

    def factors(self, rt: Runtime, x: Share) -> tuple[Share, Share]:
        assert self.weight is not None
        self._seen = with_ones(rt, x.map(lambda t: im2col.cut_patches(t, self._spec)))
        return self._seen, self.weight

    def outputs(self, product: Share) -> Share:
        return product.map(lambda t: im2col.channels_first(t, self._spec.out))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        kernel = self.weight.index(slice(0, -1))
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from ops.product_with_protocol(rt, last, kernel, self._back(rt)))

    def gated_gradient_protocol(self, rt: Runtime, grad: Share, bits: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        kernel = self.weight.index(slice(0, -1))
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from ops.product_gated_protocol(rt, last, kernel, bits, self._back(rt)))

    def _back(self, rt: Runtime) -> Callable[[Tensor, Tensor], Tensor]:
        def local(grad: Tensor, kernel: Tensor) -> Tensor:
            return im2col.add_patches(rt.kernels.right_factor([kernel.T], grad.shape[0])([grad]), self._spec)

        return local

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._seen is not None
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from ops.matmul_protocol(rt, self._seen.T, last, scale=scale))


def _output_shape(spec: Conv2d, shape: WeightShape) -> WeightShape:
    check_image(spec.image)
    check_positive(spec, "channels", "kernel", "stride")
    if spec.padding < 0 or spec.kernel > min(spec.image.height, spec.image.width) + 2 * spec.padding:
        raise ConfigError(f"{spec} has a kernel larger than its image", "pad the image, or use a smaller kernel")
    check_features(spec, shape, spec.image.size)
    return shape[0], spec.out.size


def _initial(spec: Conv2d, at: InitialContext) -> Floats:
    return at.kaiming(spec.weight_shape)


def _secret(spec: Conv2d, at: SecretContext) -> ConvLayer:
    return ConvLayer(spec, at.weight)


def _plaintext(spec: Conv2d, at: PlaintextContext, x: Tensor) -> Tensor:
    kernel = at.weight[:-1].T.reshape(spec.channels, spec.image.channels, spec.kernel, spec.kernel)
    pixels = im2col.pixels(x, spec.image)
    return ops.torch.nn.functional.conv2d(pixels, kernel, at.weight[-1], spec.stride, spec.padding).flatten(1)


def _products(spec: Conv2d) -> int:
    return spec.inputs * spec.out.size


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
    )
)

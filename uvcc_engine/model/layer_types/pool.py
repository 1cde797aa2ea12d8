"""Average and maximum pooling over windows that do not overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import im2col, ops
from uvcc_engine.model.parts import Local, StagePart
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import Image, WeightShape, check_features, check_image, check_positive
from uvcc_engine.model.tensor_parallel import COLUMNS, PartContext, PlaceContext, Placed, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share


@dataclass(frozen=True, slots=True)
class Pool(LayerSpec):
    """Average or maximum over ``size`` x ``size`` windows that do not overlap; a remainder at the edge is dropped."""

    image: Image
    size: int
    kind: str

    @property
    def out(self) -> Image:
        """The size of the image that comes out."""
        return Image(self.image.channels, self.image.height // self.size, self.image.width // self.size)


class AvgPoolLayer(Layer):
    """Window means: sums are local, the public factor takes 2 rounds, forward as backward."""

    def __init__(self, spec: Pool) -> None:
        self._spec = spec

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        total = x.map(lambda t: im2col.cut_windows(rt.kernels, t, self._spec).sum(-1).reshape(-1, self._spec.out.size))
        return (yield from ops.mul_public_protocol(rt, total, self._spec.size**-2))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        spread = grad.map(lambda t: im2col.lay_windows(rt.kernels, _spread(t, self._spec), self._spec))
        return (yield from ops.mul_public_protocol(rt, spread, self._spec.size**-2))


class MaxPoolLayer(Layer):
    """Window maxima: 6 rounds forward, which also give the secret place of each maximum; backward 1 round."""

    def __init__(self, spec: Pool) -> None:
        self._spec = spec
        self._place: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        windows = x.map(lambda t: im2col.cut_windows(rt.kernels, t, self._spec))
        best, self._place = yield from ops.max_and_place_protocol(rt, windows)
        return best.reshape(-1, self._spec.out.size)

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._place is not None
        windows = yield from ops.mul_protocol(rt, grad.map(lambda t: _spread(t, self._spec)), self._place)
        return windows.map(lambda t: im2col.lay_windows(rt.kernels, t, self._spec))


def _spread(grad: Tensor, spec: Pool) -> Tensor:
    """Every output's gradient, once per pixel of its window."""
    return grad.reshape(-1, 1).expand(-1, spec.size**2)


def _output_shape(spec: Pool, shape: WeightShape) -> WeightShape:
    check_image(spec.image)
    check_positive(spec, "size")
    if spec.kind not in ("avg", "max"):
        raise ConfigError(f"Pool.kind is {spec.kind!r}", "give avg or max")
    if spec.size > min(spec.image.height, spec.image.width):
        raise ConfigError(f"{spec} has a window larger than its image", "use a smaller window")
    check_features(spec, shape, spec.image.size)
    return shape[0], spec.out.size


def _secret(spec: Pool, at: SecretContext) -> Layer:
    return AvgPoolLayer(spec) if spec.kind == "avg" else MaxPoolLayer(spec)


def _plaintext(spec: Pool, at: PlaintextContext, x: Tensor) -> Tensor:
    fn = ops.torch.nn.functional
    pool = fn.avg_pool2d if spec.kind == "avg" else fn.max_pool2d
    return pool(im2col.pixels(x, spec.image), spec.size).flatten(1)


def _products(spec: Pool) -> int:
    return spec.image.size if spec.kind == "avg" else 64 * spec.image.size  # a maximum takes comparisons


def _place(spec: Pool, at: PlaceContext) -> Placed:
    if at.layout == COLUMNS and at.tensor > 1:
        raise at.refusal(spec)
    return at.placed(spec, "", at.layout)


def _part(spec: Pool, at: PartContext) -> StagePart:
    return Local(_secret(spec, SecretContext(None, [])))


register(
    LayerType(
        name="pool",
        spec=Pool,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=7,
        products=_products,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)

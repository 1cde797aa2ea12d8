"""Batch normalisation: every channel brought to mean 0 and variance 1 (Ioffe and Szegedy, 2015)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uvcc_engine.data.sets import Floats
from uvcc_engine.model import im2col, ops
from uvcc_engine.model.layer_types.normalization import EPSILON, HIGHEST
from uvcc_engine.model.parts import (
    Pass,
    StagePart,
    WholeWeight,
    gather_rows,
    my_rows,
    summed_over_ranks_protocol,
)
from uvcc_engine.model.registry import (
    InitialContext,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    register,
)
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import Image, WeightShape, check_features, check_image
from uvcc_engine.model.tensor_parallel import COLUMNS, ROWS, WHOLE, PartContext, PlaceContext, Placed, TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share
    from uvcc_engine.parallel.group import Communicator

KEEP: Final = 0.9
"""What batch normalisation keeps of its running statistics in a step."""


@dataclass(frozen=True, slots=True)
class BatchNorm(WeightedSpec):
    """Every channel brought to mean 0 and variance 1. Its weight is (4, channels): gain, mean, variance and bias."""

    image: Image

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 4, self.image.channels

    @property
    def decays(self) -> bool:
        return False

    @property
    def values_a_channel(self) -> int:
        return self.image.height * self.image.width


class BatchNormLayer(Layer):
    """Channels brought to mean 0 and variance 1. The weight (4, channels) holds gain, running mean, running variance
    and bias, so that a checkpoint and the owner get the statistics with the weights.

    In ``training`` it uses the batch's own statistics and lets the running ones follow when the weight is updated, by
    ``drift``: their distance from those of these rows, times ``1 - KEEP`` and ``share``, the part of the batch that the
    rows are. Where its rows are a tensor rank's, ``over`` sums over all ranks'. Forward 19 rounds (15 in evaluation),
    backward 8.
    """

    def __init__(self, spec: BatchNorm, weight: Share) -> None:
        self.weight = weight
        self._spec = spec
        self._normal: Share | None = None
        self._inverse: Share | None = None
        self._statistics: Share | None = None
        self.share = 1.0
        self.drift: Share | None = None
        self.over: RankSums | None = None

    @property
    def values_a_channel(self) -> int:
        """Of a row."""
        return self._spec.values_a_channel

    def _channels(self, x: Share) -> Share:
        values, channels = self._spec.values_a_channel, self._own_channels
        return x.map(lambda t: t.reshape(-1, channels, values).transpose(0, 1).flatten(1))

    def _rows(self, x: Share) -> Share:
        values, channels = self._spec.values_a_channel, self._own_channels
        return x.map(lambda t: t.reshape(channels, -1, values).transpose(0, 1).flatten(1))

    @property
    def _own_channels(self) -> int:
        """All of them, or a tensor rank's: what is found of a channel is found of its own numbers alone."""
        assert self.weight is not None
        return self.weight.shape[1]

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        weight = self.weight
        gain, mean, variance, bias = (weight.index(i).reshape(-1, 1) for i in range(4))
        cut = self._channels(x)
        ratio = 1.0
        if self.training:
            mean, variance, ratio = yield from self._measure_protocol(rt, cut)
        centred = ops.sub(cut, mean)
        both: MpcProtocol[list[Any]] = ops.par(
            ops.deviated_protocol(rt, centred, variance, ratio, epsilon=EPSILON, high=HIGHEST),
            *([self._note_protocol(rt, mean, variance, ratio)] if self.training else []),
        )
        (self._normal, self._inverse), *_ = yield from both
        assert self._normal is not None
        scaled = yield from ops.mul_protocol(rt, self._normal, gain)
        return self._rows(ops.add(scaled, bias))

    def _note_protocol(self, rt: Runtime, mean: Share, square: Share, ratio: float) -> MpcProtocol[None]:
        """Keep the statistics of these rows, for what moves the running ones."""
        variance = square if ratio == 1.0 else (yield from ops.mul_public_protocol(rt, square, ratio))
        self._statistics = ops.cat([mean.T, variance.T])

    def _measure_protocol(self, rt: Runtime, cut: Share) -> MpcProtocol[tuple[Share, Share, float]]:
        """Mean and variance of every channel; the latter is still to be multiplied by what comes with it."""
        n, total = cut.shape[-1], cut.sum(-1, keepdim=True)
        if self.over is not None:
            n, total = self.over.count, self.over.whole(total)
        part, ratio = ops.power_of_two_for(n)
        mean = yield from ops.mul_public_protocol(rt, total, 1.0 / n)
        centred = ops.sub(cut, mean)
        if self.over is None:
            squares = ops.summed_products_protocol(rt, centred, centred, -1, scale=part, keepdim=True)
        else:
            squares = self.over.products_protocol(rt, centred, centred, part)
        return mean, (yield from squares), ratio

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        assert self._normal is not None
        assert self._inverse is not None
        gained = yield from ops.mul_protocol(rt, self._channels(grad), self.weight.index(0).reshape(-1, 1))
        below = ops.normalize_gradient_protocol(rt, gained, self._normal, self._inverse, over=self.over)
        return self._rows((yield from below))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        """The gradient of gain and bias; says what moves the running statistics, and moves this layer's."""
        assert self._normal is not None
        cut = self._channels(grad)
        work: list[MpcProtocol[Any]] = [
            ops.summed_products_protocol(rt, cut, self._normal, -1, scale=scale),
            ops.mul_public_protocol(rt, cut.sum(-1), scale),
            self.drift_protocol(rt),
        ]
        gain, bias, _ = yield from ops.par(*work)
        still = ops.public(rt, ops.torch.zeros(2, gain.shape[0]), f=gain.f)
        return ops.cat([gain.reshape(1, -1), still, bias.reshape(1, -1)])

    def drift_protocol(self, rt: Runtime) -> MpcProtocol[None]:
        """Say what moves the running statistics, and move this layer's. 2 rounds."""
        assert self.weight is not None
        assert self._statistics is not None
        running = self.weight.index(slice(1, 3))
        away = ops.sub(self._statistics, running)
        drift = yield from ops.mul_public_protocol(rt, away, self.share * (1.0 - KEEP))
        self.drift = drift
        self.weight = ops.cat([self.weight.index(slice(0, 1)), ops.add(running, drift), self.weight.index(slice(3, 4))])

    def gradient_term(self, rt: Runtime, grad: Share, dealer: int) -> Tensor:
        """See ``parts.AdditiveGradient``."""
        assert self._normal is not None
        cut = self._channels(grad)
        gain, bias = ops.summed_term(rt, cut, self._normal, -1, dealer), cut.first.sum(-1) << cut.f
        still = ops.torch.zeros_like(gain)
        return ops.torch.stack([gain, still, still, bias])


@dataclass(frozen=True, slots=True)
class RankSums:
    """Sums over the rows of all tensor ``ranks``, ``count`` numbers of a channel in all: see ``normalize.Summing``."""

    ranks: Communicator
    count: int

    def whole(self, part: Share) -> Share:
        """Sums over these rows as sums over all of them."""
        both = self.ranks.sum_(ops.torch.stack([part.first, part.second]))
        return ops.Share(both[0], both[1], part.f)

    def products_protocol(self, rt: Runtime, x: Share, y: Share, scale: float) -> MpcProtocol[Share]:
        """``sum(x * y) * scale`` over all rows, the axis kept."""
        return (yield from summed_over_ranks_protocol(rt, self.ranks, x, y, scale))


class BatchNormPart(WholeWeight):
    """The same in a stage, on a microbatch of a replica: each is brought to mean 0 and variance 1 by itself, and the
    running statistics follow the mean over all of a step's, so that every replica goes on with the same. Behind a
    product that is split by columns a tensor rank has its channels alone, statistics and all. Elsewhere every rank has
    all channels and its own rows of the microbatch (``shared``): what is summed over rows is summed over the ranks, and
    the first of them says how the statistics move."""

    def __init__(self, build: Callable[[Share], Layer], at: PartContext) -> None:
        super().__init__(build, at.weight, at.dealer)
        self.shared = at.placed.split == WHOLE and at.tp.size > 1
        self._cuts = self.shared and at.placed.layout == WHOLE
        self._drift: Share | None = None

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        mine, x = self._build(self.weights[0]), x.map(lambda t: my_rows(on.tp, t)) if self._cuts else x
        assert isinstance(mine, BatchNormLayer)
        mine.training = on.batch is not None
        mine.share = 1.0 if on.batch is None else on.batch.share
        if self.shared:
            mine.over = RankSums(on.tp, on.rows * mine.values_a_channel)
            mine.share *= float(on.tp.index == 0)
        on.keep(self, mine)
        return (yield from mine.forward_protocol(on.rt, x))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        mine: BatchNormLayer = on.take(self)
        on.keep(self, mine)
        work: list[MpcProtocol[Any]] = [super().backward_protocol(on, grad, wanted)]
        work += [mine.drift_protocol(on.rt)] if on.settling is None else []  # else it comes with the gradient
        below, *_ = yield from ops.par(*work)
        assert mine.drift is not None
        self._drift = mine.drift if self._drift is None else ops.add(self._drift, mine.drift)
        return gather_rows(on.tp, below, on.rows) if self._cuts and wanted else below

    def drift(self) -> Share:
        """See ``Following``."""
        found, self._drift = self._drift, None
        assert found is not None
        return found

    def follow(self, drift: Share) -> None:
        """See ``Following``."""
        gain, running, bias = (self.weights[0].index(at) for at in (slice(0, 1), slice(1, 3), slice(3, 4)))
        self.weights[0] = ops.cat([gain, ops.add(running, drift), bias])


def _output_shape(spec: BatchNorm, shape: WeightShape) -> WeightShape:
    check_image(spec.image)
    check_features(spec, shape, spec.image.size)
    return shape


def _initial(spec: BatchNorm, at: InitialContext) -> Floats:
    return np.repeat([[1.0], [0.0], [1.0], [0.0]], spec.image.channels, axis=1)


def _secret(spec: BatchNorm, at: SecretContext) -> BatchNormLayer:
    return BatchNormLayer(spec, at.weight)


def _plaintext(spec: BatchNorm, at: PlaintextContext, x: Tensor) -> Tensor:
    w, torch, image = at.weight, ops.torch, im2col.pixels(x, spec.image)
    if at.training:
        over = (0, 2, 3)
        found = torch.stack([image.mean(over), image.var(over, unbiased=False)]).detach()
        w.data[1:3] = KEEP * w.data[1:3] + (1.0 - KEEP) * found  # not a gradient's business
    mean, variance = (None, None) if at.training else (w[1], w[2])
    return torch.nn.functional.batch_norm(image, mean, variance, w[0], w[3], at.training, 0.0, EPSILON).flatten(1)


def _products(spec: BatchNorm) -> int:
    return 64 * 62 * spec.image.channels + 16 * spec.image.size  # an inverse root takes 61 comparisons


def _place(spec: BatchNorm, at: PlaceContext) -> Placed:
    """Place it by its channels behind columns of a table, each a channel; else whole, for rows. Raises ConfigError
    behind columns that are no channels, where there is more than one tensor rank."""
    if at.layout == COLUMNS and spec.values_a_channel == 1:
        return at.placed(spec, COLUMNS, COLUMNS)
    if at.layout == COLUMNS and at.tensor > 1:
        raise at.refusal(spec, "it is fed columns, several of which are a channel")
    return at.placed(spec, WHOLE, ROWS)


def _part(spec: BatchNorm, at: PartContext) -> StagePart:
    return BatchNormPart(lambda weight: BatchNormLayer(spec, weight), at)


register(
    LayerType(
        name="batch-norm",
        spec=BatchNorm,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        initial=_initial,
        rounds=27,
        products=_products,
        tensor_parallel=TensorParallel(place=_place, part=_part),
    )
)

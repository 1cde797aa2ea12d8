"""Convolutions and pooling on shares, images as ``[batch, channels, height, width]``.

Unfolding an image into its windows copies ring elements and is local; the product is then a matrix product. Both
gradients are convolutions, so no protocol but ``product`` is needed (CryptGPU, IEEE S&P 2021, does the same).
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.maximum import max_and_place_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import DEALER, matmul_protocol, mul_protocol, mul_public_protocol


def windows(x: Tensor, size: tuple[int, int], stride: int, padding: int) -> Tensor:
    """All windows of an image: ``[batch, channels, out_h, out_w, size_h, size_w]`` (a view of the padded image).

    Raises ConfigError for windows that do not fit the image.
    """
    if padding:
        x = torch.nn.functional.pad(x, (padding, padding, padding, padding))
    if x.shape[2] < size[0] or x.shape[3] < size[1]:
        raise ConfigError(f"windows of {size} do not fit an image of {tuple(x.shape[2:])}", "pad it or shrink them")
    return x.unfold(2, size[0], stride).unfold(3, size[1], stride)


def fold(x: Tensor, shape: torch.Size, size: tuple[int, int], stride: int, padding: int) -> Tensor:
    """The transpose of ``windows``: add every window entry back to its place in an image of ``shape``. Local,
    linear."""
    batch, channels, height, width = shape
    out = torch.zeros(batch, channels, height + 2 * padding, width + 2 * padding, dtype=x.dtype, device=x.device)
    rows, columns = x.shape[2], x.shape[3]
    for i in range(size[0]):
        for j in range(size[1]):
            into = out[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride]
            into += x[:, :, :, :, i, j]
    return out[:, :, padding : padding + height, padding : padding + width]


def _rows(x: Tensor, size: tuple[int, int], stride: int, padding: int) -> Tensor:
    """``[batch * out_h * out_w, channels * size_h * size_w]``."""
    w = windows(x, size, stride, padding)
    return w.permute(0, 2, 3, 1, 4, 5).reshape(w.shape[0] * w.shape[2] * w.shape[3], -1)


def conv2d_protocol(
    rt: Runtime, x: Share, weight: Share, *, stride: int = 1, padding: int = 0, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """Cross-correlation of ``[b, c, h, w]`` with ``[o, c, kh, kw]``: ``[b, o, h', w']``. 2 rounds, 40 bytes per
    output. Raises ConfigError where the channels differ."""
    if x.shape[1] != weight.shape[1]:
        raise ConfigError(f"{x.shape[1]} input channels, a weight for {weight.shape[1]}", "the model does not fit")
    size = (weight.shape[2], weight.shape[3])
    rows = x.map(lambda t: _rows(t, size, stride, padding))
    product = yield from matmul_protocol(rt, rows, weight.map(lambda t: t.reshape(t.shape[0], -1).t()), dealer=dealer)
    out_h, out_w = (windows(x.first, size, stride, padding).shape[i] for i in (2, 3))
    return product.map(lambda t: t.reshape(x.shape[0], out_h, out_w, -1).permute(0, 3, 1, 2).contiguous())


def conv2d_weight_gradient_protocol(
    rt: Runtime,
    x: Share,
    grad: Share,
    size: tuple[int, int],
    *,
    stride: int = 1,
    padding: int = 0,
    scale: float = 1.0,
    dealer: int = DEALER,
) -> MpcProtocol[Share]:
    """Gradient of the weight ``[o, c, kh, kw]`` from that of the output, times ``scale``. 2 rounds."""
    channels = x.shape[1]
    rows = x.map(lambda t: _rows(t, size, stride, padding).t())
    flat = grad.map(lambda t: t.permute(0, 2, 3, 1).reshape(-1, t.shape[1]))
    product = yield from matmul_protocol(rt, rows, flat, scale=scale, dealer=dealer)
    return product.map(lambda t: t.t().reshape(-1, channels, *size).contiguous())


def conv2d_input_gradient_protocol(
    rt: Runtime,
    grad: Share,
    weight: Share,
    shape: torch.Size,
    *,
    stride: int = 1,
    padding: int = 0,
    dealer: int = DEALER,
) -> MpcProtocol[Share]:
    """Gradient of the input (of ``shape``) from that of the output: the transposed convolution. 2 rounds.

    The gradient is spread out by the stride and padded, then correlated with the flipped weight, so only the input's
    own elements are truncated and sent.
    """
    kh, kw = weight.shape[2], weight.shape[3]

    def spread(t: Tensor) -> Tensor:
        b, o, h, w = t.shape
        out = torch.zeros(b, o, shape[2] + 2 * padding + kh - 1, shape[3] + 2 * padding + kw - 1, dtype=torch.int64)
        out = out.to(t.device)
        out[:, :, kh - 1 : kh - 1 + stride * h : stride, kw - 1 : kw - 1 + stride * w : stride] = t
        return out[:, :, padding : padding + shape[2] + kh - 1, padding : padding + shape[3] + kw - 1]

    flipped = weight.map(lambda t: t.flip(2, 3).transpose(0, 1).contiguous())
    return (yield from conv2d_protocol(rt, grad.map(spread), flipped, dealer=dealer))


def avg_pool_protocol(rt: Runtime, x: Share, size: int, *, stride: int = 0, dealer: int = DEALER) -> MpcProtocol[Share]:
    """Mean over ``size x size`` windows (``stride`` 0: as large as the window). 2 rounds, 40 bytes per output."""
    step = stride or size
    total = x.map(lambda t: windows(t, (size, size), step, 0).sum((-1, -2)))
    return (yield from mul_public_protocol(rt, total, 1.0 / (size * size), dealer=dealer))


def avg_pool_gradient_protocol(
    rt: Runtime, grad: Share, shape: torch.Size, size: int, *, stride: int = 0, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """Gradient of the input of ``avg_pool_protocol``. 2 rounds on the output's elements; spreading it is local.

    ``[batch, channels, height, width]``, as the input.
    """
    part = yield from mul_public_protocol(rt, grad, 1.0 / (size * size), dealer=dealer)

    def spread(t: Tensor) -> Tensor:
        return fold(t[..., None, None].expand(*t.shape, size, size), shape, (size, size), stride or size, 0)

    return part.map(spread)


def max_pool_protocol(
    rt: Runtime, x: Share, size: int, *, stride: int = 0, dealer: int = DEALER
) -> MpcProtocol[tuple[Share, Share]]:
    """Maximum over ``size x size`` windows, size 2 or 3, and its one-hot ``[..., size^2]`` (``f = 0``) for the way
    back.

    6 rounds (7 from ``boolean.BULK`` comparisons on); the first entry wins a tie. Raises ConfigError for another size.
    """
    if size not in (2, 3):
        raise ConfigError(f"a maximum over {size} x {size} windows", "use size 2 or 3, or average pooling")
    cells = x.map(lambda t: windows(t, (size, size), stride or size, 0).reshape(*t.shape[:2], -1, size * size))
    view = windows(x.first, (size, size), stride or size, 0)
    flat = cells.reshape(-1, size * size)
    best, one_hot = yield from max_and_place_protocol(rt, flat, dealer=dealer)
    out = view.shape[:4]
    return best.reshape(*out), one_hot.map(lambda t: t.reshape(*out, size * size).contiguous())


def max_pool_gradient_protocol(
    rt: Runtime, grad: Share, one_hot: Share, shape: torch.Size, size: int, *, stride: int = 0, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """Gradient of the input of ``max_pool_protocol``: the output's gradient goes to each window's winner. 1 round.

    ``[batch, channels, height, width]``, as the input; ``size`` and ``stride`` count its elements.
    """
    spread = grad.map(lambda t: t.unsqueeze(-1).expand(*t.shape, size * size).contiguous())
    cells = yield from mul_protocol(rt, spread, one_hot, dealer=dealer)
    return cells.map(lambda t: fold(t.reshape(*t.shape[:4], size, size), shape, (size, size), stride or size, 0))

"""Linear maps on images that lie flat in rows; they act on each share component alone, for integers as for floats.

A convolution is a matrix product between two of them: cut patches, multiply, lay the channels out. What goes back to
the input is the transposed map: multiply, add the patches up where they came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from uvcc_engine.model import ops
from uvcc_engine.model.shapes import Image

if TYPE_CHECKING:
    from torch import Tensor


class Strided(Protocol):
    """What a convolution says of its patches."""

    @property
    def image(self) -> Image:
        """The size of the image that goes in."""

    @property
    def out(self) -> Image:
        """The size of the image that comes out."""

    @property
    def kernels(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""

    @property
    def strides(self) -> tuple[int, int]:
        """How far apart patches begin, in pixels down and across."""

    @property
    def paddings(self) -> tuple[int, int]:
        """How many lines of zeros stand above and below the image, how many columns at its sides."""

    @property
    def inputs(self) -> int:
        """Numbers of an image that goes in."""


class Windowed(Protocol):
    """What a pooling says of its windows, which do not overlap."""

    @property
    def image(self) -> Image:
        """The size of the image that goes in."""

    @property
    def out(self) -> Image:
        """The size of the image that comes out."""

    @property
    def size(self) -> int:
        """Height and width of a window, in pixels."""


def pixels(x: Tensor, image: Image) -> Tensor:
    """(rows, image) -> (rows, channels, height, width)."""
    return x.reshape(-1, image.channels, image.height, image.width)


def cut_patches(x: Tensor, conv: Strided) -> Tensor:
    """(rows, image) -> (rows * out_height * out_width, channels * kernel height * kernel width)."""
    (high, wide), (down, across), (above, beside) = conv.kernels, conv.strides, conv.paddings
    padded = ops.torch.nn.functional.pad(pixels(x, conv.image), (beside, beside, above, above))
    cut = padded.unfold(2, high, down).unfold(3, wide, across)
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, conv.inputs)


def add_patches(patches: Tensor, conv: Strided) -> Tensor:
    """The transpose of :func:`cut_patches`: every patch value is added to the pixel that it was cut from.

    Gives (rows, image).
    """
    image, out = conv.image, conv.out
    (k, m), (down, across), (above, beside) = conv.kernels, conv.strides, conv.paddings
    parts = patches.reshape(-1, out.height, out.width, image.channels, k, m).permute(0, 3, 1, 2, 4, 5)
    high, wide = image.height + 2 * above, image.width + 2 * beside
    total = patches.new_zeros(parts.shape[0], image.channels, high, wide)
    for i in range(k):
        for j in range(m):
            total[:, :, i : i + down * out.height : down, j : j + across * out.width : across] += parts[..., i, j]
    inner = total[:, :, above : high - above, beside : wide - beside]
    return inner.reshape(parts.shape[0], image.size)


def channels_first(x: Tensor, out: Image) -> Tensor:
    """(rows * height * width, channels) -> (rows, image)."""
    return x.reshape(-1, out.height * out.width, out.channels).transpose(1, 2).reshape(-1, out.size)


def channels_last(x: Tensor, out: Image) -> Tensor:
    """The inverse of :func:`channels_first`. Gives (rows * out_height * out_width, channels)."""
    return x.reshape(-1, out.channels, out.height * out.width).transpose(1, 2).reshape(-1, out.channels)


def cut_windows(x: Tensor, pool: Windowed) -> Tensor:
    """(rows, image) -> (rows * out.size, size^2): the values of every pooling window."""
    n = pool.size
    return pixels(x, pool.image).unfold(2, n, n).unfold(3, n, n).reshape(-1, n * n)


def lay_windows(windows: Tensor, pool: Windowed) -> Tensor:
    """The transpose of :func:`cut_windows`: window values back to their pixels, zero where no window was.

    Gives (rows, image).
    """
    image, out, n = pool.image, pool.out, pool.size
    parts = windows.reshape(-1, out.channels, out.height, out.width, n, n).permute(0, 1, 2, 4, 3, 5)
    total = windows.new_zeros(parts.shape[0], image.channels, image.height, image.width)
    total[:, :, : out.height * n, : out.width * n] = parts.reshape(-1, out.channels, out.height * n, out.width * n)
    return total.reshape(-1, image.size)

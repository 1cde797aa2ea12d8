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

    from uvcc_engine.mpc.kernels.base import Kernels
    from uvcc_engine.mpc.kernels.layout import Patches


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


def patches_of(conv: Strided) -> Patches:
    """How a convolution cuts its patches, as kernels take it."""
    image = conv.image
    return ops.Patches(image.channels, image.height, image.width, *conv.kernels, *conv.strides, *conv.paddings)


def cut_patches(kernels: Kernels, x: Tensor, conv: Strided, more: int = 0) -> Tensor:
    """(rows, image) -> (rows * out_height * out_width, channels * kernel height * kernel width + more).

    The last ``more`` columns are zero.
    """
    return kernels.cut_patches(x, patches_of(conv), more)


def add_patches(kernels: Kernels, patches: Tensor, conv: Strided) -> Tensor:
    """The transpose of :func:`cut_patches`: every patch value is added to the pixel that it was cut from.

    Gives (rows, image).
    """
    return kernels.add_patches(patches, patches_of(conv))


def channels_first(x: Tensor, out: Image) -> Tensor:
    """(rows * height * width, channels) -> (rows, image)."""
    return ops.laid_out(x.reshape(-1, out.height * out.width, out.channels).transpose(1, 2)).reshape(-1, out.size)


def channels_last(x: Tensor, out: Image) -> Tensor:
    """The inverse of :func:`channels_first`. Gives (rows * out_height * out_width, channels)."""
    turned = x.reshape(-1, out.channels, out.height * out.width).transpose(1, 2)
    return ops.laid_out(turned).reshape(-1, out.channels)


def windows_of(pool: Windowed) -> Patches:
    """The windows of a pooling: patches of every channel by itself."""
    image, n = pool.image, pool.size
    return ops.Patches(1, image.height, image.width, n, n, n, n, 0, 0)


def cut_windows(kernels: Kernels, x: Tensor, pool: Windowed) -> Tensor:
    """(rows, image) -> (rows * out.size, size^2): the values of every pooling window."""
    return kernels.cut_patches(x, windows_of(pool))


def lay_windows(kernels: Kernels, windows: Tensor, pool: Windowed) -> Tensor:
    """The transpose of :func:`cut_windows`: window values back to their pixels, zero where no window was.

    Gives (rows, image).
    """
    return kernels.add_patches(windows, windows_of(pool)).reshape(-1, pool.image.size)

"""Patches of images: cut out, and added up where they were cut from.

The pixels of an image stay in the nearest cache, and patches are gone through in the order in which they lie. Places
are unsigned, so that no loop asks whether one counts from the end. All pairs are heights and widths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop

Words = NDArray[np.uint64]
_Pair = tuple[int, int]


@compiled_loop
def cut_patches(
    images: Words,
    channels: int,
    image: _Pair,
    kernel: _Pair,
    stride: _Pair,
    padding: _Pair,
    count: _Pair,
    more: int,
    out: Words,
) -> None:
    """See ``Kernels.cut_patches``: of each row of ``images``, one after the other into ``out``."""
    height, width = image
    high, wide = kernel
    at = 0
    for row in range(images.shape[0]):
        pixels = images[row]
        for y in range(count[0]):
            for x in range(count[1]):
                left = x * stride[1] - padding[1]
                first = min(max(0, -left), wide)
                last = max(first, min(wide, width - left))
                for channel in range(channels):
                    for i in range(high):
                        line = y * stride[0] + i - padding[0]
                        if 0 <= line < height:
                            start = (channel * height + line) * width + left
                            for j in range(first):
                                out[np.uint64(at + j)] = np.uint64(0)
                            for j in range(first, last):
                                out[np.uint64(at + j)] = pixels[np.uint64(start + j)]
                            for j in range(last, wide):
                                out[np.uint64(at + j)] = np.uint64(0)
                        else:
                            for j in range(wide):
                                out[np.uint64(at + j)] = np.uint64(0)
                        at += wide
                for j in range(more):
                    out[np.uint64(at + j)] = np.uint64(0)
                at += more


@compiled_loop
def add_patches(
    patches: Words, channels: int, image: _Pair, kernel: _Pair, stride: _Pair, padding: _Pair, count: _Pair, out: Words
) -> None:
    """See ``Kernels.add_patches``: into each row of ``out`` those of one image."""
    height, width = image
    high, wide = kernel
    at = 0
    for row in range(out.shape[0]):
        pixels = out[row]
        pixels[:] = np.uint64(0)
        for y in range(count[0]):
            for x in range(count[1]):
                left = x * stride[1] - padding[1]
                first, last = max(0, -left), min(wide, width - left)
                for channel in range(channels):
                    for i in range(high):
                        line = y * stride[0] + i - padding[0]
                        if 0 <= line < height:
                            start = (channel * height + line) * width + left
                            for j in range(first, last):
                                pixels[np.uint64(start + j)] += patches[np.uint64(at + j)]
                        at += wide

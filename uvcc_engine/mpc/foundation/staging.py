"""The border between a device's shares and the host's messages.

On a CPU there is none: messages are the tensors' own memory. From a GPU parts are copied into pinned memory on a stream
of their own, behind what computes them, and only a message that leaves waits for its copies: once, not once a part. On
the way in, messages are copied from pinned memory while the device goes on; what computes with them waits on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Staging(Protocol):
    """How parts leave a device, and how they come to it: each a tensor of any shape, which it keeps."""

    def begin(self, part: Tensor) -> Tensor:
        """The part on the host (contiguous), perhaps still on its way there."""

    def arrived(self) -> None:
        """Wait until everything that was begun is there."""

    def bring(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Parts of one message from the host to the device."""


class HostStaging:
    """Where shares lie on the host already; parts keep their shape."""

    def begin(self, part: Tensor) -> Tensor:
        return part.contiguous()

    def arrived(self) -> None:
        return None

    def bring(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)


class CudaStaging:
    """Between a GPU and pinned memory, on two streams of its own. ``cuda`` is ``torch.cuda``, or what acts like it."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._out, self._in = cuda.Stream(device), cuda.Stream(device)
        self._last: Any = None

    def begin(self, part: Tensor) -> Tensor:
        whole = part.contiguous()
        host = self._pinned(whole.shape, whole.dtype)
        self._out.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._out):
            host.copy_(whole, non_blocking=True)
            if hasattr(whole, "record_stream") and whole.is_cuda:
                whole.record_stream(self._out)
            self._last = self._cuda.Event()
            self._last.record(self._out)
        return host

    def arrived(self) -> None:
        if self._last is not None:  # the stream does one copy after the other, so the last one's end is that of all
            self._last.synchronize()
            self._last = None

    def bring(self, parts: Sequence[Tensor]) -> list[Tensor]:
        current = self._cuda.current_stream(self._device)
        made = []
        with self._cuda.stream(self._in):
            for part in parts:
                staged = self._pinned(part.shape, part.dtype)
                staged.copy_(part)
                made.append(staged.to(self._device, non_blocking=True))
        current.wait_stream(self._in)
        for one in made:
            if one.is_cuda:
                one.record_stream(current)
        return made

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found: Tensor = (
            self._cuda.pinned_empty(shape, dtype)
            if hasattr(self._cuda, "pinned_empty")
            else torch.empty(shape, dtype=dtype, pin_memory=True)
        )
        return found


@lru_cache(maxsize=1)
def _host() -> HostStaging:
    return HostStaging()


def staging_for(device: torch.device) -> Staging:
    """The border of a device; a stream belongs to one runtime, so a GPU's is made anew."""
    return CudaStaging(device) if device.type == "cuda" else _host()

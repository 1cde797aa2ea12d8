"""Models of which only the shapes are wanted: on torch's meta device, and nothing drawn for their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NothingDrawn(TorchFunctionMode):
    """Leaves parameters as they are made. To draw on the meta device, torch imports its compiler, for 1.5 s."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules that are made within the block cost no memory and hold no values."""
    with torch.device("meta"), _NothingDrawn():
        yield

"""A GPU's rules on a CPU: tensors are marked as lying on the device or on the host, and an operation must not mix them.

What is made with ``device=`` or moved with ``.to`` lies on the device, all else on the host; what an operation gives
lies where its inputs do. As on a real GPU, a host number without dimensions may meet any tensor, copies cross over, and
indexing takes an index from the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, ValuesView
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CROSSING = ("copy_", "__getitem__", "__setitem__", "index_put_", "index_put")
BORDERS = (
    "prg.py",
    "truncation.py",
    "unix_group.py",
    "member_connection.py",
    "by_halves.py",
)  # they ask for the device first, or stand in for NCCL


class OtherDevice(TorchFunctionMode):
    """Raises RuntimeError for an operation on tensors of both places, TypeError where the host reads the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = tensors_of(args, kwargs.values())
        there = [x for x in tensors if on_device(x)]
        here = [x for x in tensors if not on_device(x) and x.dim()]
        if there and here and name not in CROSSING:
            shapes = [(tuple(x.shape), "device" if on_device(x) else "host") for x in tensors]
            raise RuntimeError(f"{name} mixes tensors of the device and of the host: {shapes}")
        border = sys._getframe(1).f_code.co_filename.endswith(BORDERS)
        if there and name == "numpy" and not border:
            raise TypeError("the host reads a tensor of the device")
        if name == "cpu":
            return mark(args[0].clone(), False)
        made = func(*args, **kwargs)
        moved = name == "to" and any(isinstance(x, torch.device) for x in (*args, *kwargs.values()))
        if moved and made is args[0]:
            made = made.view_as(made)
        if name == "__iter__":
            return iter([mark(x, bool(there)) for x in made])
        on = bool(there) or moved or (not tensors and kwargs.get("device") is not None)
        on = on or (border and name == "view")  # a CPU's memory, where a GPU would have its own
        if name != "copy_":
            for x in tensors_of(made):
                if on or not hasattr(x, "on_device"):
                    mark(x, on)
        return made


def tensors_of(*values: Any) -> list[Tensor]:
    """Those among them and within their tuples, lists and dictionaries."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple | list | ValuesView):
            found += tensors_of(*x)
        elif isinstance(x, dict):
            found += tensors_of(*x.values())
    return found


def on_device(x: Tensor) -> bool:
    return bool(getattr(x, "on_device", False))


def mark(x: Tensor, on: bool = True) -> Tensor:
    x.on_device = on  # type: ignore[attr-defined]
    return x


@contextmanager
def nothing_kept() -> Iterator[None]:
    """What was cached without these rules bears no mark, and nothing that bears one is kept for others."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(("uvcc_engine.mpc", "uvcc_engine.model")):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

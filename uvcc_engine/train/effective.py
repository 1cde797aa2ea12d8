"""Settings from the environment: made to take effect in a process that was forked after the import, and read back.

torch looks at some variables once, when it is imported; the agent's zygote imports it long before a run's environment
is known. Whatever a run says it honours is read back here, inside the rank, from the thing that it is to set: the DDP
wrapper, torch's process groups, the C library's environment (which is what NCCL and CUDA ask), the resolved settings.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.dimensions.sharded import is_sharded, reduced_as
from uvcc_engine.train.env import Effect

DEBUG: Final = "TORCH_DISTRIBUTED_DEBUG"
LEVELS: Final = ("OFF", "INFO", "DETAIL")
_MIB: Final = 1 << 20
_DDP: Final[Mapping[str, Callable[[DistributedDataParallel], object]]] = {
    "ddp.bucket_mb": lambda d: d.bucket_bytes_cap // _MIB,
    "ddp.static_graph": lambda d: d.static_graph,
    "ddp.find_unused": lambda d: d.find_unused_parameters,
    "ddp.gradient_as_bucket_view": lambda d: d.gradient_as_bucket_view,
    "ddp.compress": lambda d: "bf16" if d._comm_hooks else "off",
}


_PROBE: Final = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
DistributedDataParallel(torch.nn.Linear(1, 1))
"""
_PROBE_S: Final = 180.0


@lru_cache(maxsize=1)
def groups_bear_detail() -> bool:
    """Whether this torch's DDP bears groups that were made under DETAIL, where each collective is held against the
    other ranks' first: torch 2.13 dies of SIGSEGV in its constructor. Tried in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="uvcc-detail-") as folder:
        command = [sys.executable, "-c", _PROBE, folder]
        try:
            return subprocess.run(command, capture_output=True, timeout=_PROBE_S, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def take(environ: Mapping[str, str], *, grouped: bool = False) -> None:
    """Have torch read again what it read when it was imported. Raises ConfigError for a level that it does not have.

    Asked before the ranks' group is made, and again when it is (``grouped``): where a group made under DETAIL would end
    the process, it is made under INFO, and DDP alone has DETAIL.
    """
    wanted = environ.get(DEBUG, "")
    if wanted and wanted.upper() not in LEVELS:
        raise ConfigError(f"{DEBUG} is {wanted!r}", f"one of {', '.join(LEVELS)}")
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    several = int(environ.get("WORLD_SIZE", "1")) > 1
    if wanted.upper() == "DETAIL" and several and not grouped and not groups_bear_detail():
        dist.set_debug_level(dist.DebugLevel.INFO)  # type: ignore[attr-defined]


def read_back(effects: Sequence[Effect], cfg: LMConfig, model: nn.Module) -> dict[str, str]:
    """Every variable that is honoured, with the value found where it acts.

    Raises ConfigError naming the first that does not act: a run must not show what it does not do.
    """
    found: dict[str, str] = {}
    for effect in effects:
        if effect.name == DEBUG:
            value = dist.get_debug_level().name  # type: ignore[attr-defined]
            _hold(effect, value, effect.value.upper())
            found[effect.name] = f"{value} in torch's process groups"
            if value == "DETAIL" and isinstance(model, DistributedDataParallel) and not groups_bear_detail():
                found[effect.name] = f"DETAIL in DDP alone: torch {torch.__version__} dies of groups that have it"
        elif not effect.name.startswith("NSA_"):
            value = _of_c_library(effect.name)
            _hold(effect, value, effect.value)
            found[effect.name] = f"{value} in this process, where its library reads it"
        else:
            found[effect.name] = _setting(effect, cfg, model)
    return found


def _setting(effect: Effect, cfg: LMConfig, model: nn.Module) -> str:
    """A setting of ours: in the DDP wrapper where it acts there, else in the resolved settings."""
    key = effect.meaning
    section, _, name = key.partition(".")
    part: Any = getattr(cfg, section, None)
    if not dataclasses.is_dataclass(part) or not hasattr(part, name):
        return key
    if section != "ddp" or key not in _DDP:
        return f"{key} = {getattr(part, name)}"
    if is_sharded(model) and name == "compress":
        sent = reduced_as(model)
        _hold(effect, sent, str(getattr(part, name)))
        return f"{sent} in the sharded model"
    if not isinstance(model, DistributedDataParallel):
        if is_sharded(model):
            return f"{key}: no effect, parameters are sharded"
        return f"{key}: no effect, one rank reduces nothing"
    value = _DDP[key](model)
    _hold(effect, str(value), str(getattr(part, name)))
    return f"{value} in the DDP wrapper"


def _hold(effect: Effect, found: str, wanted: str) -> None:
    if found != wanted:
        raise ConfigError(
            f"{effect.name}={effect.value} is set, but {found or 'nothing'} acts",
            "this torch does not take it; remove it from the profile's env",
        )


def _of_c_library(name: str) -> str:
    """What ``getenv`` of the C library answers: a library below Python asks that, not ``os.environ``."""
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
    value = getenv(os.fsencode(name))
    return "" if value is None else os.fsdecode(value)

"""The older launchers' environment names, read strictly: each has an effect that is shown, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest
from uvcc_engine.train.config import LMConfig


@dataclass(frozen=True, slots=True)
class Effect:
    """One variable that was honoured: what it set, for run.json and the console."""

    name: str
    value: str
    meaning: str


def _flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("wanted 0 or 1")
    return value == "1"


def _ddp(**over: object) -> Callable[[LMConfig], LMConfig]:
    return lambda c: replace(c, ddp=replace(c.ddp, **over))  # type: ignore[arg-type]


def _train(**over: object) -> Callable[[LMConfig], LMConfig]:
    return lambda c: replace(c, train=replace(c.train, **over))  # type: ignore[arg-type]


def _runtime(**over: object) -> Callable[[LMConfig], LMConfig]:
    return lambda c: replace(c, runtime=replace(c.runtime, **over))  # type: ignore[arg-type]


def _always(needed: str) -> Callable[[str], Callable[[LMConfig], LMConfig]]:
    """A switch of the older system whose good setting is the only behaviour here."""

    def parse(value: str) -> Callable[[LMConfig], LMConfig]:
        if value != needed:
            raise ValueError(f"only {needed}: this trainer has no other path")
        return lambda c: c

    return parse


def _gc_off(value: str) -> Callable[[LMConfig], LMConfig]:
    off = _flag(value)
    return _runtime(gradient_checkpointing=False) if off else lambda c: c


def _layers(value: str) -> Callable[[LMConfig], LMConfig]:
    return _runtime(gradient_checkpointing=True, checkpoint_layers=value)


def _safe_mode(value: str) -> Callable[[LMConfig], LMConfig]:
    plain = _ddp(bucket_mb=2, static_graph=False, find_unused=False)
    return plain if _flag(value) else lambda c: c


KNOWN: Final[dict[str, tuple[str, Callable[[str], Callable[[LMConfig], LMConfig]]]]] = {
    "NSA_PREFILL_BATCHED": ("batched prefill (always on)", _always("1")),
    "NSA_SEL_RANGES_V2": ("vectorised selection (always on)", _always("1")),
    "NSA_DDP_COMPRESS": ("ddp.compress", lambda v: _ddp(compress=v)),
    "NSA_DDP_BUCKET_MB": ("ddp.bucket_mb", lambda v: _ddp(bucket_mb=int(v))),
    "NSA_DDP_STATIC_GRAPH": ("ddp.static_graph", lambda v: _ddp(static_graph=_flag(v))),
    "NSA_DDP_FIND_UNUSED": ("ddp.find_unused", lambda v: _ddp(find_unused=_flag(v))),
    "NSA_DDP_BROADCAST_BUFFERS": ("ddp.broadcast_buffers", lambda v: _ddp(broadcast_buffers=_flag(v))),
    "NSA_DDP_GRAD_AS_BUCKET_VIEW": ("ddp.gradient_as_bucket_view", lambda v: _ddp(gradient_as_bucket_view=_flag(v))),
    "NSA_DDP_DISABLE_GC": ("runtime.gradient_checkpointing off", _gc_off),
    "NSA_DDP_SAFE_MODE": ("ddp.bucket_mb 2, no static graph, no search for unused parameters", _safe_mode),
    "NSA_DDP_SAFE_GC_LAYERS": ("runtime.checkpoint_layers", _layers),
    "NSA_GC_RANGE": ("runtime.checkpoint_layers", _layers),
    "NSA_GC_REENTRANT": ("reentrant checkpointing (never: it breaks DDP)", _always("0")),
    "NSA_OPT_FUSED": ("fused AdamW (always on)", _always("1")),
    "NSA_LOG_GRAD_NORM": ("the true gradient norm (always logged)", _always("1")),
    "NSA_NVTX": ("runtime.nvtx", lambda v: _runtime(nvtx=_flag(v))),
    "NSA_SDPA_AUDIT": ("the path of each branch (always in the heartbeat)", lambda v: (_flag(v), lambda c: c)[1]),
    "NSA_ROPE_SCALE": ("model.rope_scale", lambda v: lambda c: replace(c, model=replace(c.model, rope_scale=float(v)))),
    "NSA_FWE_PREFETCH": ("prefetching (always on)", _always("1")),
    "NSA_FWE_Q": ("data.queue", lambda v: lambda c: replace(c, data=replace(c.data, queue=int(v)))),
    "NSA_NO_GC": ("runtime.gradient_checkpointing off", _gc_off),
    "NSA_PG_TIMEOUT_MIN": ("ddp.timeout_min", lambda v: _ddp(timeout_min=float(v))),
    "NSA_SEQ_LEN": ("train.seq_len", lambda v: _train(seq_len=int(v))),
    "NSA_BATCH_SIZE": ("train.batch_size", lambda v: _train(batch_size=int(v))),
    "NSA_ACCUM": ("train.accumulate", lambda v: _train(accumulate=int(v))),
    "NSA_LR": ("train.lr", lambda v: _train(lr=float(v))),
}


PASSED_ON: Final = {
    "NCCL_BLOCKING_WAIT": "read by torch's NCCL group as TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "read by torch's NCCL group as TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_": "read by NCCL",
    "TORCH_NCCL_": "read by torch's NCCL group",
    "TORCH_DISTRIBUTED_DEBUG": "read by torch's process groups",
    "CUDA_LAUNCH_BLOCKING": "read by CUDA",
    "PYTORCH_CUDA_ALLOC_CONF": "read by torch's CUDA allocator",
    "HF_DATASETS_CACHE": "read by the datasets library",
    "HF_ENDPOINT": "read by the hub's client",
    "TIKTOKEN_CACHE_DIR": "read by tiktoken",
}
"""Variables of the libraries below: not interpreted here, but shown with their values like the others."""


def apply(cfg: LMConfig, environ: Mapping[str, str]) -> tuple[LMConfig, list[Effect]]:
    """Fold the ``NSA_*`` variables into the config. Raises ConfigError for an unknown name or a bad value."""
    effects: list[Effect] = []
    for name in sorted(n for n in environ if n.startswith("NSA_")):
        if name not in KNOWN:
            near = nearest(name, KNOWN, CLOSE)
            raise ConfigError(f"{name} is set but has no effect here", f"did you mean {near}?" if near else "unset it")
        meaning, parse = KNOWN[name]
        try:
            cfg = parse(environ[name])(cfg)
        except ValueError as e:
            raise ConfigError(f"{name}={environ[name]!r}: {e}", f"it sets {meaning}") from e
        effects.append(Effect(name, environ[name], meaning))
    for name in sorted(environ):
        found = next((meaning for start, meaning in PASSED_ON.items() if name.startswith(start)), "")
        if found:
            effects.append(Effect(name, environ[name], found))
    return cfg, effects

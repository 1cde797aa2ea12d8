"""How much memory a rank will need, found by running one micro-batch on tensors that have shapes but no bytes.

The model runs forward and backward under torch's fake tensors while every storage that comes and goes is counted, so
the answer follows the code: attention path, precision, gradient checkpointing, vocabulary. One and two layers are run
and the rest follows, since each layer adds the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import host
from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.kernels.tiles import selection_bytes
from uvcc_engine.nsa.model import LanguageModel, parameter_count
from uvcc_engine.nsa.shared_rows import SharedRows
from uvcc_engine.nsa.visibility import forget
from uvcc_engine.train.config import LMConfig

MIB: Final = 1 << 20
HEADROOM: Final = 1.15  # fragmentation of the allocator
HINT: Final = (
    "smaller train.batch_size with more train.accumulate, runtime.gradient_checkpointing: true, train.loss_chunk, "
    "ddp.shard on several GPUs, or a shorter train.seq_len"
)
BASE_MIB: Final = {"cpu": 200, "cuda": 900}  # interpreter, libraries, CUDA context, collectives' buffers


@dataclass(frozen=True, slots=True)
class Room:
    """Per pod: what the ranks on it will need together, and what is free."""

    needed_mib: int
    free_mib: int


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages and remembers the largest sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: Any) -> None:
            self.live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)


def peak_of(
    cfg: ModelConfig, rows: int, seq_len: int, *, bf16: bool, recompute: bool, chunk: int = 0, context: int = 1
) -> int:
    """Bytes at the worst moment of one micro-batch: weights, gradients, activations, logits.

    ``context``: of a rank of so many that share the rows.
    """
    forget()
    try:
        with FakeTensorMode(), PeakBytes() as peak:
            model = LanguageModel(cfg)
            model.recompute = range(cfg.n_layers if recompute else 0)
            if context > 1:
                model.context = SharedRows(0, context, lambda x: torch.stack([x] * context))
            tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = model(tokens, torch.zeros_like(tokens), labels=tokens, chunk=chunk)
            loss.backward()
            return int(peak.peak)
    finally:
        forget()  # they hold fake tensors now


def estimate(cfg: LMConfig, ranks: int) -> int:
    """MiB that one rank needs at the worst moment of a step, without the base cost of its process."""
    m, t = cfg.model, cfg.train
    replicas = max(
        1, ranks // (cfg.ddp.tensor * cfg.ddp.context)
    )  # activations count as whole on each rank that computes together
    rows = max(1, t.batch_size // replicas)
    bf16 = cfg.runtime.narrow  # 8-bit copies are fewer bytes than the 16-bit ones that they stand for
    recompute = len(cfg.runtime.recomputed(m.n_layers)) == m.n_layers  # a part of the layers counts as none: never less

    def peak(layers: int) -> int:
        shape = replace(m, n_layers=layers)
        return peak_of(
            shape, rows, t.seq_len, bf16=bf16, recompute=recompute, chunk=t.loss_chunk, context=cfg.ddp.context
        )

    one = peak(1)
    whole = one if m.n_layers == 1 else one + (peak(2) - one) * (m.n_layers - 1)
    parameters = parameter_count(m)
    if ranks > 1 and cfg.ddp.shard:  # weights, gradients and moments are shared out; one block is gathered at a time
        return (
            int(HEADROOM * (whole - 8 * parameters + 16 * parameters / max(1, ranks // cfg.ddp.tensor) + _gathered(m)))
            // MIB
        )
    buckets = 2 * parameters if ranks > 1 and cfg.ddp.compress == "bf16" else 0
    return int(HEADROOM * (whole + 8 * parameters + buckets)) // MIB


def _gathered(cfg: ModelConfig) -> int:
    """Bytes of what a sharded model holds whole at one time: two blocks with their gradients, and the embedding's."""
    embedding = cfg.vocab * cfg.dim
    block = (parameter_count(cfg) - embedding) // cfg.n_layers
    return 8 * (2 * block + embedding)


def free_mib(device: torch.device) -> int:
    """Memory that is free now: of one GPU, or of this machine and its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // MIB
    free = int(host.memory_mib()["available_mib"])
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        found = [_number(Path("/sys/fs/cgroup") / name) for name in (limit, used)]
        if found[0] is not None and found[1] is not None and found[0] < 1 << 60:
            free = min(free, (found[0] - found[1]) // MIB)
    return free


def check(cfg: LMConfig, ranks: int, device: torch.device) -> Room:
    """Refuse a config that cannot fit: ConfigError naming need and room. CPU ranks share the machine's memory."""
    each = estimate(cfg, ranks) + BASE_MIB[device.type] + _of_kernels(cfg, ranks, device) // MIB
    room = Room(each * (ranks if device.type == "cpu" else 1), free_mib(device))
    if room.needed_mib > room.free_mib:
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise ConfigError(
            f"the job needs about {room.needed_mib} MiB on {where}, {room.free_mib} MiB are free",
            HINT,
        )
    return room


def _of_kernels(cfg: LMConfig, ranks: int, device: torch.device) -> int:
    """Bytes that a GPU's kernels hold for a moment, which no tensor of the other paths stands for."""
    m, t = cfg.model, cfg.train
    if dispatch.best_path(device.type, t.seq_len, m.n_heads // m.n_kv_groups) != "triton":
        return 0
    rows = max(1, t.batch_size // max(1, ranks // (cfg.ddp.tensor * cfg.ddp.context)))
    slices = 2 * cfg.ddp.context if cfg.ddp.context > 1 else 1  # where ranks share rows, one after the other
    return selection_bytes(m, rows * t.seq_len // slices)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

"""Data parallelism of the language-model trainer: the process group, DDP or FSDP2, collective decisions."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files import flight
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.parallel import meeting
from uvcc_engine.parallel import torch_flight as recorder
from uvcc_engine.parallel.party_keys import stays_here
from uvcc_engine.train.config import DDPConfig
from uvcc_engine.train.dimensions import sharded


@dataclass(slots=True)
class Trace:
    """The collective a rank is in or was in last, for its heartbeat: a rank that hangs says where.

    All ranks number them alike, so the one whose number is lower is behind. ``recent``: the newest, oldest first.
    """

    last: str = ""
    inside: bool = False
    count: int = 0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=64))

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """While inside, the rank waits for the others. An error leaves it inside: that is where it ended."""
        self.count += 1
        self.last, self.inside = f"{name} #{self.count}", True
        entry = {"group": "world", "seq": self.count, "op": name, "state": "started", "ts": time.time()}
        self.recent.append(entry)
        yield
        self.inside = False
        entry["state"] = "completed"

    def waiting_on(self) -> Waiting | None:
        """The other ranks of the collective that this rank is in; None outside of one."""
        return Waiting(f"other ranks in {self.last}") if self.inside else None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This rank's place. ``world`` 1 needs no process group at all. ``tensor`` or ``context`` neighbouring ranks are
    one replica."""

    rank: int
    world: int
    device: torch.device
    trace: Trace = field(default_factory=Trace)
    tensor: int = 1
    context: int = 1

    @property
    def lead(self) -> bool:
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Whose rows it reads: ranks of one replica compute the same rows together."""
        return self.rank // self.together

    @property
    def replicas(self) -> int:
        return self.world // self.together

    @property
    def together(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.context

    @property
    def backend(self) -> str:
        """What carries the collectives, as torch says: nccl or gloo; "" for one rank, which has none."""
        return dist.get_backend() if self.world > 1 else ""

    def largest(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over all ranks: how ranks decide together (halt, not-a-number)."""
        if self.world == 1:
            return list(values)
        with self.trace.of("decide"):
            t = torch.tensor(list(values), dtype=torch.int64, device=self.device)
            dist.all_reduce(t, op=dist.ReduceOp.MAX)
            return [int(v) for v in t.tolist()]

    def total(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks."""
        if self.world == 1:
            return list(values)
        with self.trace.of("total"):
            t = torch.tensor(list(values), dtype=torch.float64, device=self.device)
            dist.all_reduce(t)
            return [float(v) for v in t.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with self.trace.of("gather"):
            dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        if self.world > 1:
            with self.trace.of("barrier"):
                dist.barrier()


def choose_device(wanted: str, local_rank: int, setting: str = "runtime.device") -> torch.device:
    """auto takes CUDA if there is any. Raises ConfigError naming ``setting`` if CUDA was asked for and is absent."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{setting} is cuda, but no CUDA device is visible", f"{setting}: auto or cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def vram_mib() -> int:
    """Memory of the largest visible GPU in MiB, 0 without one."""
    if not torch.cuda.is_available():
        return 0
    sizes = (torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return int(max(sizes) // 2**20)


def nvidia_driver(told: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the NVIDIA driver, as its kernel module tells it; "" without one."""
    try:
        found = re.search(r"Module(?: for \S+)?\s+(\d[\d.]*)", told.read_text(errors="replace")[:1000])
    except OSError:
        return ""
    return found.group(1) if found else ""


def start_group(device: str, timeout_min: float, tensor: int = 1, context: int = 1) -> RankGroup:
    """Join the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (torchrun or the agent set them).

    Raises ConfigError for a world beyond this machine, whose traffic nothing encrypts, unless it was accepted.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        meeting.check_plain_world(os.environ)
        if stays_here(os.environ.get("MASTER_ADDR", "")):
            meeting.keep_here(os.environ)
        recorder.arm()
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(minutes=timeout_min))
    group = RankGroup(rank, world, chosen, tensor=tensor, context=context)
    flight.provide("sequence", lambda: list(group.trace.recent))
    return group


def stop_group(group: RankGroup) -> None:
    if group.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _bf16_hook(world: int, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket in bf16. torch's own hook needs CUDA; this one runs on gloo and NCCL alike."""
    small = bucket.buffer().to(torch.bfloat16).div_(world)
    work = dist.all_reduce(small, async_op=True)
    assert work is not None

    def back(done: torch.futures.Future[Any]) -> Tensor:
        full: Tensor = bucket.buffer().copy_(done.value()[0])
        return full

    return work.get_future().then(back)  # type: ignore[no-any-return]


# DDP compares these annotations with the classes themselves, which postponed evaluation has turned into text
_bf16_hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


def wrap(model: nn.Module, group: RankGroup, cfg: DDPConfig) -> nn.Module:
    """DDP with the profile's settings; the model itself in a world of one, or where it is sharded."""
    if group.world == 1 or cfg.shard:
        return model
    ddp = DistributedDataParallel(
        model,
        device_ids=[group.device.index] if group.device.type == "cuda" else None,
        bucket_cap_mb=cfg.bucket_mb,
        static_graph=cfg.static_graph,
        find_unused_parameters=cfg.find_unused,
        forward_sync_buffers=cfg.broadcast_buffers,
        gradient_as_bucket_view=cfg.gradient_as_bucket_view,
    )
    if cfg.compress == "bf16":
        ddp.register_comm_hook(group.world, _bf16_hook)
    return ddp


def without_sync(model: nn.Module, skip: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced after the last micro-batch only. DDP must have reduced before: see ``_rehearse``."""
    if skip and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if sharded.is_sharded(model):
        sharded.sync_after(model, not skip)
    return nullcontext()

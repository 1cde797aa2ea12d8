"""What would only fail later, found before a launch: ``uvcc-engine train CONFIG --check`` and the console's preflight.

Resolves the job on the very pod that is to run it, holds it against the plan, the ranks, the device and its memory,
and reads one batch from the data source.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa.model import LanguageModel, parameter_count
from uvcc_engine.nsa.outlines import shapes_alone
from uvcc_engine.train import env as lm_env
from uvcc_engine.train import fp8_products, memory_plan
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.distributed import choose_device, vram_mib
from uvcc_engine.train.lm_job import check_plan, check_world, resolve
from uvcc_engine.train.marks import check_marks
from uvcc_engine.train.settings_check import answer
from uvcc_engine.train.sinks import sink_registry
from uvcc_engine.train.text import source_probe
from uvcc_engine.train.trained import exported


def check(job: Mapping[str, Any], ranks: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Facts of a job that can run here. Raises the UvccError that its first step would have met."""
    cfg, effects = lm_env.apply(resolve(job, vram_mib=vram_mib()), environ)
    check_plan(cfg, job.get("plan") or {})
    check_world(cfg, ranks)
    device = choose_device(cfg.runtime.device, 0)
    check_marks(cfg.runtime.nvtx, device)
    fp8_products.check_device(cfg.runtime.precision, device)
    sink_registry.check(sink_registry.names_in(cfg.train.sinks))
    if device.type == "cuda":
        check_gpus(ranks)
    if cfg.train.init:
        with shapes_alone():
            model = LanguageModel(cfg.model)
        exported.start_from(model, Path(cfg.train.init).expanduser())
    room = memory_plan.check(cfg, ranks, device)
    found = source_probe.probe(cfg, rank=0, world=ranks, batches=1)
    return {
        "parameters": parameter_count(cfg.model),
        "device": device.type,
        "tokens_per_step": tokens_per_step(cfg),
        "memory_mib": room.needed_mib,
        "memory_free_mib": room.free_mib,
        "first_batch_s": found.seconds[0],
        "source": cfg.data.source,
        "environment": {e.name: e.value for e in effects},
    }


def tokens_per_step(cfg: LMConfig) -> int:
    """Tokens of one optimizer step over all ranks."""
    return cfg.train.batch_size * cfg.train.accumulate * cfg.train.seq_len


def check_gpus(ranks: int) -> None:
    """Each rank needs a GPU of its own."""
    there = torch.cuda.device_count()
    if ranks > there:
        raise ConfigError(f"{ranks} ranks but {there} GPUs", "job.ranks is at most the number of GPUs")


def main(argv: list[str]) -> int:
    """Job and ranks as JSON on stdin ({job, ranks, env}); the facts, or error and hint, as one JSON line on stdout."""
    return answer(lambda asked: check(asked["job"], int(asked["ranks"]), {**os.environ, **asked.get("env", {})}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A small language model run: its config, one rank in this process, two ranks in processes of their own, a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked import ForkedRank, train_command

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.distributed import RankGroup
from uvcc_engine.train.loop import LmTrainer, LoopOutcome
from uvcc_engine.train.text.data import Cursor, Packer
from uvcc_engine.train.text.sources import Synthetic
from uvcc_engine.train.text.tokenizer import ByteTokenizer

SMALL = {
    "model": {"vocab": 256, "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16},
    "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 16},
    "data": {"source": "synthetic", "tokenizer": "byte", "val_percent": 20},
    "runtime": {"device": "cpu", "precision": "fp32"},
    "train": {"steps": 12, "seq_len": 48, "batch_size": 4, "lr": 0.01, "warmup": 2, "log_every": 1},
}


def small(**train: object) -> lm_config.LMConfig:
    return lm_config.from_mapping({**SMALL, "train": {**SMALL["train"], **train}})


def packer_of(cfg: lm_config.LMConfig, val: bool, cursor: Cursor | None) -> Packer:
    source = Synthetic(cfg.train.seed)
    return Packer(
        source, ByteTokenizer(), seq_len=cfg.train.seq_len, rank=0, world=1, val=val, val_percent=20, cursor=cursor
    )


def run_here(cfg: lm_config.LMConfig, directory: Path, *, halt_at: int = 0, resume: bool = False) -> LoopOutcome:
    manifest = ck.latest_verified(directory / "checkpoints", run="lm") if resume else None
    if resume:
        (directory / ".HALT").unlink()
    with RunWriter.open(directory, "lm", resume_step=manifest.step if manifest else None) as writer:
        steps: list[int] = []

        def on_alive(stepped: bool) -> None:
            steps.extend([1] * stepped)
            if stepped and len(steps) == halt_at - 1:
                write_halt(directory, HaltRequest("halt", "n1", "lm"))

        trainer = LmTrainer(
            cfg,
            RankGroup(0, 1, torch.device("cpu")),
            writer,
            ByteTokenizer(),
            lambda val, cursor: packer_of(cfg, val, cursor),
            on_alive=on_alive,
        )
        if manifest:
            trainer.resume_from(manifest)
        return trainer.run()


Rank = ForkedRank | subprocess.Popen[str]
PATIENCE_S = 500.0  # for a machine that is busy with other tests


def start_ranks(
    directory: Path, port: int, *extra: str, world: int = 2, more: Mapping[str, str] | None = None
) -> Sequence[Rank]:
    """``world`` ranks of one training; with ``more`` in their environment they are processes of their own."""
    text = directory / "text.txt"
    if not text.exists():
        directory.mkdir(parents=True, exist_ok=True)
        text.write_text(
            "\n\n".join(t for _, t in zip(range(40), (t for _, t in Synthetic(3).numbered_documents(0)), strict=False))
        )
    config = directory / "small.json"  # YAML reads JSON
    data = {"source": "local", "path": str(text), "tokenizer": "byte", "val_percent": 10}
    config.write_text(json.dumps({**SMALL, "data": data, "train": {**SMALL["train"], "save_every": 3, "steps": 400}}))
    arguments = [str(config), "--out", str(directory / "run"), "--run", "lm", *extra]
    env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }
    said = [directory / f"stderr{r}.txt" for r in range(world)]
    ranks = [{**env, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]
    if more is None:
        return [ForkedRank(e, path, train_command(arguments)) for e, path in zip(ranks, said, strict=True)]
    code = "import sys; from uvcc_engine.train.worker import cli; sys.exit(cli(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments]
    return [subprocess.Popen(command, env=e, stderr=subprocess.PIPE, text=True) for e in ranks]


def free_port() -> int:
    return ports(1)[0]


def wait_for_step(directory: Path, step: int, processes: Sequence[Rank]) -> None:
    """Until the last rank has done ``step``; AssertionError with what the ranks said if one of them ends before."""
    beats = directory / "run" / f"heartbeat_rank{len(processes) - 1}.jsonl"
    end = time.monotonic() + PATIENCE_S
    while all(p.poll() is None for p in processes):
        if time.monotonic() > end:
            for process in processes:
                process.kill()
            raise AssertionError(f"{beats.name} has no step {step} after {PATIENCE_S:.0f} s")
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(0.05)
        if beats.exists() and any(
            json.loads(x)["step"] >= step for x in beats.read_text().splitlines() if x.endswith("}")
        ):
            return
    raise AssertionError([p.communicate()[1] for p in processes])


class Hub:
    """A dataset of three shards of forty documents, as the datasets library shows it; ``fail`` is asked before each."""

    num_shards = 3

    def __init__(self, fail: Callable[[], None], shard: int = -1, skip: int = 0) -> None:
        self.fail, self.shard, self.from_row = fail, shard, skip

    def skip(self, n: int) -> Hub:
        return Hub(self.fail, self.shard, n)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for row in range(self.from_row, 40):
            self.fail()
            yield {"text": f"shard {self.shard} row {row}. " * 4}


def with_hub(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None] = lambda: None) -> list[Hub]:
    """Put such a hub in the library's place; returns the list of its datasets as they are opened."""
    opened: list[Hub] = []

    def load(name: str, *, split: str, streaming: bool) -> Hub:
        assert (name, split, streaming) == ("HuggingFaceFW/fineweb-edu", "train", True)
        opened.append(Hub(fail))
        return opened[-1]

    module, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    module.load_dataset = load  # type: ignore[attr-defined]
    distributed.split_dataset_by_node = lambda d, rank, world_size: Hub(d.fail, rank)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setitem(sys.modules, "datasets.distributed", distributed)
    return opened

"""``bench train``: optimizer steps of the language model against the same model with dense SDPA, in turn, in one run.

On CUDA the M7C row at S = 2048 (bf16, GPT-2 vocabulary) is added; without a GPU it is left out. Rows of 2,048 and 8,192
tokens on a CPU (``m7c_byte_2048_vs_dense``, ``m7c_byte_8192_vs_dense``) take minutes and are measured where ``--rows``
names them. ``overhead_share`` is the part of a real trainer's time that logging, heartbeats and halt checks took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from uvcc_engine.bench.work.lm_step import Step, dense, shape
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.machine.turns import in_turn, ratio
from uvcc_engine.contract.parsing.suggest import CLOSE, did_you_mean
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.train.allocator import keep_memory
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.distributed import RankGroup
from uvcc_engine.train.loop import LmTrainer
from uvcc_engine.train.text.data import Cursor, Packer
from uvcc_engine.train.text.sources import Synthetic
from uvcc_engine.train.text.tokenizer import ByteTokenizer

CPU_ROWS: Final = ("showcase_vs_dense", "m7c_byte_512_vs_dense", "overhead_share")
LONG_ROWS: Final = {"m7c_byte_2048_vs_dense": 2048, "m7c_byte_8192_vs_dense": 8192}  # tokens; only where asked for
GPU_ROWS: Final = ("m7c_2048_gpu",)
BARS: Final = {"m7c_byte_512_vs_dense": 0.85, "m7c_byte_2048_vs_dense": 0.8, "m7c_byte_8192_vs_dense": 1.3}
"""The least part of the dense twin's rate, on one thread."""
MOST_OVERHEAD: Final = 0.01
ONE_THREAD: Final = "1_threads"


@dataclass(frozen=True, slots=True)
class Versus:
    """A model to be held against its dense twin: ``steps`` optimizer steps make one figure."""

    cfg: LMConfig
    steps: int


def _on_cpu(cfg: LMConfig) -> LMConfig:
    return replace(cfg, runtime=replace(cfg.runtime, device="cpu", precision="fp32", gradient_checkpointing=False))


def cases(name: str) -> Versus:
    """The model of a row, by the row's name."""
    if name == "showcase_vs_dense":
        return Versus(_on_cpu(shape("train_showcase", seq_len=128, batch_size=8)), 10)
    if name == "m7c_byte_512_vs_dense":
        cfg = shape("m7c_125m_2xa100_production", seq_len=512, batch_size=2, accumulate=1)
        return Versus(_on_cpu(cfg), 1)
    if name in LONG_ROWS:  # two of the twelve layers: the ratio is nearly theirs, and a step ends within a minute
        cfg = shape("m7c_125m_2xa100_production", seq_len=LONG_ROWS[name], batch_size=1, accumulate=1)
        return Versus(_on_cpu(replace(cfg, model=replace(cfg.model, n_layers=2))), 1)
    return Versus(shape("m7c_125m_80g", seq_len=2048, batch_size=16, accumulate=1), 5)


def against_dense(name: str, case: Versus, device: torch.device, runs: int, metric: str) -> Row:
    """Tokens per second of NSA; the reference is dense attention, the ratio the median of the rounds' ratios."""
    nsa, twin = Step(case.cfg, device), Step(dense(case.cfg), device)
    for step in (nsa, twin):  # compiles, sizes the allocator's pools, warms caches
        step.seconds()
    ours, theirs = in_turn([lambda: nsa.rate(case.steps), lambda: twin.rate(case.steps)], runs)
    found = row(name, metric, "tokens/s", ours, statistics.median(theirs))
    share, least = ratio(ours, theirs).value, BARS.get(name) if metric == ONE_THREAD else None
    if least is None:
        return replace(found, ratio=share)
    return replace(found, ratio=share, bar=least * statistics.median(theirs), met=share >= least)


def overhead(steps: int, runs: int) -> Row:
    """Share of the showcase trainer's own time, with its own log interval, from what it measures itself."""
    return held(row("overhead_share", "share", "", [loading_share(steps) for _ in range(runs)]), MOST_OVERHEAD)


def loading_share(steps: int) -> float:
    cfg = _on_cpu(shape("train_showcase", steps=steps))

    def packer(val: bool, cursor: Cursor | None) -> Packer:
        percent = cfg.data.val_percent
        return Packer(
            Synthetic(1),
            ByteTokenizer(),
            seq_len=cfg.train.seq_len,
            rank=0,
            world=1,
            val=val,
            val_percent=percent,
            cursor=cursor,
        )

    with tempfile.TemporaryDirectory(prefix="uvcc-bench-") as folder:
        with RunWriter.open(folder, "bench") as writer:
            LmTrainer(cfg, RankGroup(0, 1, torch.device("cpu")), writer, ByteTokenizer(), packer).run()
        beats = (Path(folder) / "heartbeat_rank0.jsonl").read_text().splitlines()
    shares = [float(b["own_share"]) for b in map(json.loads, beats) if b["msg"] == "progress" and "own_share" in b]
    return statistics.mean(shares)


def measure(names: Sequence[str], threads: Sequence[int], runs: int) -> list[Row]:
    """The rows named; those on the CPU once for each number of threads."""
    found: list[Row] = []
    before = torch.get_num_threads()
    keep_memory()
    try:
        for name in names:
            if name in GPU_ROWS:
                found.append(against_dense(name, cases(name), torch.device("cuda"), runs, "toks_per_s"))
                continue
            if name == "overhead_share":
                torch.set_num_threads(1)
                found.append(overhead(steps=200, runs=runs))
                continue
            for n in threads:
                torch.set_num_threads(n)
                found.append(against_dense(name, cases(name), torch.device("cpu"), runs, f"{n}_threads"))
    finally:
        torch.set_num_threads(before)
    return found


def pick(
    asked: str, known: Sequence[str], gpu_only: Sequence[str], cuda: bool, say: Callable[[str], None]
) -> list[str]:
    """The rows asked for, all by default. What needs a GPU is left out without one, said, and refused if asked for."""
    names = [n for n in asked.split(",") if n] or [n for n in known if cuda or n not in gpu_only]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"one of: {', '.join(known)}", CLOSE)
            raise ConfigError(f"unknown row {name!r}", hint)
        if name in gpu_only and not cuda:
            raise ConfigError(f"{name} needs a CUDA device", "run it on a pod that has one")
    left_out = [n for n in known if n in gpu_only and n not in names]
    if left_out and not asked:
        say(f"left out without a GPU: {', '.join(left_out)}")
    return names


def _counts(text: str) -> list[int]:
    """Numbers of threads, comma-separated. Raises ArgumentTypeError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"numbers of threads, comma-separated, not {text!r}")
    return [int(part) for part in parts]


def main(argv: Sequence[str]) -> int:
    parser = RaisingParser(prog="uvcc-engine bench train", description=__doc__)
    parser.add_argument("--rows", default="", help="comma-separated row names")
    parser.add_argument("--runs", type=natural, default=5, help="rounds of both models")
    parser.add_argument(
        "--threads", type=_counts, default=[], help="numbers of CPU threads, comma-separated (default: all, then 1)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    every = host.usable_cpus()
    threads = args.threads or sorted({every, 1}, reverse=True)
    names = pick(
        args.rows,
        (*CPU_ROWS, *(LONG_ROWS if args.rows else ()), *GPU_ROWS),
        GPU_ROWS,
        torch.cuda.is_available(),
        lambda text: print(text, file=sys.stderr),
    )
    rows = measure(names, threads, max(1, args.runs))
    print(to_json(rows) if args.json else to_text(rows))
    return 0

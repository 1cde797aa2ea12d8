"""One rank of several that train in every way asked for: straight through, and again from a checkpoint in between.

    RANK=0 WORLD_SIZE=2 ... python exact_rank.py FOLDER ACCUMULATE,... LAYERS [MORE]

``MORE``: sections of the config, as JSON, for parts shared out, another optimizer, logits in chunks; ``compress`` and
``static``: the ways of sending gradients and of keeping the graph, if not both; ``struck``: [rank, step] whose
gradient stops being a number once, in a second start from the beginning; ``once``: no second start; ``killed``: [rank,
step] that ends there by SIGKILL, in a first start that leaves nothing else, which a second one with ``"killed": []``
goes on from. ``moment``: [rank, share] instead: that rank ends right before one of its writes, after that share of
those of a whole training.

Rank 0 leaves ``FOLDER/exact.json``: per way, the tensors' hash of both. The checkpoint is all that the second start
has, as after a kill.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_kit import SMALL
from torch import Tensor

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.dimensions.sharded import part
from uvcc_engine.train.distributed import RankGroup, start_group, stop_group
from uvcc_engine.train.loop import LmTrainer
from uvcc_engine.train.text.data import Cursor, Packer
from uvcc_engine.train.text.sources import Synthetic
from uvcc_engine.train.text.tokenizer import ByteTokenizer

STEPS, SAVED = 4, 2


def trained(
    cfg: lm_config.LMConfig,
    group: RankGroup,
    folder: Path,
    manifest: ck.CheckpointManifest | None,
    killed: Sequence[int] = (),
    struck: Sequence[int] = (),
) -> str:
    done = manifest.step if manifest else 0

    def on_alive(stepped: bool) -> None:
        nonlocal done
        done += stepped
        if stepped and [group.rank, done] == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    def packer(val: bool, cursor: Cursor | None) -> Packer:
        return Packer(
            Synthetic(cfg.train.seed),
            ByteTokenizer(),
            seq_len=cfg.train.seq_len,
            rank=group.replica,
            world=group.replicas,
            val=val,
            val_percent=20,
            cursor=cursor,
        )

    step = manifest.step if manifest else None
    with RunWriter.open(folder, "lm", group.rank, f"p0r{group.rank}s0t0", lead=group.lead, resume_step=step) as writer:
        kind = LmTrainer if list(struck[:1]) != [group.rank] else struck_once(struck[1])
        trainer = kind(cfg, group, writer, ByteTokenizer(), packer, on_alive=on_alive)
        if manifest:
            trainer.resume_from(manifest)
        return trainer.run().tensors_sha256


class Writes:
    """Counts what this process is about to write below ``folder``: files opened, renamed and removed. ``last``: the one
    that it does not live to do."""

    CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link")

    def __init__(self, folder: Path) -> None:
        self.folder, self.done, self.last = str(folder), 0, 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[object, ...]) -> None:
        if event in self.CHANGES and str(given[0]).startswith(self.folder):
            self.done += 1
            if self.done == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def struck_once(step: int) -> type[LmTrainer]:
    """A trainer with a fault in that step, the first time: after the ranks' gradients were reduced, on this one."""

    class Struck(LmTrainer):
        done = False

        def _norm(self) -> Tensor:
            if self.steps_done + 1 == step and not self.done:
                self.done = True
                for p in self.model.parameters():
                    if p.grad is not None:
                        part(p.grad).fill_(torch.nan)
            return super()._norm()

    return Struck


def main(folder: Path, accumulations: list[int], layers: int, more: Mapping[str, Any]) -> None:
    ddp = more.get("ddp") or {}
    group = start_group("cpu", 2.0, ddp.get("tensor", 1), ddp.get("context", 1))
    found: dict[str, list[str]] = {}
    graphs = (False,) if more.get("ddp") else more.get("static", (False, True))
    killed = more.get("killed")
    ways = more.get("compress", ("bf16", "off"))
    for accumulate, compress, static in itertools.product(accumulations, ways, graphs):
        ddp = more.get("ddp") or {"static_graph": static, "bucket_mb": 1}
        asked = {**SMALL["train"], "steps": STEPS, "save_every": SAVED, "accumulate": accumulate}
        cfg = lm_config.from_mapping(
            {
                **SMALL,
                "model": {**SMALL["model"], "n_layers": layers, **more.get("model", {})},
                "train": {**asked, **more.get("train", {})},
                "ddp": {"compress": compress, **ddp},
            }
        )
        name = f"accumulate {accumulate}, compress {compress}, static graph {static}"
        there = folder / name.replace(" ", "_").replace(",", "")
        if killed:
            trained(cfg, group, there, None, killed)
        if moment := more.get("moment"):
            writes = Writes(folder)
            trained(cfg, group, folder / "counted", None)
            if group.rank == moment[0]:
                writes.done, writes.last = 0, max(1, int(moment[1] * writes.done))
            trained(cfg, group, there, None)
        straight = trained(cfg, group, there if killed is None else folder / "straight", None)
        if more.get("once"):
            found[name] = [straight]
            continue
        if killed is not None:
            last = max(
                set.intersection(*(set(found) for found in group.gather(ck.steps_present(there / "checkpoints")))),
                default=0,
            )
            manifest = ck.verify_step(there / "checkpoints", last, run="lm") if last else None
            found[name] = [straight, trained(replace(cfg), group, there, manifest)]
            continue
        if struck := more.get("struck"):
            found[name] = [straight, trained(replace(cfg), group, folder / "struck", None, (), struck)]
            continue
        manifest = ck.verify_step(there / "checkpoints", SAVED, run="lm")
        group.barrier()
        again = trained(replace(cfg), group, there, manifest)
        found[name] = [straight, again]
    if group.lead:
        (folder / "exact.json").write_text(json.dumps(found))
    stop_group(group)


if __name__ == "__main__":
    more = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    main(Path(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], int(sys.argv[3]), more)

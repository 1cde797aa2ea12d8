"""What a resumed training does again, held against what was recorded the first time: an exact resume proves itself.

A training that goes on from a checkpoint repeats the steps that came after it. Their rows are still in
``training.csv``, and where an earlier checkpoint was chosen the later ones lie aside: the same settings on the same
number of ranks must lead to the same losses, digit by digit, and to the same tensors.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.distributed import RankGroup

MOST_BYTES: Final = 64 << 20  # of a table that is read


@dataclass
class Repeated:
    """The record of steps that will be done again: losses by step as the table has them, and the SHA-256 of the tensors
    at the step of the newest checkpoint (-1: none). ``of_rollback``: not because of a resume, but of a rollback.
    ``tell`` says once what came of it."""

    losses: Mapping[int, str] = field(default_factory=dict)
    checkpoint: int = -1
    tensors: str = ""
    of_rollback: bool = False
    _steps: list[int] = field(default_factory=list)
    _differs: list[int] = field(default_factory=list)
    _held: bool = False  # the tensors were compared
    _told: bool = False

    def and_after(self, step: int, directory: Path) -> Repeated:
        """What is to be repeated once training went back to ``step`` by itself; asked before the rows are cut off."""
        known = {} if self._told else self.losses
        held = (-1, "") if self._told or self._held else (self.checkpoint, self.tensors)
        return Repeated({**known, **_losses(directory / files.TRAINING, step)}, *held, of_rollback=True)

    def row(self, step: int, loss: float) -> None:
        """A step was done and its loss logged."""
        if step in self.losses:
            self._steps.append(step)
            if self.losses[step] != f"{loss:.9g}":
                self._differs.append(step)

    def saved(self, step: int, tensors: str) -> None:
        """A checkpoint was written."""
        if step == self.checkpoint:
            self._held = True
            if tensors != self.tensors:
                self._differs.append(step)

    def over(self, step: int) -> bool:
        """Whether all that was recorded has been repeated."""
        return step >= max([*self.losses, self.checkpoint], default=-1)

    def tell(self, writer: RunWriter) -> None:
        """The directory's lead says how the repeated steps came out; nothing where none was, and never twice."""
        if self._told or not writer.lead or not (self._steps or self._held):
            return
        self._told = True
        compared = [*self._steps, *([self.checkpoint] if self._held else [])]
        writer.event(
            files.STEPS_REPEATED,
            level="warn" if self._differs else "info",
            first=min(compared),
            last=max(compared),
            rows=len(self._steps),
            checkpoint=self.checkpoint if self._held else -1,
            differs=min(self._differs, default=-1),
            **({"after": files.ROLLED_BACK} if self.of_rollback else {}),
        )


def recorded(
    directory: Path, group: RankGroup, cfg: lm_config.LMConfig, resume_step: int | None, aside: str, *, leads: bool
) -> Repeated:
    """What this rank will repeat; every rank asks, before any of them writes. ``aside``: the folder with the later
    checkpoints, on the rank that moved them; ``leads``: whether this rank writes the tables.

    Nothing where the training begins, or goes on with other settings or ranks: it is not to come out the same then.
    """
    same = resume_step is not None and _same(directory, group, cfg)
    later = _newest(directory / aside) if aside else None
    found = group.gather((same, later))
    if not all(one for one, _ in found):
        return Repeated()
    step, tensors = max((one for _, one in found if one is not None), default=(-1, ""))
    losses = _losses(directory / files.TRAINING, resume_step or 0) if leads else {}
    return Repeated(losses, step, tensors)


def _same(directory: Path, group: RankGroup, cfg: lm_config.LMConfig) -> bool:
    try:
        facts = files.read_json(directory / files.RUN_JSON)
    except UvccError:
        return False
    return facts.get("world") == group.world and _plain(facts.get("config")) == _plain(lm_config.to_mapping(cfg))


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _newest(aside: Path) -> tuple[int, str] | None:
    """Step and tensors of the newest checkpoint in a folder, where its manifest can be read."""
    for step in ck.steps_present(aside):
        try:
            manifest = ck.read_manifest(ck.step_dir(aside, step))
            lead = min(manifest.ranks)
            return step, str(manifest.ranks[lead].files[ck.rank_file(lead)]["sha256"])
        except (UvccError, KeyError, ValueError):
            continue
    return None


def _losses(path: Path, after: int) -> dict[int, str]:
    """Losses of later steps, as they stand in the table; what is no row is left out."""
    found: dict[int, str] = {}
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        with path.open(newline="", errors="replace") as f:
            for row in csv.DictReader(f):
                step, loss = row.get("step") or "", row.get("loss") or ""
                whole = None not in row.values()  # the last line may be torn
                if whole and step.isdecimal() and int(step) > after:
                    found[int(step)] = loss
    except (OSError, csv.Error):
        return {}
    return found

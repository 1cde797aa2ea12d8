"""Whether a smoke can show what its gates ask, said before anything is rented: a gate without a row is never passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from uvcc_console.plan.schema import CommandJobSettings, GatesPart, LmJobSettings, PrivateJobSettings
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.parsing.small_text import read_small

FALLS = 2  # rows that a falling loss takes
STEP_MARK: Final = "@"  # in a gate's name, before the step of the full run that it was measured at


def check(job: LmJobSettings, steps: int, gates: GatesPart) -> None:
    """Hold the rows of ``steps`` steps against the gates. Raises ConfigError naming the gate and what would do."""
    every = log_every(job)
    for gate, rows in _rows(gates).items():
        if every and steps // every < rows:
            what = (
                f"gates.{gate} needs {rows} rows, a smoke of {steps} steps that logs every {every} has {steps // every}"
            )
            raise ConfigError(what, f"smoke.steps of {rows * every}, or job.overrides.train.log_every {steps // rows}")


def check_private(job: PrivateJobSettings, steps: int, gates: GatesPart) -> None:
    """Hold ``gates.loss_falls`` against what a smoke of ``steps`` steps opens: its first loss and its last.

    Raises ConfigError where fewer than two losses are opened.
    """
    if not gates.loss_falls:
        return
    if "loss" not in job.reveal:
        raise ConfigError("gates.loss_falls, and job.reveal opens no loss", "list loss, or gates.loss_falls: false")
    if steps < FALLS:
        raise ConfigError(
            f"gates.loss_falls needs the losses of {FALLS} steps, the smoke has {steps}",
            f"smoke.steps of {FALLS}, or gates.loss_falls: false",
        )


def _rows(gates: GatesPart) -> dict[str, int]:
    """Rows that each gate needs to be measured; none for those that are off."""
    return {
        "loss_falls": FALLS * gates.loss_falls,
        "toks_per_s": int(gates.toks_per_s > 0),
        "gate_entropy": int(gates.gate_entropy > 0),
        "gate_collapse": int(gates.gate_collapse < 1),
        "fetch_s": int(gates.fetch_s > 0),
    }


def check_settings(found: Mapping[str, Any], gates: GatesPart) -> None:
    """Hold the gates against the engine's word on the settings, empty where only the pod knows. Raises ConfigError."""
    none = GatesPart()
    for key, needed, why, asked in (
        ("model.attention", ("nsa",), "which has no gates between branches", ("gate_entropy", "gate_collapse")),
        ("runtime.device", ("auto", "cuda"), "which has no memory of a GPU", ("gpu_mem_mib",)),
    ):
        value = found.get(key.rpartition(".")[2], needed[0])
        for gate in asked:
            if value not in needed and getattr(gates, gate) != getattr(none, gate):
                what = f"gates.{gate} cannot be measured: {key} is {value}, {why}"
                raise ConfigError(what, f"gates.{gate}: {getattr(none, gate):g}, or {key}: {needed[0]}")


def windows(at: Sequence[int]) -> list[tuple[int, int]]:
    """(step behind which it begins, step that it ends with) of each window of ``gates.at``."""
    return list(zip((0, *at), at, strict=False))


def check_windows(steps: int, gates: GatesPart, every: int = 1) -> None:
    """Hold ``gates.at`` against a full run of ``steps`` steps with a row every ``every``; 0 where only the pod knows.

    Raises ConfigError for steps out of order or behind the end, and for windows without the rows that a gate needs.
    """
    for since, until in windows(gates.at):
        if until <= since:
            raise ConfigError(f"gates.at is {gates.at}", "name each step once, in ascending order")
        if until > steps:
            raise ConfigError(f"gates.at names step {until}, the full run ends with step {steps}", "take it out")
        there = until // every - since // every if every else until
        for gate, rows in _rows(gates).items():
            if there < rows:
                what = f"gates.{gate} needs {rows} rows, steps {since + 1} to {until} of gates.at have {there}"
                raise ConfigError(what, f"steps further apart, or a row more often than every {every} steps")


def check_resume(job: PrivateJobSettings | LmJobSettings | CommandJobSettings, steps: int, gates: GatesPart) -> None:
    """Hold ``gates.resume_at`` against a full run of ``steps`` steps. Raises ConfigError where nothing could be
    repeated: no checkpoint before that step, or no step after it."""
    at = gates.resume_at
    if not at:
        return
    if not isinstance(job, LmJobSettings):
        raise ConfigError(f"gates.resume_at is of language models, this job is of kind {job.kind}", "take it out")
    if at >= steps:
        raise ConfigError(f"gates.resume_at is step {at}, the full run ends with step {steps}", "name an earlier step")
    every = _of_train(job, "save_every", -1)
    if every < 0 or job.overrides.get("train", {}).get("save_every") == 0:
        raise ConfigError("gates.resume_at needs a checkpoint before its step", "job.overrides.train.save_every")
    if 0 < at <= every:
        what = f"gates.resume_at is step {at}, the first checkpoint is that of step {every}"
        raise ConfigError(what, f"a step after {every}, or a lower job.overrides.train.save_every")


def log_every(job: LmJobSettings) -> int:
    """Steps between two rows of the job's config; 0 where only the pod can tell."""
    return _of_train(job, "log_every", 1)


def _of_train(job: LmJobSettings, key: str, usual: int) -> int:
    """A number of the job's section ``train``, the largest of what ``auto`` may pick; 0 where only the pod can tell."""
    own = job.overrides.get("train", {}).get(key)
    if isinstance(own, int):
        return own
    names = _packaged() if job.config == "auto" else [job.config]
    return max((_of(name, key, usual) for name in names), default=0)


def _packaged() -> list[str]:
    """The configs that ``auto`` picks from, by the pod's memory."""
    folder = resources.files("uvcc_engine") / "train" / "configs"
    return [p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.startswith("m7c_125m_") and "g." in p.name]


def _of(name: str, key: str, usual: int) -> int:
    packaged = resources.files("uvcc_engine") / "train" / "configs" / f"{name}.yaml"
    path = Path(name).expanduser()
    if packaged.is_file():
        raw: Any = yaml_text.load(packaged.read_text(encoding="utf-8"))
    elif path.is_file():
        try:
            raw = yaml_text.load(read_small(path))
        except (OSError, yaml.YAMLError, ValueError):
            return 0  # the worker's own reader names what is wrong with it
    else:
        return 0
    train = raw.get("train") if isinstance(raw, dict) else None
    value = train.get(key, usual) if isinstance(train, dict) else usual
    return value if isinstance(value, int) and not isinstance(value, bool) else 0

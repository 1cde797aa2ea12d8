"""What a worker leaves in its run directory, as frozen records, and the one way of reading each of them.

:func:`parse` answers for every text there is: with a record whose fields are what they are said to be, or with
:class:`Malformed`, which says why not. A record is used as a whole or refused as a whole where what it is about cannot
be told (its step, its phase, its worker); of the rest, what is not of its type is left out. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from uvcc_engine.contract.parsing.untrusted import (
    LATEST,
    STEPS,
    as_float,
    as_int,
    as_object,
    as_text,
    bounded_copy,
    hint_of,
    scalar_text,
)
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.eventlog import LEVELS
from uvcc_engine.contract.text import clean

LONGEST_LINE: Final = 1 << 18
LONGEST_DOCUMENT: Final = 1 << 20
MOST_NAMES: Final = 64
BEAT_NODES: Final = 64
STATUSES: Final = ("done", "halted", "failed")
_DIGEST: Final = re.compile(r"[A-Za-z0-9_.:+/=-]{1,128}")
_EVENT: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]{0,63}")
_HEARTBEAT: Final = re.compile(r"heartbeat_rank\d{1,6}\.jsonl")
_EXIT: Final = re.compile(r"exit(_rank\d{1,6})?\.json")
_RESULT: Final = re.compile(r"result(_rank\d{1,6})?\.json")
_WHOLE: Final = ("rank", "pid", "sent_bytes", "collective_seq")
_REAL: Final = (
    "dt_fetch_s",
    "gate_entropy_mean",
    "gate_collapse_frac",
    "mem_mib",
    "bytes",
    "ts",
    "step_s",
    "waiting_s",
    "step_rounds",
    "step_bytes",
    "step_audits",
    "step_audited",
)
_MEASURED: Final = ("loss", "toks_per_s", "samples_per_s")  # may be NaN: that is a finding
_WORDS: Final = ("msg", "halt_nonce", "waiting_on", "coord")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A text that is no record of its kind, what is wrong with it, what to do; ``n``: so many in a row."""

    why: str
    hint: str = ""
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life. ``coord`` is "" where the record names none; ``fields`` holds all of it that could be used."""

    coord: str = ""
    step: int = -1
    phase: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One line of ``events.jsonl``: ``name`` at ``ts`` (seconds of the pod's clock) with its ``fields``.

    ``coord`` is the worker that its fields name, ``by`` the one that wrote it; empty where that is none.
    """

    name: str
    level: str = "info"
    coord: str = ""
    by: str = ""
    ts: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRoot:
    """The root that a worker finalised for an epoch, and the digest of what it exchanged with each peer, all hex."""

    coord: str = ""
    epoch: int
    root: str
    pairs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """``exit.json``: how a rank ended, at ``ts`` (seconds of the pod's clock). ``checkpoint``: SHA-256 of the manifest
    that it left, or "".

    ``fields`` holds all of the record that could be used, ``error`` and ``hint`` among it.
    """

    run: str
    coord: str = ""
    status: str = ""
    step: int = -1
    checkpoint: str = ""
    error: str = ""
    hint: str = ""
    ts: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """``result.json``: the hash of the final result, and the revealed values that are finite numbers."""

    run: str
    coord: str = ""
    result_hash: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """``run.json``: what the lead worker of a directory says that it runs."""

    run: str
    coord: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


Record = Heartbeat | EngineRecord | ReportedRoot | Exit | Result | Facts


def parse(src: str, text: str) -> Record | Malformed:
    """Read one line (heartbeats, events) or one document of the file ``src`` of a run directory. Never raises."""
    read = _reader(src)
    if read is None:
        return Malformed(f"{clean(src, 80)} holds no records")
    found = as_object(text, LONGEST_DOCUMENT if src.endswith(".json") else LONGEST_LINE)
    return Malformed("not a JSON object") if found is None else read(found)


def _reader(src: str) -> Callable[[Mapping[str, Any]], Record | Malformed] | None:
    if src == files.EVENTS:
        return engine_record
    if src == files.RUN_JSON:
        return facts
    for pattern, read in ((_HEARTBEAT, heartbeat), (_EXIT, exit_record), (_RESULT, result)):
        if pattern.fullmatch(src):
            return read
    return None


def heartbeat(found: Mapping[str, Any]) -> Heartbeat | Malformed:
    """A heartbeat, if its step, its phase and the worker that it names are such."""
    step, phase = as_int(found.get("step", -1), -1, STEPS), as_text(found.get("phase", ""), 32)
    coord = _coord(found)
    if step is None or phase is None or coord is None:
        return Malformed("a heartbeat without a step, phase or worker that can be read")
    kept = bounded_copy(found, nodes=BEAT_NODES, depth=3) | {"step": step}
    if "phase" in found:
        kept["phase"] = phase
    _drop(kept, _WHOLE, lambda v: as_int(v) is not None)
    _drop(kept, _REAL, lambda v: as_float(v) is not None)
    _drop(kept, _MEASURED, lambda v: isinstance(v, int | float) and not isinstance(v, bool))
    for name in _WORDS:
        if name in kept:
            kept[name] = scalar_text(kept[name], 200)
    return Heartbeat(coord=coord, step=step, phase=phase, fields=kept)


def engine_record(found: Mapping[str, Any]) -> EngineRecord | ReportedRoot | Malformed:
    """A line of ``events.jsonl``; the root of an epoch is a record of its own."""
    name, fields = found.get("event"), found.get("fields") or {}
    if not isinstance(name, str) or not _EVENT.fullmatch(name) or not isinstance(fields, Mapping):
        return Malformed("an event without a name or with fields of another form")
    coord = _coord(fields)
    if coord is None:
        return Malformed("an event of no worker")
    if name == "epoch_root":
        return epoch_root(fields)
    at = as_float(found.get("ts", 0.0), 0.0, LATEST)
    if at is None or ("step" in fields and as_int(fields["step"], -1, STEPS) is None):
        return Malformed("an event whose time or step is none")
    level = found.get("level", "info")
    level = level if level in LEVELS else "info"
    return EngineRecord(name=name, level=level, coord=coord, by=_coord(found) or "", ts=at, fields=bounded_copy(fields))


def epoch_root(fields: Mapping[str, Any], most: int = STEPS) -> ReportedRoot | Malformed:
    """The root of one finalised epoch, at most number ``most``."""
    epoch, digest, pairs = as_int(fields.get("epoch"), 0, most), fields.get("root"), fields.get("pairs", {})
    coord = _coord(fields)
    if epoch is None or coord is None or not is_digest(digest) or not isinstance(pairs, Mapping) or len(pairs) > 64:
        return Malformed("an epoch root without epoch or digest")
    if not all(isinstance(k, str) and 0 < len(k) <= 32 and k.isprintable() and is_digest(v) for k, v in pairs.items()):
        return Malformed("an epoch root with pairs of another form")
    return ReportedRoot(coord=coord, epoch=epoch, root=str(digest), pairs={str(k): str(v) for k, v in pairs.items()})


def exit_record(found: Mapping[str, Any]) -> Exit | Malformed:
    """How a rank ended."""
    coord, step = _coord(found), as_int(found.get("step", -1), -1, STEPS)
    if coord is None or step is None:
        return Malformed(f"an exit of {scalar_text(found.get('coord'), 40)!r}")
    fields = bounded_copy({k: v for k, v in found.items() if k not in ("run", "ts") and v not in ("", None)})
    return Exit(
        run=scalar_text(found.get("run"), 128),
        coord=coord,
        status=scalar_text(found.get("status"), 32),
        step=step,
        checkpoint=scalar_text(found.get("checkpoint"), 128),
        error=scalar_text(found.get("error"), 2000),
        hint=hint_of(found),
        ts=as_float(found.get("ts"), 0.0, LATEST) or 0.0,
        fields=fields,
    )


def result(found: Mapping[str, Any]) -> Result | Malformed:
    """What a rank reports of the result; what was signed counts, and only that."""
    coord, given, digest = _coord(found), found.get("values") or {}, found.get("result_hash", "")
    if coord is None or not isinstance(given, Mapping) or not (digest == "" or is_digest(digest)):
        return Malformed(f"a result of {scalar_text(found.get('coord'), 40)!r}")
    named = {clean(str(k), 48): as_float(v) for k, v in list(given.items())[:MOST_NAMES]}
    values = {k: v for k, v in named.items() if v is not None}
    return Result(
        run=scalar_text(found.get("run"), 128), coord=coord, result_hash=clean(str(digest), 128), values=values
    )


def facts(found: Mapping[str, Any]) -> Facts | Malformed:
    """The resolved configuration of a run."""
    coord = _coord(found)
    if coord is None:
        return Malformed(f"facts of {scalar_text(found.get('coord'), 40)!r}")
    return Facts(run=scalar_text(found.get("run"), 128), coord=coord, fields=bounded_copy(found))


def is_digest(value: object) -> bool:
    """Whether this may be a hash, or whatever a trainer of another kind takes for one: short, and one plain word."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _coord(found: Mapping[str, Any]) -> str | None:
    """The worker that something is about: "" where none is named, None where it cannot be a worker's name."""
    coord = found.get("coord")
    if coord is None:
        return ""
    return coord if isinstance(coord, str) and len(coord) <= 32 and coord.isprintable() else None


def _drop(kept: dict[str, Any], names: tuple[str, ...], fits: Callable[[Any], bool]) -> None:
    for name in names:
        if name in kept and not fits(kept[name]):
            del kept[name]

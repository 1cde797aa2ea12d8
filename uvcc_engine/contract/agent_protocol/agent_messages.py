"""What an agent tells its consoles, as frozen records, and the one way of reading them. Standard library only.

:func:`parse` answers for every line there is: with a record whose fields are of their types and in their ranges, or
with :class:`Malformed`. Fields that are not known here are passed over, so that an older console can watch a newer
agent. A pod is trusted neither with the console's memory nor with its control flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.agent_protocol.wire import AckCode, Lacks
from uvcc_engine.contract.parsing.untrusted import (
    LATEST,
    as_float,
    as_int,
    as_object,
    as_text,
    bounded_copy,
    hint_of,
    scalar_text,
)
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.text import clean

LONGEST: Final = 20 << 20  # the agent itself sends no line longer than 16 MiB
MOST_LINES: Final = 65_536
MOST_NAME: Final = 200
MOST_GPUS: Final = 64
_CODE: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The answer to the command that carried ``nonce``. ``fields``: all of it, read by whoever sent the command."""

    nonce: str
    ok: bool
    code: AckCode = AckCode.FAILED
    error: str = ""
    hint: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Whole lines of the file ``src`` of a run; ``off``: the offset in the file (inode ``ino``) after the last one.

    ``seq`` counts the agent's batches, ``ts`` is the pod's clock in seconds.
    """

    run: str
    src: str
    ino: int
    off: int
    lines: Sequence[str]
    seq: int = 0
    ts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """A file is read from its beginning again; ``reason``: truncated or rotated."""

    run: str
    src: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """``n`` lines of telemetry that the agent left out for this console."""

    run: str
    n: int
    src: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChange:
    """A worker's process started or exited; ``rc``: its exit code, None while it runs or where nobody knows."""

    run: str
    coord: str
    state: Literal["started", "exited"]
    pid: int = 0
    rc: int | None = None
    signal: str = ""
    attempt: int = 0
    ts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltStage:
    """How far a halt request has come on a pod (``coord`` ""), or with one of its workers.

    ``stage``: seen, held, released, halted or gone; gone = the process is absent, and its checkpoint (SHA-256 of the
    manifest) is named only if the exit record and every byte of the checkpoint were checked. ``lacks``: why there is
    none; None where an older agent does not say.
    """

    run: str
    nonce: str
    stage: str
    mode: str = ""
    coord: str = ""
    step: int = -1
    checkpoint: str = ""
    detail: str = ""
    lacks: Lacks | None = None
    ts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """A pod's vital signs at ``ts``: processor share in [0, 1], memory in use and free disk in MiB, its GPUs."""

    ts: float = 0.0
    cpu: float = 0.0
    mem_mib: float = 0.0
    disk_free_mib: float = 0.0
    gpus: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message that only a newer console understands."""

    op: str


Told = Lines | Rewind | Dropped | WorkerChange | HaltStage | Telemetry
"""What an agent says by itself."""
AgentMessage = Told | Ack | Unknown


def parse(line: bytes | str) -> AgentMessage | Malformed:
    """Read one line of an agent. Never raises."""
    found = as_object(line, LONGEST)
    op = found.get("op") if found is not None else None
    if found is None or not isinstance(op, str):
        return Malformed("not a message of an agent")
    read = _READERS.get(op)
    if read is None:
        return Unknown(clean(op, 32))
    return read(found) or Malformed(f"a message {op!r} with fields of another form")


def to_json(message: Told) -> dict[str, Any]:
    """The message as the agent sends it."""
    return {"op": _OPS[type(message)], **dataclasses.asdict(message)}


def _ack(m: Mapping[str, Any]) -> Ack | None:
    nonce, ok = m.get("nonce"), m.get("ok") is True
    if not isinstance(nonce, str) or len(nonce) > MOST_NAME:
        return None
    if ok:
        return Ack(nonce=nonce, ok=True, fields=m)
    error = scalar_text(m.get("error"), 1000) or "refused"
    return Ack(nonce=nonce, ok=False, code=wire.code_of(m), error=error, hint=hint_of(m), fields=m)


def _name(value: object) -> str | None:
    """The name of a run or of a file in its folder: printable, not empty, and of one part."""
    fits = isinstance(value, str) and 0 < len(value) <= MOST_NAME and value.isprintable() and "/" not in value
    return str(value) if fits and value not in (".", "..") else None


def _lines(m: Mapping[str, Any]) -> Lines | None:
    run, src, listed = _name(m.get("run")), _name(m.get("src")), m.get("lines")
    ino, off = as_int(m.get("ino")), as_int(m.get("off"))
    if run is None or src is None or ino is None or off is None or not isinstance(listed, list):
        return None
    if len(listed) > MOST_LINES or not all(isinstance(x, str) for x in listed):
        return None
    return Lines(run=run, src=src, ino=ino, off=off, lines=listed)


def _rewind(m: Mapping[str, Any]) -> Rewind | None:
    run, src = _name(m.get("run")), _name(m.get("src"))
    if run is None or src is None:
        return None
    return Rewind(run=run, src=src, reason=scalar_text(m.get("reason"), 32))


def _dropped(m: Mapping[str, Any]) -> Dropped | None:
    n, run = as_int(m.get("n"), 0), _name(m.get("run"))
    return None if n is None or run is None else Dropped(run=run, n=n, src=scalar_text(m.get("src"), MOST_NAME))


def _change(m: Mapping[str, Any]) -> WorkerChange | None:
    run, found = _name(m.get("run")), worker(m)
    signal = m.get("signal")
    if run is None or found is None or not (signal is None or isinstance(signal, str)):
        return None
    return dataclasses.replace(found, run=run, signal=scalar_text(signal, 16))


def worker(m: object) -> WorkerChange | None:
    """A worker as a change and an acknowledgement describe it; None for anything else."""
    given = m if isinstance(m, Mapping) else {}
    coord, state, rc = as_text(given.get("coord"), 32), given.get("state"), given.get("rc")
    pid, code = as_int(given.get("pid") or 0), as_int(given.get("rc"), -_CODE, _CODE)
    if coord is None or pid is None or (rc is not None and code is None):
        return None
    if state not in ("started", "exited"):
        return None
    return WorkerChange(run="", coord=coord, state=state, pid=pid, rc=code)


def _stage(m: Mapping[str, Any]) -> HaltStage | None:
    run, nonce, stage = _name(m.get("run")), as_text(m.get("nonce"), MOST_NAME), as_text(m.get("stage"), 16)
    step = as_int(-1 if m.get("step") is None else m["step"], -1)
    texts = [m.get(name) for name in ("coord", "checkpoint", "detail", "mode")]
    if run is None or nonce is None or stage is None or step is None:
        return None
    if not all(v is None or isinstance(v, str) for v in texts):
        return None
    coord, checkpoint, mode = (scalar_text(m.get(name), 128) for name in ("coord", "checkpoint", "mode"))
    return HaltStage(
        run=run,
        nonce=nonce,
        stage=stage,
        mode=mode,
        coord=coord,
        step=step,
        checkpoint=checkpoint,
        detail=scalar_text(m.get("detail"), 500),
        lacks=wire.lacks_of(m),
    )


def _telemetry(m: Mapping[str, Any]) -> Telemetry | None:
    at, listed = as_float(m.get("ts", 0.0), 0.0, LATEST), m.get("gpus") or []
    cpu, mem, disk = (as_float(m.get(name) or 0.0, 0.0) for name in ("cpu", "mem_mib", "disk_free_mib"))
    if at is None or cpu is None or mem is None or disk is None or not isinstance(listed, list):
        return None
    gpus = [bounded_copy(g, nodes=32, depth=2) for g in listed[:MOST_GPUS] if isinstance(g, Mapping)]
    return Telemetry(ts=at, cpu=cpu, mem_mib=mem, disk_free_mib=disk, gpus=gpus)


_READERS: Final[dict[str, Callable[[Mapping[str, Any]], AgentMessage | None]]] = {
    wire.ACK: _ack,
    wire.LINES: _lines,
    wire.REWIND: _rewind,
    wire.DROPPED: _dropped,
    wire.PROC: _change,
    wire.HALTED: _stage,
    wire.TELEMETRY: _telemetry,
}
_OPS: Final[dict[type[Told], str]] = {
    Lines: wire.LINES,
    Rewind: wire.REWIND,
    Dropped: wire.DROPPED,
    WorkerChange: wire.PROC,
    HaltStage: wire.HALTED,
    Telemetry: wire.TELEMETRY,
}

"""Messages between a console and a pod's agent: JSON lines, one object a line, both ways.

Commands carry a ``nonce`` and are answered by exactly one ``ack`` with the same nonce. Everything else the agent
sends by itself. Unknown keys are ignored on reading, so that an older console can watch a newer agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing.untrusted import json_of

VERSION: Final = 1

# console -> agent
HELLO: Final = "hello"  # {version, cursors: {"run/file": [ino, off]}, lease_s, holder}
WATCH: Final = "watch"  # {run, cursors?, afresh?}: stream this run's files; afresh = from exactly these cursors
UNWATCH: Final = "unwatch"  # {run}: stop streaming: this console cannot take more now; the files keep it all
LAUNCH: Final = "launch"  # {run, workers: [WorkerSpec...]}: fork one process per spec
HALT: Final = "halt"  # {run, mode: hold|halt|release, nonce, deadline_s?}: a hold not released in time is a halt
SIGNAL: Final = "signal"  # {run, coord|None, signal: USR1|TERM|KILL}: to process groups by recorded identity
FLIGHT: Final = "flight"  # {run}: its workers write flight_<coord>.json, which names this nonce; ack {asked: [coords]}
POLICY: Final = "policy"  # {policy: canonical JSON text}: the agent checks it and signs; ack carries {signature}
RELAY: Final = "relay"  # {run, action: start|stop, config}; ack carries {url, pid}
RELINK: Final = "relink"  # {run, link: {relay_url, stream?, token_file?, ca_file?}}: the relay of a run is there now
PROBE: Final = "probe"  # ack carries the probe JSON (python, torch, gpu, memory, disk, clock)
LEASE: Final = "lease"  # {ttl_s}: renew (0 = give up); without renewal the agent halts its runs by itself. Every
# message of a console whose hello gave lease_s > 0 renews as well
STOP: Final = "stop"  # {grace_s?} end every worker and the relay of this agent, then the agent; ack when all are gone
# agent -> console
ACK: Final = "ack"  # {nonce, ok, code?, error?, hint?, ...}; code: an AckCode
LINES: Final = "lines"  # {run, src, ino, off, seq, ts, lines: [...]}; off = offset after the last line
REWIND: Final = "rewind"  # {run, src, reason: truncated|rotated}
DROPPED: Final = "dropped"  # {run, src, n}: telemetry lines this agent had to drop for this console
PROC: Final = "proc"  # {run, coord, pid, state: started|exited, rc, signal, ts}
HALTED: Final = "halted"  # {run, nonce, mode, stage: seen|held|released|halted|gone, coord, step, checkpoint, detail,
# lacks}; lacks: a Lacks, why a worker that is gone has no verified checkpoint
# gone = process absent; its checkpoint is named only if exit.json and every byte of the checkpoint were checked
TELEMETRY: Final = "telemetry"  # {ts, cpu, mem_mib, disk_free_mib, gpus: [...]}


class AckCode(StrEnum):
    """Why a command was refused. Consoles decide by it; the text beside it is for people."""

    FAILED = "failed"  # for the reason that the text gives
    MALFORMED = "malformed"  # the command is none
    NO_WORKER = "no_worker"  # no worker of the run was ever started on this pod
    FINAL = "final"  # the run is halting: see control.Verdict
    OVERTAKEN = "overtaken"
    OTHER = "other"


class Lacks(StrEnum):
    """Why a worker that is gone shows no verified checkpoint."""

    NOTHING = ""  # it shows one
    DONE = "done"  # it had ended well and needs none
    NO_EXIT = "no_exit"  # it left no exit record of this run
    FAILED = "failed"  # it ended in an error
    NOT_NAMED = "not_named"  # it halted and names no checkpoint
    DAMAGED = "damaged"  # the checkpoint that it names does not verify


class RefusedError(UvccError):
    """An agent's refusal, with its code."""

    def __init__(self, code: AckCode, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.code = code


def code_of(ack: Mapping[str, Any]) -> AckCode:
    """The code of a refusal; FAILED for one of an older agent or of none that is known."""
    found = ack.get("code")
    return AckCode(found) if isinstance(found, str) and found in set(AckCode) else AckCode.FAILED


def lacks_of(halted: Mapping[str, Any]) -> Lacks | None:
    """What an agent says is missing of a worker that is gone; None where it does not say (an older agent)."""
    found = halted.get("lacks")
    return Lacks(found) if isinstance(found, str) and found in set(Lacks) else None


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as one line."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n"


def decode(line: bytes | str) -> dict[str, Any]:
    """Read one line; raises ValueError if it is not a JSON object with an ``op``."""
    found = json_of(line)
    if not isinstance(found, dict) or not isinstance(found.get("op"), str):
        raise ValueError("not an agent message")
    return found

"""What an agent says, parsed totally: bytes into lines, lines into messages whose fields are what they are said to be.

A pod is not trusted with the console's memory nor with its control flow: lines and fields have a length, numbers a
range, and a message that is none is counted instead of ending the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from uvcc_engine.contract import wire
from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.outside import LATEST, hint_of, real, record, said, tidy, whole, word
from uvcc_engine.contract.text import clean

LONGEST: Final = 20 << 20  # the agent itself sends no line longer than 16 MiB
MOST_LINES: Final = 65_536
NAME: Final = 200
MOST_GPUS: Final = 64
ERRORS: Final = "ecc_errors_uncorrected_volatile_total"
_URL: Final = re.compile(r"(https?)://[][A-Za-z0-9_.:-]{1,200}:([0-9]{1,5})/?")
MALFORMED: Final = "malformed"  # what the client puts in the place of messages that were none: {n, sample}


class Lines:
    """Bytes of a stream -> whole lines. One that does not end within ``longest`` bytes is passed over and counted."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._rest: list[bytes] = []
        self._size = 0
        self._skipping = False
        self.overlong = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends."""
        *ends, rest = data.split(b"\n")
        found: list[bytes] = []
        for end in ends:
            if not self._skipping and self._size + len(end) <= self._longest:
                found.append(b"".join((*self._rest, end)))
            elif not self._skipping:
                self.overlong += 1
            self._rest, self._size, self._skipping = [], 0, False
        if not self._skipping:
            self._rest.append(rest)
            self._size += len(rest)
            if self._size > self._longest:
                self._rest, self._size, self._skipping = [], 0, True
                self.overlong += 1
        return found


def message(line: bytes) -> dict[str, Any] | None:
    """One message with its fields checked; None for a line that is none."""
    found = record(line, LONGEST)
    op = found.get("op") if found is not None else None
    if found is None or not isinstance(op, str):
        return None
    check = _CHECKS.get(op)
    if check is None:  # of a newer agent
        return {"op": clean(op, 32)}
    return check(found)


def _acknowledged(m: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rest of an acknowledgement depends on the command: who sent it reads it with ``acks``."""
    nonce = m.get("nonce")
    if not isinstance(nonce, str) or len(nonce) > NAME:
        return None
    found = {**m, "ok": m.get("ok") is True}
    if not found["ok"]:
        found |= {
            "code": wire.code_of(m),
            "error": said(m.get("error"), 1000) or "refused",
            "hint": hint_of(m),
        }
    return found


def _name(value: object) -> str | None:
    """The name of a run or of a file in its folder: printable, not empty, and of one part."""
    fits = isinstance(value, str) and 0 < len(value) <= NAME and value.isprintable() and "/" not in value
    return str(value) if fits and value not in (".", "..") else None


def _lines(m: Mapping[str, Any]) -> dict[str, Any] | None:
    run, src, listed = _name(m.get("run")), _name(m.get("src")), m.get("lines")
    ino, off = whole(m.get("ino")), whole(m.get("off"))
    if run is None or src is None or ino is None or off is None or not isinstance(listed, list):
        return None
    if len(listed) > MOST_LINES or not all(isinstance(x, str) for x in listed):
        return None
    return {"op": wire.LINES, "run": run, "src": src, "ino": ino, "off": off, "lines": listed}


def _rewound(m: Mapping[str, Any]) -> dict[str, Any] | None:
    run, src = _name(m.get("run")), _name(m.get("src"))
    if run is None or src is None:
        return None
    return {"op": wire.REWIND, "run": run, "src": src, "reason": said(m.get("reason"), 32)}


def _dropped(m: Mapping[str, Any]) -> dict[str, Any] | None:
    n, run = whole(m.get("n"), 0), _name(m.get("run"))
    return None if n is None or run is None else {"op": wire.DROPPED, "run": run, "n": n}


def _process(m: Mapping[str, Any]) -> dict[str, Any] | None:
    run, coord, state = _name(m.get("run")), word(m.get("coord"), 32), m.get("state")
    pid, rc, signal = whole(m.get("pid") or 0), m.get("rc"), m.get("signal")
    code = whole(rc, -(1 << 31), 1 << 31)
    if run is None or coord is None or state not in ("started", "exited") or pid is None:
        return None
    if (rc is not None and code is None) or not (signal is None or isinstance(signal, str)):
        return None
    return {
        "op": wire.PROC,
        "run": run,
        "coord": coord,
        "state": state,
        "pid": pid,
        "rc": code,
        "signal": said(signal, 16),
    }


def _halted(m: Mapping[str, Any]) -> dict[str, Any] | None:
    run, nonce, stage = _name(m.get("run")), word(m.get("nonce"), NAME), word(m.get("stage"), 16)
    step = whole(-1 if m.get("step") is None else m["step"], -1)
    texts = {name: m.get(name) for name in ("coord", "checkpoint", "detail", "mode")}
    if run is None or nonce is None or stage is None or step is None:
        return None
    if not all(v is None or isinstance(v, str) for v in texts.values()):
        return None
    found = {"op": wire.HALTED, "run": run, "nonce": nonce, "stage": stage, "step": step}
    found |= {"lacks": wire.lacks_of(m)}
    return found | {name: said(v, 500 if name == "detail" else 128) for name, v in texts.items()}


def _telemetry(m: Mapping[str, Any]) -> dict[str, Any] | None:
    at = real(m.get("ts", 0.0), 0.0, LATEST)
    numbers = {name: real(m.get(name) or 0.0, 0.0) for name in ("cpu", "mem_mib", "disk_free_mib")}
    gpus = m.get("gpus") or []
    if at is None or None in numbers.values() or not isinstance(gpus, list):
        return None
    return {"op": wire.TELEMETRY, "ts": at, **numbers, "gpus": gpus}


_CHECKS: Final[dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]]] = {
    wire.ACK: _acknowledged,
    wire.LINES: _lines,
    wire.REWIND: _rewound,
    wire.DROPPED: _dropped,
    wire.PROC: _process,
    wire.HALTED: _halted,
    wire.TELEMETRY: _telemetry,
}


# -- what acknowledgements carry ---------------------------------------------------------------------------------------


def own(named: object, allowed: Callable[[str], bool], pod: str) -> list[str]:
    """The workers that an acknowledgement names, all of them this pod's own. Raises ProtocolError."""
    listed = named if isinstance(named, list) else [None]
    found = [c for c in listed if isinstance(c, str) and allowed(c)]
    if len(found) != len(listed):
        raise ProtocolError(f"pod {pod} speaks of workers that are not its own", "look at the pod before you go on")
    return found


def workers(ack: Mapping[str, Any], pod: str) -> list[dict[str, Any]]:
    """``{coord, pid, state, rc}`` of each worker in an acknowledgement. Raises ProtocolError for anything else."""
    listed = ack.get("workers")
    found = []
    for w in listed if isinstance(listed, list) else [None]:
        given = w if isinstance(w, Mapping) else {}
        coord, state = word(given.get("coord"), 32), said(given.get("state"), 16)
        pid, rc = whole(given.get("pid") or 0), given.get("rc")
        code = whole(rc, -(1 << 31), 1 << 31)
        if coord is None or pid is None or (rc is not None and code is None):
            raise ProtocolError(f"pod {pod} acknowledged without saying which workers", "look at the pod's agent.log")
        found.append({"coord": coord, "pid": pid, "state": state, "rc": code})
    return found


def listening_at(ack: Mapping[str, Any], pod: str) -> tuple[str, int]:
    """Scheme and port of the URL at which a relay that was just started listens. Raises ProtocolError."""
    found = _URL.fullmatch(str(ack["url"])) if isinstance(ack.get("url"), str) else None
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise ProtocolError(f"pod {pod} started a relay and did not say where", "look at the pod's agent.log")
    return found[1], int(found[2])


def probed(ack: Mapping[str, Any], pod: str) -> dict[str, Any]:
    """What a pod is, each field that preflight reads of its type. Raises ProtocolError naming the first that is not.

    Text is cleaned; what is not known here is left out.
    """

    def wrong(name: str) -> ProtocolError:
        return ProtocolError(f"pod {pod} answered the probe without a usable {name!r}", "bootstrap or replace it")

    def part(name: str) -> dict[str, Any]:
        found = ack.get(name, {})
        if not isinstance(found, Mapping):
            raise wrong(name)
        return tidy(found)

    clock, disk, memory, gpus = part("clock"), part("disk"), part("memory"), ack.get("gpus") or []
    sizes = ("available_mib", "total_mib", "cgroup_limit_mib", "cgroup_used_mib")
    if real(clock.get("ts"), 0.0, LATEST) is None:
        raise wrong("clock")
    if real(disk.get("free_mib"), 0.0) is None:
        raise wrong("disk")
    if any(name in memory and real(memory[name]) is None for name in sizes):
        raise wrong("memory")
    if not isinstance(gpus, list) or len(gpus) > MOST_GPUS or not all(isinstance(g, Mapping) for g in gpus):
        raise wrong("gpus")
    for gpu in gpus:
        if any(gpu.get(n) is not None and real(gpu[n]) is None for n in ("memory_used", "memory_total", ERRORS)):
            raise wrong("gpus")
    imports = ack.get("imports") or {}
    if not isinstance(imports, Mapping):
        raise wrong("imports")
    rest = {name: said(ack.get(name), 500) for name in ("python", "platform", "hostname", "gpu_error") if name in ack}
    return rest | {
        "clock": clock,
        "disk": disk,
        "memory": memory,
        "versions": {name: said(v, 100) for name, v in part("versions").items()},
        "cpus": whole(ack.get("cpus")),
        "gpus": [tidy(g) for g in gpus],
        "imports": tidy(imports),
    }

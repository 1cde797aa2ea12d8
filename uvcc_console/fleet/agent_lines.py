"""An agent's bytes into lines of bounded length, and what its acknowledgements carry, parsed totally.

The lines themselves are read by ``uvcc_engine.contract.agent_protocol.agent_messages``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from uvcc_engine.contract.agent_protocol.agent_messages import LONGEST, MOST_GPUS, WorkerChange, worker
from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.parsing.untrusted import LATEST, as_float, as_int, bounded_copy, scalar_text

ERRORS: Final = "ecc_errors_uncorrected_volatile_total"
_URL: Final = re.compile(r"(https?)://[][A-Za-z0-9_.:-]{1,200}:([0-9]{1,5})/?")


class LineReader:
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


# -- what acknowledgements carry ---------------------------------------------------------------------------------------


def own(named: object, allowed: Callable[[str], bool], pod: str) -> list[str]:
    """The workers that an acknowledgement names, all of them this pod's own. Raises ProtocolError."""
    listed = named if isinstance(named, list) else [None]
    found = [c for c in listed if isinstance(c, str) and allowed(c)]
    if len(found) != len(listed):
        raise ProtocolError(f"pod {pod} speaks of workers that are not its own", "look at the pod before you go on")
    return found


def workers(ack: Mapping[str, Any], pod: str) -> list[WorkerChange]:
    """The workers that an acknowledgement lists. Raises ProtocolError for anything else."""
    listed = ack.get("workers")
    found = [worker(w) for w in listed] if isinstance(listed, list) else [None]
    told = [w for w in found if w is not None]
    if len(told) < len(found):
        raise ProtocolError(f"pod {pod} acknowledged without saying which workers", "look at the pod's agent.log")
    return told


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
        return bounded_copy(found)

    clock, disk, memory, gpus = part("clock"), part("disk"), part("memory"), ack.get("gpus") or []
    sizes = ("available_mib", "total_mib", "cgroup_limit_mib", "cgroup_used_mib")
    if as_float(clock.get("ts"), 0.0, LATEST) is None:
        raise wrong("clock")
    if as_float(disk.get("free_mib"), 0.0) is None:
        raise wrong("disk")
    if any(name in memory and as_float(memory[name]) is None for name in sizes):
        raise wrong("memory")
    if not isinstance(gpus, list) or len(gpus) > MOST_GPUS or not all(isinstance(g, Mapping) for g in gpus):
        raise wrong("gpus")
    for gpu in gpus:
        if any(gpu.get(n) is not None and as_float(gpu[n]) is None for n in ("memory_used", "memory_total", ERRORS)):
            raise wrong("gpus")
    imports = ack.get("imports") or {}
    if not isinstance(imports, Mapping):
        raise wrong("imports")
    rest = {
        name: scalar_text(ack.get(name), 500) for name in ("python", "platform", "hostname", "gpu_error") if name in ack
    }
    return rest | {
        "clock": clock,
        "disk": disk,
        "memory": memory,
        "versions": {name: scalar_text(v, 100) for name, v in part("versions").items()},
        "cpus": as_int(ack.get("cpus")),
        "gpus": [bounded_copy(g) for g in gpus],
        "imports": bounded_copy(imports),
    }

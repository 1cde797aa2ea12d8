"""The vital signs of the folder's machine by what every Linux has: /proc, df, and nvidia-smi where there is one."""

from __future__ import annotations

import re
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_engine.contract.parsing.untrusted import as_float
from uvcc_engine.contract.text import clean

MOST_GPUS: Final = 32
_QUERIED: Final = (
    "index",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
SCRIPT: Final = rf"""
echo VITALS
head -n 1 /proc/stat </dev/null | head -c 300
head -n 60 /proc/meminfo </dev/null | grep -E '^(MemTotal|MemAvailable):'
df -Pk . </dev/null | tail -n 1 | head -c 500
command -v nvidia-smi >/dev/null && \
nvidia-smi --query-gpu={",".join(_QUERIED)} --format=csv,noheader,nounits </dev/null \
| head -n {MOST_GPUS} | sed 's/^/GPU /'
:
"""
_MEMORY: Final = re.compile(r"(MemTotal|MemAvailable): +([0-9]{1,15}) kB")
_DISK: Final = re.compile(r".* [0-9]+ +-?[0-9]+ +([0-9]{1,15}) +[0-9]+% .*")


class VitalSigns:
    """Reads what ``SCRIPT`` printed; the processors' share is that since the last look."""

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self._before: tuple[int, int] | None = None

    def read(self, out: bytes) -> ev.PodTelemetry | None:
        """One look; None where the machine does not say (it has no /proc), or at the first, which has no share yet."""
        text = out.partition(b"VITALS\n")[2].decode(errors="replace")
        busy: tuple[int, int] | None = None
        memory: dict[str, int] = {}
        disk, gpus = None, []
        for line in text.splitlines():
            if line.startswith("cpu "):
                busy = _ticks(line)
            elif m := _MEMORY.fullmatch(line):
                memory[m[1]] = int(m[2])
            elif line.startswith("GPU "):
                gpus += [card] if (card := _card(line[4:])) is not None else []
            elif m := _DISK.fullmatch(line):
                disk = int(m[1]) / 1024
        before, self._before = self._before, busy
        if busy is None or disk is None or len(memory) < 2 or before is None or busy[1] <= before[1]:
            return None
        share = min(1.0, max(0.0, (busy[0] - before[0]) / (busy[1] - before[1])))
        used = max(0, memory["MemTotal"] - memory["MemAvailable"]) / 1024
        return ev.PodTelemetry(pod=self.pod, cpu=share, mem_mib=used, disk_free_mib=disk, gpus=gpus)


def _ticks(line: str) -> tuple[int, int] | None:
    """(busy, all) of a first line of /proc/stat, whose fourth and fifth numbers are idle and waiting for a disk."""
    words = line.split()[1:9]
    if len(words) < 5 or not all(w.isdecimal() and len(w) < 19 for w in words):
        return None
    numbers = [int(w) for w in words]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _card(line: str) -> dict[str, Any] | None:
    cells = [c.strip() for c in line.split(",")]
    if len(cells) != len(_QUERIED) or not cells[0].isdecimal():
        return None
    card: dict[str, Any] = {"index": int(cells[0][:4]), "name": clean(cells[1], 64)}
    for name, cell in zip(_QUERIED[2:], cells[2:], strict=True):
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", cell) and (value := as_float(float(cell))) is not None:
            card[name.replace(".", "_")] = value
    return card

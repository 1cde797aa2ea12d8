"""What this pod is: for the PROBE command and for telemetry. Asks the system and nvidia-smi; imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.machine import host
from uvcc_engine.contract.text import clean

_NUMBERS: Final = ("index", "memory.total", "memory.used", "utilization.gpu", "ecc.errors.uncorrected.volatile.total")
_MEASURES: Final = ("temperature.gpu", "power.draw", "power.limit")
GPU_FIELDS: Final = (
    *("index", "name", "uuid", "memory.total", "memory.used", "utilization.gpu", "driver_version"),
    "ecc.errors.uncorrected.volatile.total",
    *_MEASURES,
)
GPU_PATIENCE_S: Final = 10.0
MOST_GPUS: Final = 64
MOST_SAID: Final = 200  # characters of a cell, or of a complaint
_WHOLE: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_MEASURE: Final = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
PACKAGES: Final = ("torch", "numpy", "cryptography", "safetensors", "asyncssh", "httpx", "starlette", "uvicorn")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of installed packages; those absent are left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def memory_mib() -> dict[str, float]:
    """Total and available memory in MiB, and the cgroup's limit and use where there is one."""
    found = host.memory_mib()
    limit = _first_number("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    used = _first_number("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if limit is not None and limit < 1 << 60:
        found["cgroup_limit_mib"] = round(limit / (1 << 20), 1)
    if used is not None:
        found["cgroup_used_mib"] = round(used / (1 << 20), 1)
    return found


def disk_mib(path: Path) -> dict[str, float]:
    """Total and free space in MiB of the file system that holds ``path``."""
    total, _, free = shutil.disk_usage(path)
    return {"total_mib": round(total / (1 << 20), 1), "free_mib": round(free / (1 << 20), 1)}


def facts(root: Path) -> dict[str, Any]:
    """Everything but the GPUs; takes a few milliseconds."""
    return {
        "python": sys.executable,
        "versions": versions(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpus": os.cpu_count(),
        "cpu_limit": host.cpu_limit(),
        "memory": memory_mib(),
        "disk": disk_mib(root),
        "uid": os.getuid(),
        "clock": {"ts": time.time(), "monotonic": time.monotonic(), "tz": time.strftime("%z")},
        "gpu_tool": shutil.which("nvidia-smi") or "",
    }


class CpuMeter:
    """Share of all processors in use since the last call, 0 to 1."""

    def __init__(self) -> None:
        self._busy, self._all = host.cpu_ticks()

    def share(self) -> float:
        busy, total = host.cpu_ticks()
        used, passed = busy - self._busy, total - self._all
        self._busy, self._all = busy, total
        return round(used / passed, 4) if passed > 0 else 0.0


class GpuQuery:
    """One run of nvidia-smi, without waiting for it."""

    def __init__(self) -> None:
        tool = shutil.which("nvidia-smi")
        self._deadline = time.monotonic() + GPU_PATIENCE_S
        self._process: subprocess.Popen[str] | None = None
        if tool is not None:
            command = [tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",  # a broken driver prints anything, and an agent must outlive it
            )

    def result(self) -> tuple[list[dict[str, Any]], str] | None:
        """The GPUs and what went wrong ("" = nothing), or None while the tool still runs."""
        if self._process is None:
            return [], ""
        if self._process.poll() is None:
            if time.monotonic() < self._deadline:
                return None
            self._process.kill()
            self._process.wait()
            return [], f"nvidia-smi did not answer in {GPU_PATIENCE_S:g} s"
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        self._process.stdout.close()
        if self._process.returncode:
            said = text.strip().splitlines()
            return [], clean(said[-1], MOST_SAID) if said else f"nvidia-smi: {self._process.returncode}"
        return gpus_of(text)


def gpus_of(text: str) -> tuple[list[dict[str, Any]], str]:
    """The cards in what nvidia-smi printed, and what is wrong with it ("" = nothing). Never raises.

    A line that is no card's is passed over where others are; a figure that a card does not tell (``[N/A]``), or that no
    card can have, is None.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    cards = [card for line in lines[:MOST_GPUS] if (card := _gpu(line)) is not None]
    if lines and not cards:
        return [], f"nvidia-smi answered something else: {clean(lines[0], MOST_SAID).strip()}"
    return cards, ""


def _gpu(line: str) -> dict[str, Any] | None:
    cells = [clean(cell.strip(), MOST_SAID) for cell in line.split(",")]
    if len(cells) != len(GPU_FIELDS) or _WHOLE.fullmatch(cells[0]) is None:
        return None
    values: dict[str, Any] = dict(zip(GPU_FIELDS, cells, strict=True))
    for name in _NUMBERS:
        values[name] = int(values[name]) if _WHOLE.fullmatch(values[name]) else None
    for name in _MEASURES:
        values[name] = round(float(values[name]), 1) if _MEASURE.fullmatch(values[name]) else None
    return {k.replace(".", "_"): v for k, v in values.items()}


def _first_number(*paths: str) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None

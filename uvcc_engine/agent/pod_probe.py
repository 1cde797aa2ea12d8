"""What this pod is: for the PROBE command and for telemetry. Asks the system and nvidia-smi; imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.machine import host

_NUMBERS: Final = ("index", "memory.total", "memory.used", "utilization.gpu", "ecc.errors.uncorrected.volatile.total")
_MEASURES: Final = ("temperature.gpu", "power.draw", "power.limit")
GPU_FIELDS: Final = (
    *("index", "name", "uuid", "memory.total", "memory.used", "utilization.gpu", "driver_version"),
    "ecc.errors.uncorrected.volatile.total",
    *_MEASURES,
)
GPU_PATIENCE_S: Final = 10.0
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


def cpu_limit() -> float:
    """Processors this cgroup may use; the affinity's count where it sets no quota."""
    count = float(host.usable_cpus())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return min(count, int(quota) / int(period)) if quota != "max" else count
    except (OSError, ValueError):
        return count


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
        "cpu_limit": cpu_limit(),
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
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
            return [], text.strip().splitlines()[-1] if text.strip() else f"nvidia-smi: {self._process.returncode}"
        return [_gpu(line) for line in text.splitlines() if line.strip()], ""


def _gpu(line: str) -> dict[str, Any]:
    values: dict[str, Any] = dict(zip(GPU_FIELDS, (v.strip() for v in line.split(",")), strict=False))
    for name in _NUMBERS:
        text = str(values.get(name, ""))
        values[name] = int(text) if text.isdigit() else None
    for name in _MEASURES:
        values[name] = _measure(str(values.get(name, "")))
    return {k.replace(".", "_"): v for k, v in values.items()}


def _measure(text: str) -> float | None:
    """A figure that a card may not tell: ``[N/A]`` then."""
    try:
        return round(float(text), 1)
    except ValueError:
        return None


def _first_number(*paths: str) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None

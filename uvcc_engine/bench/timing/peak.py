"""The most memory that a process of a benchmark held."""

from __future__ import annotations

from pathlib import Path


def peak_memory() -> float:
    """VmHWM of this process in bytes; getrusage would also count what the parent held when it forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024.0 for line in lines if line.startswith("VmHWM"))

"""The most memory that a process of a benchmark held."""

from __future__ import annotations

from uvcc_engine.contract.machine import host


def peak_memory() -> float:
    """Of this process, in bytes; getrusage would also count what the parent held when it forked."""
    return host.peak_mib() * (1 << 20)

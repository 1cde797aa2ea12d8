"""What a machine tells of itself and of its processes.

Pods are Linux, and a bare image has nothing but ``/proc``, so that is read where it is. Elsewhere (local pods on an
operator's Mac) psutil answers, which the console's installation brings along; it is imported only there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from uvcc_engine.contract.errors import UvccError

HAS_PROC: Final = os.path.exists("/proc/self/stat")
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_MIB: Final = 1 << 20
_PEAK: Final = re.compile(rb"^VmHWM:[ \t]{1,20}([0-9]{1,15}) kB$", re.MULTILINE)
_MEMINFO: Final = re.compile(rb"^(MemTotal|MemAvailable|MemFree): {0,20}([0-9]{1,15}) kB$", re.MULTILINE)
_CPU: Final = re.compile(rb"cpu((?: +[0-9]{1,18}){5,12})\s*")


@dataclass(frozen=True, slots=True)
class Process:
    """One look at a process: whether it has ended (a zombie has), its group, and its start in clock ticks.

    It has not while any of its threads lives, though its first one may be over: it still holds its memory, its files
    and its GPU, and nobody can be told yet how it ended.

    ``starttime`` counts from the machine's start on Linux and from the epoch elsewhere, and never changes; it is -1
    where the system does not tell, which it may not for a zombie.
    """

    ended: bool
    parent: int
    group: int
    starttime: int


@cache
def boot_id() -> str:
    """Identifies this boot of the machine; "" where the system does not tell."""
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.run(command, capture_output=True, text=True, timeout=5.0).stdout.strip()
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def process(pid: int) -> Process | None:
    """The process of this pid, zombies included; None if there is none."""
    if not HAS_PROC:
        return process_by_psutil(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read().decode(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()  # state, parent, group, ...; threads are the 18th, the start the 20th
    ended = fields[0] in "ZX" and int(fields[17]) <= 1  # a zombie's state is its first thread's
    return Process(ended, int(fields[1]), int(fields[2]), int(fields[19]))


def pids() -> list[int]:
    """Every process that the system shows."""
    if HAS_PROC:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return list(_psutil().pids())


def starttime(found: Any) -> int:
    """The start of a ``psutil.Process`` in clock ticks.

    By what psutil itself tells processes apart: its public ``create_time()`` moves whenever the clock is set, and a
    record that another process wrote would no longer name the same process.
    """
    return round(float(found._proc.create_time(monotonic=True)) * TICKS_PER_S)


def resident_mib() -> float:
    """Resident memory of this process in MiB."""
    if not HAS_PROC:
        return round(float(_psutil().Process().memory_info().rss) / _MIB, 1)
    with open("/proc/self/statm", "rb", buffering=0) as f:
        return round(int(f.read(256).split()[1]) * _PAGE_MIB, 1)


def peak_mib() -> float:
    """The most memory in MiB that this process held, what its parent held when it forked not counted; what it holds
    now where the system does not tell that."""
    if not HAS_PROC:
        return resident_mib()
    with open("/proc/self/status", "rb") as f:
        found = _PEAK.search(f.read(1 << 16))
    return round(int(found.group(1)) / 1024, 1) if found else resident_mib()


def give_back() -> None:
    """Give memory that this process has freed back to the machine, where the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_mib() -> dict[str, float]:
    """``total_mib`` and ``available_mib`` of the machine; 0.0 for what it does not tell.

    Where a kernel or a container's own /proc has no estimate of what is available, what is free counts.
    """
    if not HAS_PROC:
        found = _psutil().virtual_memory()
        return {"total_mib": round(found.total / _MIB, 1), "available_mib": round(found.available / _MIB, 1)}
    try:
        with open("/proc/meminfo", "rb") as f:
            return memory_of(f.read(1 << 16))
    except OSError:
        return memory_of(b"")


def cpu_ticks() -> tuple[float, float]:
    """(busy, all) processor time of the machine since its start; only differences mean something."""
    if not HAS_PROC:
        times = _psutil().cpu_times()
        return float(sum(times) - times.idle), float(sum(times))
    try:
        with open("/proc/stat", "rb") as f:
            return ticks_of(f.readline(1 << 12))
    except OSError:
        return 0.0, 0.0


def memory_of(text: bytes) -> dict[str, float]:
    """``memory_mib`` out of a text like that of /proc/meminfo. Never raises."""
    told = {name: int(kib) / 1024 for name, kib in _MEMINFO.findall(text)}
    total = told.get(b"MemTotal", 0.0)
    available = min(total, told.get(b"MemAvailable", told.get(b"MemFree", 0.0)))
    return {"total_mib": round(total, 1), "available_mib": round(available, 1)}


def ticks_of(line: bytes) -> tuple[float, float]:
    """``cpu_ticks`` out of a line like the first of /proc/stat; zeros where it is none. Never raises."""
    found = _CPU.fullmatch(line)
    if found is None:
        return 0.0, 0.0
    numbers = [int(n) for n in found[1].split()[:8]]
    return float(sum(numbers) - numbers[3] - numbers[4]), float(sum(numbers))


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has taken so far, all its threads; 0.0 if there is none."""
    if not HAS_PROC:
        try:
            times = _psutil().Process(pid).cpu_times()
        except _psutil().Error:
            return 0.0
        return float(times.user + times.system)
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_limit() -> float:
    """Processors this cgroup may use; the affinity's count where it sets no quota."""
    count = float(usable_cpus())
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as f:
            quota, period = f.read().split()[:2]
        return min(count, int(quota) / int(period)) if quota != "max" else count
    except (OSError, ValueError):
        return count


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task")) if HAS_PROC else int(_psutil().Process().num_threads())


def process_by_psutil(pid: int) -> Process | None:
    """``process``, asked of psutil whatever the system. Raises UvccError if psutil is not installed."""
    psutil = _psutil()
    group = -1
    try:
        found = psutil.Process(pid)
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            group = os.getpgid(pid)
        with found.oneshot():
            ended = found.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return Process(ended, found.ppid(), group, starttime(found))
    except psutil.ZombieProcess:  # of which some systems tell nothing more
        return Process(True, -1, group, -1)
    except (psutil.NoSuchProcess, ValueError):  # a pid from a file may be no pid at all
        return None
    except psutil.AccessDenied:
        return Process(False, -1, group, -1)


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise UvccError("this system has no /proc, and psutil is not installed", "pip install psutil") from error
    return psutil

"""How fast this machine multiplies matrices modulo 2^64 by each path: measured once, kept beside the compiled loops.

A file belongs to the processor and to the versions of what computes; for another one it is measured anew. One that
cannot be read is measured anew too, one that cannot be written is done without. Who shares the caches favours another
path: of processes that begin together one measures, and what was measured while others computed is measured anew by one
that begins a minute later.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Final, TextIO

import torch

from uvcc_engine.contract.machine.compiled import loops_folder
from uvcc_engine.contract.machine.compiler_units import compiled_for
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.gemm import gemm_paths, ifma_units, limbs, tile_units

log = logging.getLogger(__name__)
Rates = Mapping[str, tuple[float, ...]]
SIZES: Final = (128, 256, 512)  # the sides of the cubes that are measured
_RUNS: Final = (7, 5, 4)
_SOURCES: Final = (
    "gemm_rates", "gemm_paths", "gemm_loops", "tile_units", "tile_loops", "ifma_units", "ifma_loops", "floats", "limbs",
)  # fmt: skip
PATIENCE_S: Final = 5.0  # so long another one's measuring is waited for
AGAIN_S: Final = 60.0  # a file that was made while others computed is left alone so long
_QUIET: Final = 0.25  # so much of a processor may others use meanwhile
_DISTURBED: Final = "disturbed"
_HOPELESS: Final = 4  # times slower at the smallest size: not measured at the larger ones


def size_class(work: int) -> int:
    """Which of the measured sizes a product of so many multiplications goes by: between two, the nearer power."""
    return sum(work * work >= (smaller * larger) ** 3 for smaller, larger in pairwise(SIZES))


def known(loops: bool) -> Rates:
    """Multiplications per second at each size. Without ``loops`` nothing is measured: that would take as long as the
    work."""
    at = path()
    found = read(at)
    if loops and (found is None or _is_doubtful(at)):
        with _alone(at):
            found = read(at)
            if found is None or _is_doubtful(at):
                watch = OthersWatch()
                found = measure()
                write(at, found, disturbed=watch.others() > _QUIET)
    return found if found is not None else guessed()


class OthersWatch:
    """How much of a processor everybody else has used since this was made; 0 where the system does not tell."""

    def __init__(self) -> None:
        self._wall, self._mine, self._all = time.monotonic(), time.process_time(), _used_s()

    def others(self) -> float:
        """Processor seconds of others for each second."""
        wall = time.monotonic() - self._wall
        used = _used_s() - self._all - (time.process_time() - self._mine)
        return max(0.0, used) / max(wall, 1e-9)


def _used_s() -> float:
    """Processor seconds that this machine has spent on anything, and that its host gave to another."""
    try:
        with Path("/proc/stat").open() as f:
            user, nice, system, _, _, irq, softirq, steal = map(int, f.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _is_doubtful(at: Path) -> bool:
    """Whether a file that could be read was made while others computed, and not just now."""
    try:
        return json_of(at.read_text()).get(_DISTURBED) is True and time.time() - at.stat().st_mtime > AGAIN_S
    except (OSError, ValueError, AttributeError):
        return False


def _wait_for(lock: TextIO) -> None:
    """Until it is ours, or whoever has it takes far longer than measuring does: it may have been stopped there."""
    patience = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > patience:
                raise
        time.sleep(0.02)


@contextmanager
def _alone(at: Path) -> Iterator[None]:
    """Within the block no other process of this machine measures; where nothing can be locked, one might."""
    with ExitStack() as held:
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(at.with_suffix(".lock").open("w"))
            _wait_for(lock)
        except OSError as why:
            log.info("several processes may measure matrix products at once: %s", why)
        yield


def guessed() -> Rates:
    """What the kind of processor suggests."""
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    order = ("floats", "halves", "torch", "wide") if wide else ("torch", "wide", "floats", "halves")
    return {name: (float(k),) * len(SIZES) for k, name in enumerate((*order, "bytes", "ifma", "tiles"))}


def measure() -> Rates:
    """Measure every path that this machine has: a fraction of a second. In processor time, which says the same on a
    machine that does other work at the same time, and in turn, so that what disturbs meets all alike. On one thread, as
    workers compute, and of its time alone: threads that wait for each other count as work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured()
    finally:
        torch.set_num_threads(before)


def _measured() -> Rates:
    names = [name for name in gemm_paths.PATHS if name not in gemm_paths.LOOP_KINDS or LOOPS.get() is not None]
    if not limbs.has_fast_bytes(torch.device("cpu")) or LOOPS.get() is None:
        names.remove("bytes")
    if LOOPS.get() is None or tile_units.loops() is None:
        names.remove("tiles")
    if LOOPS.get() is None or ifma_units.loops() is None:
        names.remove("ifma")
    found = [rates_at(names, SIZES[0], _RUNS[0])]
    hopeful = max(found[0].values()) / _HOPELESS
    # 8-bit units come into their own with the larger ones only
    kept = [name for name in names if found[0][name] >= hopeful or name == "bytes"]
    found += [rates_at(kept, side, runs) for side, runs in zip(SIZES[1:], _RUNS[1:], strict=True)]
    return {name: tuple(rates.get(name, found[0][name]) for rates in found) for name in names}


def rates_at(names: Sequence[str], side: int, runs: int) -> dict[str, float]:
    """Multiplications per second of each path for cubes of this side; the best of so many runs."""
    x, y = (torch.arange(side * side).view(side, side) * factor for factor in (0x5851F42D4C957F2D, -0x61C8864680B583EB))
    best = dict.fromkeys(names, math.inf)
    for k in range(runs + 1):  # the first one warms up
        for name in names:
            begun = time.thread_time()
            gemm_paths.prepared(name, [y])([x])
            if k:
                best[name] = min(best[name], time.thread_time() - begun)
    return {name: float(side**3 / max(seconds, 1e-9)) for name, seconds in best.items()}


def path() -> Path:
    """Where the rates of this machine lie."""
    numba = "none"
    try:
        numba = version("numba")
    except PackageNotFoundError:
        pass
    sources = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in _SOURCES]
    said = [processor_name(), torch.__version__, torch.backends.cpu.get_cpu_capability(), numba, compiled_for()]
    said.append(str(SIZES))
    digest = hashlib.sha256(b"\0".join([*(s.encode() for s in said), *sources])).hexdigest()
    return loops_folder() / f"gemm-{digest[:16]}.json"


def processor_name() -> str:
    """The processor's name and abilities, as far as the system tells."""
    said = [platform.machine(), platform.processor()]
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "|".join(said)
    told = ("model name", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    for line in text.split("\n\n")[0].splitlines():
        if line.split(":")[0].strip() in told:
            said.append(line.strip())
    return "|".join(said)


def read(at: Path) -> Rates | None:
    """What a file says, or None if there is none or it says nothing of use."""
    try:
        raw = json_of(at.read_text())
        rates = {name: tuple(float(rate) for rate in raw[name]) for name in gemm_paths.PATHS if name in raw}
    except (OSError, ValueError, TypeError, LookupError):
        return None
    sane = all(math.isfinite(rate) and rate > 0 for each in rates.values() for rate in each)
    sane = sane and all(len(each) == len(SIZES) for each in rates.values())
    return rates if sane and "torch" in rates else None


def write(at: Path, rates: Rates, *, disturbed: bool) -> None:
    """Keep the rates for other processes, if that can be."""
    try:
        at.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=at.parent, prefix=at.stem)
        with os.fdopen(handle, "w") as f:
            json.dump({**rates, _DISTURBED: True} if disturbed else rates, f)
        os.replace(name, at)
    except OSError as why:
        log.info("the rates of matrix products cannot be kept: %s", why)

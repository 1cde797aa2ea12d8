"""The machine's own rates on one core, in a process of its own: what bounds every row of ``bench mpc``.

``machine_fp64_gemm`` is the BLAS's rate of double-precision products, ``machine_aes`` that of AES-128-GCM over 1 MiB,
``machine_copy`` that of copying memory beyond the caches. ``ring_gemm_*`` are products modulo 2^64, each held against
the double-precision rate of its shape. Runs are taken in turn, and rates are per second of processor time, which other
work on the machine does not change.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from uvcc_engine.bench.launch.parties import one_core
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.benchrows import Row, held, row
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.gemm import gemm

RING_SHARE: Final = 0.2  # of the double-precision rate, that a product modulo 2^64 must have
TRANSPOSED_SHARE: Final = 0.9  # of the plain product's rate
SIZES: Final = (128, 512, 1024)
LEAST_S: Final = 0.02  # a short piece of work is repeated for so long, and the quickest time counts
_MIB: Final = 1 << 20
_BEYOND_CACHES: Final = 64 * _MIB
Rates = dict[str, list[float]]


def measured(runs: int) -> Rates:
    """Name -> rates of the runs, taken in a process that computes on one core. Raises UvccError if it fails."""
    command = [sys.executable, "-m", "uvcc_engine.bench.timing.machine_rates", str(runs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=one_core())
    if done.returncode:
        raise UvccError("the machine's own rates could not be measured", "see what it said above")
    found: Rates = json.loads(done.stdout)
    return found


def rows(rates: Rates) -> list[Row]:
    """As rows of a benchmark."""
    made = [
        row("machine_fp64_gemm", "rate", "GMAC/s", _giga(rates["fp64_1024"])),
        row("machine_aes", "rate", "MB/s", [rate / 1e6 for rate in rates["aes"]]),
        row("machine_copy", "rate", "MB/s", [rate / 1e6 for rate in rates["copy"]]),
    ]
    plain = statistics.median(rates["ring_1024"])
    for name, kind, size in (
        ("ring_gemm_1024", "ring_1024", 1024),
        ("ring_gemm_1024_transposed", "ring_1024_transposed", 1024),
        ("ring_gemm_512", "ring_512", 512),
        ("ring_gemm_128", "ring_128", 128),
    ):
        reference = statistics.median(rates[f"fp64_{size}"])
        bar = TRANSPOSED_SHARE * plain if kind.endswith("transposed") else RING_SHARE * reference
        one = row(name, "rate", "GMAC/s", _giga(rates[kind]), reference / 1e9)
        made.append(held(one, bar / 1e9, at_least=True))
    return made


def _giga(rates: Sequence[float]) -> list[float]:
    return [rate / 1e9 for rate in rates]


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def described(cores: int) -> str:
    """The machine, and how it multiplies matrices modulo 2^64."""
    paths = [gemm.choose(side, side, side) for side in (128, 512)]
    ability = torch.backends.cpu.get_cpu_capability()
    return f"{processor()}, {cores} cores, {ability}; ring products: {paths[0]}, large ones {paths[1]}"


def _works() -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> how much one call does, and the call."""
    made: dict[str, tuple[float, Callable[[], object]]] = {}
    for n in SIZES:
        generator = torch.Generator().manual_seed(n)
        x, y = (torch.randint(-(2**63), 2**63 - 1, (n, n), generator=generator) for _ in range(2))
        a, b = x.double(), y.double()
        made[f"fp64_{n}"] = n**3, lambda a=a, b=b: a @ b  # type: ignore[misc]
        made[f"ring_{n}"] = n**3, lambda x=x, y=y, n=n: gemm.right_factor([y], n)([x])  # type: ignore[misc]
    made["ring_1024_transposed"] = n**3, lambda: gemm.right_factor([y.t()], n)([x.t()])
    cipher, text, nonce = AESGCM(bytes(16)), bytes(_MIB), bytes(12)
    made["aes"] = _MIB, lambda: cipher.encrypt(nonce, text, None)
    source, target = (torch.zeros(_BEYOND_CACHES, dtype=torch.uint8) for _ in range(2))
    made["copy"] = _BEYOND_CACHES, lambda: target.copy_(source)
    return made


def main(argv: Sequence[str]) -> int:
    """``RUNS``: measure, print one JSON object."""
    torch.set_num_threads(1)
    LOOPS.get()
    works = _works()
    rates: dict[str, Any] = {name: [] for name in works}
    for k in range(int(argv[0]) + 1):  # the first one warms up
        for name, (size, work) in works.items():
            best = math.inf
            end = time.process_time() + LEAST_S
            while best is math.inf or time.process_time() < end:
                begun = time.process_time()
                work()
                best = min(best, time.process_time() - begun)
            if k:
                rates[name].append(size / best)
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m docs.make.alternatives [--json]``: what the ways that were not taken cost, as rows of a benchmark.

Local truncation of replicated shares, which is free and sometimes wrong by 2^48, beside the dealer's; what it costs a
process to import torch, and to read one object by pydantic or by our own strict reader; SHA-256 of a message beside
BLAKE3. The rows are kept by
``python -m docs.make.taken alternatives python -m docs.make.alternatives``.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from uvcc_engine.contract.machine import benchrows as rows

RUNS: Final = 5
TRIES: Final = 1 << 14
_IMPORT: Final = """
import resource, sys, time
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
{code}
print(time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * {unit})
"""
_STARTS: Final = {  # pydantic loads most of itself with the first model
    "torch": "import torch",
    "pydantic": "from pydantic import BaseModel\nclass One(BaseModel):\n    step: int\nOne(step=1)",
    "strict": "from dataclasses import dataclass\nfrom uvcc_engine.contract.parsing import strict\n"
    "@dataclass(frozen=True)\nclass One:\n    step: int\nstrict.read(One, {'step': 1}, 'one')",
}
_FAR: Final = 1 << 40
_HASHED: Final = """
import hashlib, time
from blake3 import blake3
message, key = bytes(1 << 16), bytes(32)
found = []
for take in (lambda: hashlib.sha256(message).digest(), lambda: blake3(message, key=key).digest()):
    began = time.process_time()
    for _ in range(500):
        take()
    found.append(500 * len(message) / 1e6 / (time.process_time() - began))
print(*found)
"""
_NO_EXTENSIONS: Final = {"OPENSSL_ia32cap": ":~0x20000000"}  # OpenSSL leaves x86's instructions for SHA alone


def local_truncation(seed: int = 7) -> int:
    """How many of ``TRIES`` numbers of size 2^60 are wrong by more than 2^40 if two parts drop their bits alone."""
    draw, wrong = random.Random(seed), 0
    for _ in range(TRIES):
        z = draw.randrange(1 << 60)
        one = draw.randrange(1 << 64)
        other = (z - one) % (1 << 64)
        # each part as a signed number, without its lower 16 bits, as SecureML has it
        parts = sum((p - (1 << 64) if p >> 63 else p) >> 16 for p in (one, other))
        wrong += abs(parts - (z >> 16)) > _FAR
    return wrong


def dealt_truncation(seed: int = 7) -> float:
    """The largest error, in units of the last bit, of as many truncations by the dealer."""
    import torch

    from uvcc_engine.mpc.foundation.local import LocalPlanes
    from uvcc_engine.mpc.foundation.opening import open_ring_protocol
    from uvcc_engine.mpc.foundation.share import Share, share_of
    from uvcc_engine.mpc.products.arithmetic import rescale_protocol

    gen = torch.Generator().manual_seed(seed)
    z = torch.randint(1 << 60, (TRIES,), generator=gen)
    first, second = (torch.randint(-(1 << 62), 1 << 62, (TRIES,), generator=gen) for _ in range(2))
    parts = (first, second, z - first - second)

    def body(rt: object) -> torch.Tensor:
        mine: Share = share_of(parts, rt.party, 32)  # type: ignore[attr-defined]
        made = rt.run(rescale_protocol(rt, mine, 16))  # type: ignore[attr-defined, arg-type]
        opened: torch.Tensor = rt.run(open_ring_protocol(rt, made))  # type: ignore[attr-defined, arg-type]
        return opened

    found = LocalPlanes(seed).run_three(body)[0]
    return float((found - (z >> 16)).abs().max())


def started(code: str) -> tuple[list[float], list[float]]:
    """Processor seconds and bytes of some code in a fresh process, of each run."""
    unit = 1 if sys.platform == "darwin" else 1024
    said = [
        subprocess.run(
            [sys.executable, "-c", _IMPORT.format(code=code, unit=unit)], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(RUNS)
    ]
    return [float(s) for s, _ in said], [float(b) for _, b in said]


def hashed(environment: Mapping[str, str]) -> tuple[float, float]:
    """MB of messages of 64 KiB that SHA-256 and keyed BLAKE3 take in a second of processor time."""
    command = [sys.executable, "-c", _HASHED]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    sha256, blake3 = map(float, said.stdout.split())
    return sha256, blake3


def main(argv: list[str]) -> int:
    """Print the rows. Returns the exit code."""
    found = []
    for name, code in _STARTS.items():
        seconds, size = started(code)
        found.append(rows.row(f"{name}_import", "time", "s", seconds))
        found.append(rows.row(f"{name}_import", "memory", "MiB", [b / 2**20 for b in size]))
    sha256, blake3 = zip(*(hashed({}) for _ in range(RUNS)), strict=True)
    plain = [hashed(_NO_EXTENSIONS)[0] for _ in range(RUNS)]
    found += [
        rows.row("hash_sha256", "rate", "MB/s", list(sha256)),
        rows.row("hash_sha256_no_extensions", "rate", "MB/s", plain),
        rows.row("hash_blake3", "rate", "MB/s", list(blake3)),
    ]
    found += [  # last: a child counts the memory of whoever starts it, and this imports torch
        rows.row("local_truncation", "tries", "numbers", [float(TRIES)]),
        rows.row("local_truncation", "wrong", "numbers", [float(local_truncation())], TRIES / 32),
        rows.row("dealt_truncation", "largest_error", "ulp", [dealt_truncation()], 1.0),
    ]
    print(rows.to_json(found) if "--json" in argv else rows.to_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

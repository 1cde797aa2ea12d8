"""What a data owner shares never lies whole in its memory: a file many times as long takes hardly more of it.

By hand, ``UVCC_SHARE_MB=1000`` shares a gigabyte of CSV: at most 300 MiB, and it says how fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import TOKENS, relay_of
from test_data_owner import FEATURES, OWNER_TOKENS, Gathering

SHORT_MB, LONG_MB = 6, int(os.environ.get("UVCC_SHARE_MB", "30"))
GROWTH_MIB = 8.0  # a third of what the longer file has more; buffers, and what the allocator keeps
LARGEST_MIB = 300.0
# Linux's own figure: ru_maxrss counts what was there before the program was
PROGRAM = """
import resource, sys
from uvcc_console.cli.main import main
code = main(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print("peak", peak, used[1].ru_maxrss, sum(u.ru_utime + u.ru_stime for u in used), file=sys.stderr)
sys.exit(code)
"""

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.timeout(600 + 4 * LONG_MB),
]


class Shared(NamedTuple):
    """MiB of the program and of the one that seals, processor seconds of both, seconds, and 10^6 bytes of the file."""

    sends: float
    seals: float
    cpu: float
    took: float
    mb: float


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Gathering]:
    people = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"owner": n, "group": "g", "token": t} for n, t in enumerate(OWNER_TOKENS)]
    with relay_of(tmp_path, people, quota_bytes=16 << 30) as url:
        yield Gathering(tmp_path, url, monkeypatch, capsys)


def _write(path: Path, mb: int) -> float:
    """Rows of numbers with all their digits; 10^6 bytes that were written."""
    table = np.random.default_rng(5).normal(size=(4096, FEATURES)).tolist()
    block = "".join(",".join(map(repr, row)) + f",{n % 2}\n" for n, row in enumerate(table))
    with path.open("w") as file:
        while file.tell() < mb * 1_000_000:
            file.write(block)
        return file.tell() / 1e6


def _share(owner: Gathering, mb: int) -> Shared:
    """Have the first owner, alone in a proposal of its own, share a file of this length."""
    owner.proposal = owner.propose(owners=(owner.owners[0].public.ed25519,))
    owner.rosters()
    assert owner.at(0, "requests") == 0
    path = owner.root / "o0" / "long.csv"
    length = _write(path, mb)
    command = ["owner", "share", owner.proposal.id, "--data", str(path), "--yes", *owner.relay(0)]
    env = os.environ | {"UVCC_HOME": str(owner.root / "o0"), "TERM": "dumb"}
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], env=env, capture_output=True, text=True)
    path.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    sends, seals, cpu = map(float, done.stderr.rpartition("peak ")[2].split())
    return Shared(sends / 1024, seals / 1024, cpu, time.monotonic() - begun, length)


@pytest.mark.ci("tests/console/federation/test_data_owner.py")
def test_memory_does_not_grow_with_the_file(owner: Gathering) -> None:
    short, long = _share(owner, SHORT_MB), _share(owner, LONG_MB)
    print(f"{long}: {long.mb / long.took:.1f} MB/s, {long.mb / long.cpu:.1f} MB per processor second")
    assert max(long.sends, long.seals) <= LARGEST_MIB
    if LONG_MB <= 64:  # a longer one's allocator keeps a little more
        assert long.sends - short.sends <= GROWTH_MIB
        assert long.seals - short.seals <= GROWTH_MIB

"""One rank of the benchmark of a party's own traffic: ``-m uvcc_engine.bench.party.sister_rank CONFIG RANK``.

Two ranks meet as replicas on two machines would, or in clear over gloo; both add up a block of ``bytes`` and pass
values through the store. Prints one JSON object of lists of seconds, and the rate of AES-256-GCM on this core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.meeting import BACKEND_VARIABLE
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.transcript.signing.identity import Identity

SIZE: Final = Topology(2)
STORE_CALLS: Final = 200
_SID: Final = b"bench party traffic".ljust(32, b"\0")
_MIB: Final = 1 << 20


def main(argv: list[str]) -> int:
    config, rank = json.loads(Path(argv[0]).read_text()), int(argv[1])
    torch.set_num_threads(1)
    sealed = bool(config["sealed"])
    os.environ[BACKEND_VARIABLE] = "sealed" if sealed else "gloo"
    pods = [Identity(bytes([7 + r] * 32), bytes([9 + r] * 32)) for r in range(SIZE.replicas)]
    keys = PartyKeys.of(pods[rank], [pod.public for pod in pods], _SID, 0, SIZE) if sealed else None
    place = RankAddress(Coord(rank, 0, 0, 0), SIZE, "127.0.0.1", int(config["port"]))
    began = time.perf_counter()
    groups = PartyGroups.open(place, on_event=lambda name, fields: None, timeout_s=60.0, keys=keys)
    met = time.perf_counter() - began
    groups.start_dp()
    block = torch.arange(config["bytes"] // 8) << 20
    sums = _timed(lambda: groups.dp.sum_(block), int(config["runs"]))
    word = torch.ones(8, dtype=torch.int64)
    small = _timed(lambda: groups.dp.sum_(word), STORE_CALLS)
    groups.gather(b"")
    store: list[float] = []
    if rank == 1:  # the one that the store is not beside
        store = _timed(lambda: _ask(groups), STORE_CALLS)
    groups.gather(b"")
    found: dict[str, Any] = {"met": [met], "sums": sums, "small": small, "store": store, "aes": _aes_rate()}
    groups.close()
    print(json.dumps(found))
    return 0


def _ask(groups: PartyGroups) -> None:
    groups.store.set("bench", b"x" * 64)
    groups.store.get("bench")


def _timed(work: Callable[[], object], runs: int) -> list[float]:
    work()
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def _aes_rate() -> float:
    cipher, body, out, best = AESGCM(bytes(32)), bytes(_MIB), bytearray(_MIB + 16), float("inf")
    for _ in range(20):
        began = time.perf_counter()
        cipher.encrypt_into(bytes(12), body, None, out)
        best = min(best, time.perf_counter() - began)
    return _MIB / best


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

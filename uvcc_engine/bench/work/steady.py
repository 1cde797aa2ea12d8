"""A relay, and three parties that train steadily once they are told to: for who has no import of either.

``python -m MODULE LATENCY_S SECONDS`` prints a line of JSON, ``{"url": ..., "pid": ..., "tokens": {party: token}}``
of the relay. A line on its
input begins the training; then it prints what every party said of its steps (``bench.party.steady_party``) and ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from uvcc_engine.bench.launch.parties import said_by
from uvcc_engine.bench.launch.plane_links import relay
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.free_ports import ports


def main() -> int:
    latency_s, seconds = float(sys.argv[1]), float(sys.argv[2])
    with relay() as running:
        print(json.dumps({"url": running.url, "pid": running.process.pid, "tokens": running.tokens}), flush=True)
        if not sys.stdin.readline():
            return 1  # nobody is left who could ask
        at = {str(p): f"127.0.0.1:{port}" for p, port in enumerate(ports(PARTIES))}
        faults: dict[str, Any] = {"faults": {"latency_s": latency_s}} if latency_s else {}
        links = [{"kind": "direct", "listen": at[str(p)], "peers": at, **faults} for p in range(PARTIES)]
        config = {"model": "mlp-digits", "batch": 128, "links": links, "seconds": seconds, "few_rounds": latency_s > 0}
        print(json.dumps(said_by("steady_party", config)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Row ``hidden_20ms`` of ``bench parallel``: how much of the wait for messages disappears behind compute.

Three parties, 20 ms one way between them, train one model twice: with one microbatch in work at a time, then with all
of them. Hidden is the share of the first one's wait for messages that is no wait any more, at the party where it is
least; the reference is the bar. ``computing_20ms`` is the share of a step in which its thread does not wait.
"""

from __future__ import annotations

from typing import Final

from uvcc_engine.bench.launch.parties import said_by
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.contract.machine.free_ports import ports

LATENCY_S: Final = 0.02
BAR: Final = 0.6
_LIMIT_S: Final = 180


def hidden_rows(*, microbatches: int = 8, batch: int = 4096, steps: int = 3, model: str = "secureml-a") -> list[Row]:
    """Both shares at the party where they are least, and the steps' seconds. Raises UvccError if a party fails."""
    found = ports(PARTIES)
    peers = {str(p): f"127.0.0.1:{port}" for p, port in enumerate(found)}
    links = [
        {"kind": "direct", "listen": peers[str(p)], "peers": {q: a for q, a in peers.items() if q != str(p)}}
        for p in range(PARTIES)
    ]
    config = {
        "model": model,
        "steps": steps,
        "batch": batch,
        "microbatches": microbatches,
        "latency_s": LATENCY_S,
        "links": links,
    }
    said = said_by("overlap_party", config, _LIMIT_S)
    alone, together = ([one[str(k)] for one in said] for k in (1, microbatches))
    shares = [
        min(1.0 - waits / before for (_, waits), (_, before) in zip(t, a, strict=True))
        for t, a in zip(zip(*together, strict=True), zip(*alone, strict=True), strict=True)
    ]
    return [
        row("hidden_20ms", "share", "wait", shares, BAR),
        row(
            "computing_20ms", "share", "step", [min(1.0 - w / t for t, w in one) for one in zip(*together, strict=True)]
        ),
        row(
            "step_20ms",
            "seconds",
            "s",
            [max(t for t, _ in one) for one in zip(*together, strict=True)],
            max(t for one in alone for t, _ in one),
        ),
    ]

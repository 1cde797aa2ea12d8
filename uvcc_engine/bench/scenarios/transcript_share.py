"""Rows ``transcript.step.*`` of ``bench transcript``: what the transcript costs a real secret-shared training step.

Three processes train over sealed links; a step without the transcript, one with it, and one with it whose parts are
timed take turns, so that what the machine does meanwhile meets all alike. ``demo`` is the demonstration's step over its
own relay. All three parties share this host's processors, which no deployment does; ``_direct`` goes without any
latency, which none has;
``_20ms`` is a step between providers that lie 20 ms apart. Where nothing takes time on the way the step has the more
rounds and fewer bytes that ``job.rounds: auto`` chooses on local pods, else the fewer rounds.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

from blake3 import blake3

from uvcc_engine.bench.launch.parties import said_by
from uvcc_engine.bench.launch.plane_links import relay
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.machine.turns import ratio

BAR: Final = 0.03
SLOWDOWN_BAR: Final = 1.08
"""Of the demonstration's step, by the clock and by processor time: three parties and a relay on one host."""
JOBS: Final = {
    "demo": ("mlp-digits", "relay", 0.0),
    "demo_direct": ("mlp-digits", "direct", 0.0),
    "demo_20ms": ("mlp-digits", "direct", 0.02),
    "secureml_direct": ("secureml-a", "direct", 0.0),
    "secureml_20ms": ("secureml-a", "direct", 0.02),
}
_BATCH: Final = 128
_LIMIT_S: Final = 150
MeasuredRound = list[dict[str, Any]]


@contextlib.contextmanager
def _links(kind: str, latency_s: float) -> Iterator[list[dict[str, Any]]]:
    """The parties' link settings, and the relay for as long as it is needed."""
    if kind == "relay":
        with relay() as running:
            yield running.links(kind)
        return
    peers = {str(p): f"127.0.0.1:{port}" for p, port in enumerate(ports(PARTIES))}
    faults = {"faults": {"latency_s": latency_s}} if latency_s else {}
    yield [{"kind": kind, "listen": peers[str(p)], "peers": peers, **faults} for p in range(PARTIES)]


def run_parties(model: str, link: str, latency_s: float, rounds: int) -> list[list[MeasuredRound]]:
    """By party and round: what the step without and the steps with the transcript took. Raises UvccError."""
    with _links(link, latency_s) as links:
        config = {"model": model, "batch": _BATCH, "rounds": rounds, "links": links, "few_rounds": latency_s > 0}
        return said_by("share_party", config, _LIMIT_S)


def share_rows(name: str, rounds: int) -> list[Row]:
    """The rows of one job: the slow-down by the clock and by the processor time of the three parties together, which
    does not depend on who else wants the processors (``slowdown_cpu``); and, as shares of the step, the processor time
    of recording, hashing and finalising in the thread that trains (``recording``), of what of that it does while it
    waits for another party, which holds nobody up (``waiting``), of hashing beside it (``beside``), and of signing and
    checking (``agreeing``); ``recording_cpu`` is the first two as a share of the step's processor time. ``accounted``
    is all four, of the three parties together, as a share of the processor time of the step without the transcript:
    what of ``slowdown_cpu`` has a name. ``hashing``, a part of it, is the least that the format costs: BLAKE3 of every
    message, once at each end, at this machine's rate."""
    rounds_of = [list(r) for r in zip(*run_parties(*JOBS[name], rounds), strict=True)]
    off = [max(party[0]["wall"] for party in r) for r in rounds_of]
    on = [max(party[1]["wall"] for party in r) for r in rounds_of]
    cpu_off, cpu_on = ([sum(party[with_]["cpu"] for party in r) for r in rounds_of] for with_ in (0, 1))
    at = f"transcript.step.{name}"

    def share(part: str, of: str, other: str = "") -> list[float]:
        """The share of time that the transcript takes, at the party where it is largest, of the step that is timed."""
        return [max((p[2][part] + p[2].get(other, 0.0)) / p[2][of] for p in r) for r in rounds_of]

    return [
        _slowdown(f"{at}.slowdown", on, off),
        _slowdown(f"{at}.slowdown_cpu", cpu_on, cpu_off),
        row(f"{at}.recording", "share", "step", share("recording", "wall"), BAR),
        row(f"{at}.recording_cpu", "share", "processor time", share("recording", "cpu", "waiting")),
        row(f"{at}.accounted", "share", "processor time", _accounted(rounds_of, cpu_off)),
        row(f"{at}.waiting", "share", "step", share("waiting", "wall")),
        row(f"{at}.beside", "share", "step", share("beside", "wall")),
        row(f"{at}.hashing", "share", "processor time", _hashing(rounds_of, cpu_off)),
        row(f"{at}.agreeing", "share", "step", share("agreeing", "wall"), BAR),
        row(f"{at}.leaves", "rate", "leaves/step", [float(r[0][2]["leaves"]) for r in rounds_of]),
    ]


def _accounted(rounds_of: list[list[MeasuredRound]], cpu_off: list[float]) -> list[float]:
    """By round: the processor time of all parts that are timed, at all parties, over that of the step without."""
    parts = ("recording", "waiting", "beside", "agreeing")
    named = [sum(party[2][part] for party in r for part in parts) for r in rounds_of]
    return [took / cpu for took, cpu in zip(named, cpu_off, strict=True)]


def _hashing(rounds_of: list[list[MeasuredRound]], cpu_off: list[float]) -> list[float]:
    """By round: the processor time of BLAKE3 alone over that of the step without the transcript."""
    each_s = 1 / digest_rate()
    hashed = [sum(party[2]["hashed"] for party in r) for r in rounds_of]
    return [size * each_s / cpu for size, cpu in zip(hashed, cpu_off, strict=True)]


def digest_rate() -> float:
    """Bytes of messages of 64 KiB that keyed BLAKE3 takes in a second of processor time; the best of a few tries."""
    message, key, best = bytes(1 << 16), bytes(32), math.inf
    for _ in range(200):
        begun = time.process_time()
        blake3(message, key=key).digest()
        best = min(best, time.process_time() - begun)
    return len(message) / best


def _slowdown(name: str, on: list[float], off: list[float]) -> Row:
    """How much longer a step is with the transcript than without: the median over rounds and its interval.

    The reference is the step without it, in seconds.
    """
    found = ratio(on, off)
    return Row(name, "ratio", found.value, "with/without", len(on), found.low, found.high, statistics.median(off))

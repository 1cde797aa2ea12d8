"""How long a step will take, by what three processes took for it on this machine, and where the run's pods are. Pure.

Local pods share this machine's processors, so a step takes what the processes took by the clock, and longer with more
replicas once the processors are full. Pods elsewhere have processors of their own and lie apart: there a step takes its
rounds, its bytes and the processor time of the party that has most to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.machine.link_time import link_time

CONSOLE: Final = 0.1
"""What conductor, sidecar, agents and screen take of one processor while a run goes on: measured in rollouts on two
processors, steps of 0.08 to 0.6 s (0.09, 0.10, 0.06 of one)."""
LEAST: Final = 0.25
"""No range is narrower, of the value to each side: a few steps know nothing of what else the machine will do."""


@dataclass(frozen=True, slots=True)
class StepForecast:
    """Seconds of a step, the range that they will lie in, and what of them passes on the links."""

    seconds: float
    low: float
    high: float
    network_s: float

    @classmethod
    def of(cls, seconds: float, low: float, high: float, network_s: float) -> StepForecast:
        """The range holds at least ``LEAST`` of the value to each side."""
        return cls(seconds, min(low, seconds * (1.0 - LEAST)), max(high, seconds * (1.0 + LEAST)), network_s)


def here(step: Mapping[str, Any], replicas: int) -> StepForecast:
    """On local pods. What the processes took holds what their links took, and whatever else the machine did meanwhile.

    A replica more than were rehearsed takes its processor time, shared by all processors, and one less saves it. The
    range goes from that time without any waiting, as on a machine that does nothing else, to the slowest steps while it
    did what it did.
    """
    took = step["processes"]
    cores, of_replica = float(took["cores"]), float(took["all_cpu"]) / int(took["replicas"])
    more = (replicas - int(took["replicas"])) * of_replica / cores
    slower = 1.0 / (1.0 - CONSOLE / max(cores, 1.0))

    def of(wall: float) -> float:
        return (wall + more) * slower

    full = replicas * of_replica / cores * slower
    return StepForecast.of(
        seconds=max(full, of(float(took["wall"]))),
        low=full,
        high=max(full, of(float(took["high"]))),
        network_s=0.0,
    )


def apart(step: Mapping[str, Any], rtt_s: float, bytes_s: float) -> StepForecast:
    """On pods whose processors are as fast as these, ``rtt_s`` there and back between two parties, ``bytes_s`` of each.

    Where a party has several workers, the delay is that of the longest chain of their messages, and the bytes are those
    of a pod; always those of the party that sends most, for whose line the others wait. At most, computing takes what
    all of them took with these processors shared.
    """
    took, fleet = step["processes"], step.get("fleet")
    rounds, sent = (fleet["chain"], fleet["pod_bytes"]) if fleet else (step["rounds"], step["bytes"])
    network = link_time(float(rounds), float(sent) * float(step["busiest"]), rtt_s / 2, bytes_s).total_s
    alone, shared = float(took["party_cpu"]), float(took["high"])
    return StepForecast.of(network + alone, network + alone, network + max(alone, shared), network)

"""What a step's messages take at least on the links between two domains. Standard library only.

The benchmarks' passive floor, the plan's forecast and the page of how cost grows all count by this.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds: ``delay_s`` of rounds that follow each other, ``transfer_s`` of the bytes, one after the other."""

    delay_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        """Nothing is hidden behind anything."""
        return self.delay_s + self.transfer_s


def link_time(rounds: float, sent_bytes: float, one_way_s: float, bytes_s: float) -> LinkTime:
    """Of ``rounds`` and of the ``sent_bytes`` of one worker, over links of ``bytes_s`` bytes a second.

    In a round the parties' messages are on their way at the same time, so it takes ``one_way_s``: half a round trip.
    """
    return LinkTime(rounds * one_way_s, sent_bytes / bytes_s)

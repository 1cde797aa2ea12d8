"""What an endpoint and its link agree on: when things happen, and what a frame on its way out looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.channel import Timing

_CLS_AT: Final = 5  # of the class in a frame header


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """When things happen, in seconds and frames. Links choose: a relay is slower to answer than a socket."""

    timing: Timing = field(default_factory=Timing)
    hello_s: float = 0.25  # between repeats of a handshake frame, doubling up to hello_cap_s
    hello_cap_s: float = 4.0
    ping_s: float = 2.0
    ack_delay_s: float = 0.02
    ack_frames: int = 32
    rekey_frames: int = 1 << 20
    pack_bytes: int = fr.PACK_FRAME  # a packed frame is closed at this size; a window must hold several


class Outgoing(NamedTuple):
    """A frame to put on the wire.

    ``slot`` 0: to be stored until it is delivered, under the name ``key``. Otherwise only the newest of its slot is
    worth anything, and none after a while.
    """

    buffers: tuple[Buffer, ...]
    size: int
    slot: int
    key: tuple[int, int, int, int]  # session, stream, seq, try


def passing(raw: bytes) -> Outgoing:
    return Outgoing((raw,), len(raw), raw[_CLS_AT], (0, 0, 0, 0))


@dataclass(slots=True)
class Counters:
    """What happened with one peer so far.

    ``rejected``: damaged or forged, dropped unread; ``stale``: of a session or an acknowledgement that is over.
    ``retransmits`` and ``duplicates``: of channels that have ended; those that live count for themselves.
    """

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    rejected: int = 0
    stale: int = 0
    retransmits: int = 0
    duplicates: int = 0

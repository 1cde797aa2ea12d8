"""A stream of messages, and with it a runtime, for every pass of a microbatch; and how many are in work at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.parallel.pipeline import BACKWARD
from uvcc_engine.proofs.instalments import in_instalments, share_of_bound

IN_FLIGHT: Final = 8
IN_FLIGHT_VARIABLE: Final = "UVCC_MICROBATCHES_IN_FLIGHT"
_MOST: Final = 62  # those that go on are bits of a number
MainRuntime = Callable[[int], Runtime]


def in_flight(env: Mapping[str, str]) -> int:
    """How many microbatches a worker has in work at a time. Changes how long a step takes and what memory, only.

    Raises ConfigError on anything but a positive number.
    """
    said = env.get(IN_FLIGHT_VARIABLE, str(IN_FLIGHT))
    if not said.isdecimal() or not 1 <= int(said) <= _MOST:
        raise ConfigError(f"{IN_FLIGHT_VARIABLE} is {said!r}", f"give a number from 1 to {_MOST}")
    return int(said)


def stream_of(direction: str, microbatch: int) -> int:
    """The stream of one pass: 1 + 2 m forwards, 2 + 2 m backwards; 0 is everything else."""
    return 1 + 2 * microbatch + (direction == BACKWARD)


class StreamRuntimes:
    """A runtime for every stream of an epoch: the main one, and one per microbatch and direction."""

    def __init__(self, make: MainRuntime, main: Runtime, microbatches: int = 1, *, instalments: bool = False) -> None:
        self.main = main
        self._streams, self._in_instalments = 2 * microbatches + 1, instalments
        self._make = make
        self._others: dict[int, Runtime] = {}

    def of(self, direction: str, microbatch: int) -> Runtime:
        """The runtime on which a microbatch passes forward or backward; made at its first use."""
        stream = stream_of(direction, microbatch)
        if stream not in self._others:
            made = self._others[stream] = self._make(stream)
            if self.main.ledger is not None:
                made.ledger = ClaimLedger(everything=self.main.ledger.everything, sisters=True)
                if self._in_instalments:
                    in_instalments(made, self.main.ledger, share_of_bound(self._streams))
        found = self._others[stream]
        if found.epoch != self.main.epoch:
            found.begin_epoch(self.main.epoch)
        if self.main.ledger is not None:
            self.main.ledger.hold_openings()
        return found

    def collect_claims(self) -> None:
        """Put the claims of all streams into the main ledger, where they are proved: by stream, whatever pass ended
        first, since the order of the claims must be that of the other two parties."""
        for stream in sorted(self._others):
            ledger = self._others[stream].ledger
            if ledger is not None and self.main.ledger is not None:
                self.main.ledger.take_in(ledger)

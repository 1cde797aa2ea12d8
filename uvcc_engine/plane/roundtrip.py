"""How long an acknowledgement takes, as it was measured: when to send again (RFC 6298, Karn's rule)."""

from __future__ import annotations

from typing import Final

_GAIN: Final = (1 / 8, 1 / 4)  # of the mean and of the deviation (RFC 6298, section 2)
_DEVIATIONS: Final = 4


class RoundTrip:
    """Estimates the wait of one peer. Until the first measurement it is ``first_s``, then never less than ``floor_s``.

    A floor of 0: never less than ``first_s``.
    """

    def __init__(self, first_s: float, floor_s: float) -> None:
        self.timeout_s = first_s
        self.mean_s: float | None = None  # of what was measured so far
        self._floor = floor_s or first_s
        self._deviation = 0.0
        self.doublings = 0  # of the wait, since something was measured: how often it was over

    def measured(self, seconds: float) -> None:
        """A frame that was sent once has been acknowledged after ``seconds``."""
        if self.mean_s is None:
            self.mean_s, self._deviation = seconds, seconds / 2
        else:
            self._deviation += _GAIN[1] * (abs(seconds - self.mean_s) - self._deviation)
            self.mean_s += _GAIN[0] * (seconds - self.mean_s)
        self.doublings = 0
        self.timeout_s = max(self._floor, self.mean_s + _DEVIATIONS * self._deviation)

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
        self._floor = floor_s or first_s
        self._mean: float | None = None
        self._deviation = 0.0

    def measured(self, seconds: float) -> None:
        """A frame that was sent once has been acknowledged after ``seconds``."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
        else:
            self._deviation += _GAIN[1] * (abs(seconds - self._mean) - self._deviation)
            self._mean += _GAIN[0] * (seconds - self._mean)
        self.timeout_s = max(self._floor, self._mean + _DEVIATIONS * self._deviation)

"""How long an API has been silent: told while it is still asked again, for which minutes may be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from uvcc_console.fleet.cloud.clock import Clock

SILENT_S = 10.0


@dataclass(slots=True)
class Silence:
    """Since when there was no usable answer, and what came instead. Several calls may be under way at a time."""

    clock: Clock
    _since: float | None = None
    _asking: int = 0
    _trouble: str = ""

    @contextmanager
    def asking(self, repeats: bool) -> Iterator[None]:
        """A call is under way. ``repeats``: it is answered at once where all is well; a create may take its time."""
        if repeats:
            self._since = self.clock.now() if self._since is None else self._since
            self._asking += 1
        try:
            yield
        finally:
            if repeats:
                self._asking -= 1
                if not self._asking and not self._trouble:
                    self._since = None

    def answered(self) -> None:
        """It speaks, whatever it said."""
        self._since, self._trouble = (self.clock.now() if self._asking else None), ""

    def failed(self, trouble: str) -> None:
        """A try came to nothing."""
        self._since = self.clock.now() if self._since is None else self._since
        self._trouble = trouble

    def words(self, api: str) -> str:
        """What an operator should know of it; empty while there is nothing to tell."""
        if self._since is None or self.clock.now() - self._since < SILENT_S or not (self._asking or self._trouble):
            return ""
        why = f" ({self._trouble})" if self._trouble else ""
        return f"{api} has given no usable answer for {self.clock.now() - self._since:.0f} s{why}; it is asked again"
